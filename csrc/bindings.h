// The parts of the Python module that have files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace penstock {

void bind_packed(nanobind::module_& m);   // PackedMatrix
void bind_program(nanobind::module_& m);  // Program, Step, KvLayout, KvBuffers

}  // namespace penstock
