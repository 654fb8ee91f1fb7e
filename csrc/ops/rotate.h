// Rotation of a vector's elements by the angles of its token's position.
#pragma once

#include <algorithm>

#include "ops/model_ops.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// x · cos + (x turned by half) · sin, in place, over the first 2 · half elements.
static inline void rotate(float* x, const float* cos, const float* sin, std::int64_t half) {
    for (std::int64_t i = 0; i < half; i += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, half - i);
        const vec::F32x16 a = vec::load_some(x + i, n), b = vec::load_some(x + half + i, n);
        const vec::F32x16 first = vec::fma(b, vec::load_some(sin + i, n), a * vec::load_some(cos + i, n));
        const vec::F32x16 second =
            vec::fma(a, vec::load_some(sin + half + i, n), b * vec::load_some(cos + half + i, n));
        vec::store_some(x + i, first, n);
        vec::store_some(x + half + i, second, n);
    }
}

// out = x rotated, rotation.size elements.
static inline void take_rotated(const float* x, const Rotation& rotation, std::int64_t token, float* out) {
    const std::int64_t size = rotation.size, half = size / 2;
    for (std::int64_t i = 0; i < size; ++i)
        out[i] = x[!rotation.interleaved ? i : i < half ? 2 * i : 2 * (i - half) + 1];
    rotate(out, rotation.cos + token * size, rotation.sin + token * size, half);
}

}  // namespace penstock::PENSTOCK_ISA
