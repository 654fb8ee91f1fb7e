// Bytes and integers for exact dot products, the same on every instruction set.
#pragma once

#include PENSTOCK_BYTES_HEADER
#include "prefetch.h"
