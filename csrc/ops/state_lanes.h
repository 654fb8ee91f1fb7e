// What the recurrent ops share: blocks of state columns that one thread carries through all tokens of a row.
#pragma once

#include <algorithm>

#include "ops/model_ops.h"
#include "ops/row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// ln(1 + e^x): ln(1 + u) is 2 · artanh(u / (2 + u)), for u = e^-|x| a series in at most 1/3 (relative error below
// 1e-6).
static inline vec::F32x16 softplus(vec::F32x16 x) {
    using vec::splat16;
    const vec::F32x16 u = vec::exp(splat16(0.0f) - vec::abs(x)), s = u / (splat16(2.0f) + u), square = s * s;
    constexpr float series[] = {1.0f / 15, 1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f};
    vec::F32x16 p = splat16(1.0f / 17);
    for (const float term : series) p = vec::fma(p, square, splat16(term));
    return vec::fma(s + s, p, vec::max(splat16(0.0f), x));  // NaN stays NaN
}

// `vectors` of sixteen lanes; one alone may be shorter, `n` lanes.
template <int vectors>
static inline vec::F32x16 load_lanes(const float* from, std::int64_t n) {
    if constexpr (vectors > 1) return vec::load16(from);
    return vec::load_some(from, n);
}
template <int vectors>
static inline void store_lanes(float* to, vec::F32x16 a, std::int64_t n) {
    if constexpr (vectors > 1) return vec::store(to, a);
    vec::store_some(to, a, n);
}

// `lines` of a state's columns become zero.
static inline void clear_lanes(float* state, std::int64_t lines, std::int64_t stride, std::int64_t count) {
    for (std::int64_t i = 0; i < lines; ++i) std::fill_n(state + i * stride, count, 0.0f);
}

// The lanes of a row's state while it takes token t: those of its own slot, or of the token's, which they are brought
// to. `pool` points to the lanes in slot 0, of `lines` lines that lie `stride` apart; `state` to where they were
// before.
static inline float* lanes_at(const StateRows& rows, std::int64_t t, float* pool, std::int64_t lines,
                              std::int64_t stride, std::int64_t count, std::int64_t slot_size, float* state) {
    if (!rows.after) return state;
    float* const to = pool + rows.after[t] * slot_size;
    if (to != state)
        for (std::int64_t i = 0; i < lines; ++i) std::copy_n(state + i * stride, count, to + i * stride);
    return to;
}

constexpr int wide_block = 4;  // vectors of an item

// Calls wide(row, head, first lane) for whole blocks of 64 of a head's `width` lanes, narrow(row, head, first, n) for
// the rest, sixteen and fewer at a time. `work`: elements an item touches a token.
template <class Wide, class Narrow>
static inline void share_lanes(const StateRows& rows, std::int64_t heads, std::int64_t width, std::int64_t work,
                               Worker& worker, Wide&& wide, Narrow&& narrow) {
    constexpr std::int64_t lanes = 16 * wide_block;
    const std::int64_t blocks = (width + lanes - 1) / lanes;
    const std::int64_t tokens = rows.rows > 0 ? rows.query_start[rows.rows] / rows.rows + 1 : 1;
    worker.share(rows.rows * heads * blocks, row_chunk(tokens * work), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t row = item / blocks / heads, head = item / blocks % heads, first = item % blocks * lanes;
            if (first + lanes <= width) {
                wide(row, head, first);
                continue;
            }
            for (std::int64_t at = first; at < width; at += 16)
                narrow(row, head, at, std::min<std::int64_t>(16, width - at));
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
