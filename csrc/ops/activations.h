// Activations as the integer kernels take them: 8 bits, one scale for 32 inputs of one row.
#pragma once

#include <cmath>

#include "ops/inputs.h"
#include "vec/bytes.h"

namespace penstock::PENSTOCK_ISA {

static inline std::int64_t spans_of(std::int64_t cols) { return (cols + span_inputs - 1) / span_inputs; }

// value = x · 127 / greatest magnitude, to the nearest. Magnitudes that are zero or not finite give values of zero and
// that magnitude as scale, so that a NaN or infinity among the inputs reaches the outputs.
static inline void quantise_unit(const float* x, std::int64_t unit, ActivationSpan& out) {
    const float most = vec::most_absolute(x), scale = most / 127.0f;
    const bool usable = most > 1e-36f && most < INFINITY;
    std::int32_t low = 0, high = 0;
    if (usable) {
        const float inverse = 127.0f / most;
        low = vec::store16_rounded(out.value + unit * 32, x, inverse);
        high = vec::store16_rounded(out.value + unit * 32 + 16, x + 16, inverse);
    } else {
        __builtin_memset(out.value + unit * 32, 0, 32);
    }
    out.scale[unit] = scale;
    out.sum16[2 * unit] = low;
    out.sum16[2 * unit + 1] = high;
    out.sum32[unit] = low + high;
    out.total16[2 * unit] = scale * static_cast<float>(low);
    out.total16[2 * unit + 1] = scale * static_cast<float>(high);
    out.total32[unit] = scale * static_cast<float>(low + high);
}

// One span of one row, x the whole row of `cols` inputs, taken in the order of `order` if there is one.
static inline void quantise_span(const float* x, std::int64_t cols, std::int64_t span, const std::int32_t* order,
                                 ActivationSpan& out) {
    const std::int64_t first = span * span_inputs, count = cols - first < span_inputs ? cols - first : span_inputs;
    for (std::int64_t unit = 0; unit < 8; ++unit) {
        const std::int64_t at = first + unit * 32, left = count - unit * 32;
        if (!order && left >= 32) {
            quantise_unit(x + at, unit, out);
            continue;
        }
        alignas(64) float part[32] = {};
        for (std::int64_t i = 0; i < 32 && i < left; ++i) part[i] = order ? x[order[at + i]] : x[at + i];
        quantise_unit(part, unit, out);
    }
}

}  // namespace penstock::PENSTOCK_ISA
