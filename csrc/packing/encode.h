// The block formats whose scales have to be searched for, which this library therefore encodes itself.
#pragma once

#include "packing/block_formats.h"

namespace penstock {

constexpr bool has_encoder(BlockFormat format) {
    return (format >= BlockFormat::q2_k && format <= BlockFormat::q6_k) || format == BlockFormat::iq4_nl ||
           format == BlockFormat::iq4_xs;
}

}  // namespace penstock
