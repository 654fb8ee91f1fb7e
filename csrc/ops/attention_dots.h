// The products of attention over bfloat16 pairs: those of attention_blocks.h with queries and weights rounded to
// bfloat16. A sum is one chain of pair products in ascending order, pairs counted from the start of a partition.
#pragma once

#include "ops/attention_blocks.h"

namespace penstock::PENSTOCK_ISA {

#ifdef PENSTOCK_BF16_DOTS
constexpr bool bf16_dots = true;
#else
constexpr bool bf16_dots = false;
#endif

using Bf16 = Codes<KvType::bf16>;

// Rows of bfloat16, `stride` of them apart.
struct PairBlock {
    const std::uint16_t* at;
    std::int64_t stride, count;
};

// As score_tiles() and sum_values(); defined where bf16_dots.
void score_pairs(const PairBlock& q, std::int64_t dim, const KeyTiles<Bf16>& keys, std::int64_t tiles, float* out,
                 std::int64_t out_stride);
void sum_pairs(const PairBlock& weights, std::int64_t from, std::int64_t to, const ValueTiles<Bf16>& values,
               std::int64_t column, std::int64_t vectors, float* out, std::int64_t out_stride, const Merging& merging);

// Stores the nearest bfloat16, subnormal numbers as zero, and returns them; defined where bf16_dots.
vec::F32x16 store_bf16(std::uint16_t* to, vec::F32x16 a);

#ifdef PENSTOCK_BF16_DOTS
inline vec::F32x16 store_bf16(std::uint16_t* to, vec::F32x16 a) { return vec::store_nearest_bf16(to, a); }

template <int queries, int tiles>
inline void score_pair_block(const PairBlock& q, std::int64_t dim, const KeyTiles<Bf16>& keys, float* out,
                             std::int64_t out_stride) {
    vec::F32x16 sum[queries][tiles];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) sum[i][t] = vec::splat16(0.0f);
    for (std::int64_t d = 0; d < dim; d += 2) {
        vec::Bf16x32 k[tiles];
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) k[t] = vec::load_pairs(keys.tile[t] + d * kv_tile);
        if (keys.ahead)
#pragma GCC unroll 8
            for (int t = 0; t < tiles; ++t) vec::prefetch(keys.ahead[t] + d * kv_tile * 2);
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i) {
            const vec::Bf16x32 x = vec::splat_pair(q.at + i * q.stride + d);
#pragma GCC unroll 8
            for (int t = 0; t < tiles; ++t) sum[i][t] = vec::dot(x, k[t], sum[i][t]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) vec::store(out + i * out_stride + t * kv_tile, sum[i][t]);
}

// Vectors from `first` on of `of`, whose columns begin with `column`.
template <int queries, int vectors>
inline void value_pair_block(const PairBlock& weights, std::int64_t from, std::int64_t to,
                             const ValueTiles<Bf16>& values, std::int64_t column, std::int64_t first, std::int64_t of,
                             float* out, std::int64_t out_stride, const Merging& merging) {
    vec::F32x16 sum[queries][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x) sum[i][x] = vec::splat16(0.0f);
    for (std::int64_t t = from / kv_tile; t * kv_tile < to; ++t) {
        const std::int64_t begin = t * kv_tile;
        const std::int64_t last = to - begin < kv_tile ? to : begin + kv_tile;
        const std::uint16_t* const tile = values.tile[t] + 2 * column - begin * values.stride;
        values.ahead.ask(t, first, first + vectors, of);
        // A token outside [from, last) may hold anything, as NaN; a zero weight alone would not keep it out.
        const auto step = [&](std::int64_t lane, auto load) __attribute__((always_inline)) {
            vec::Bf16x32 v[vectors];
#pragma GCC unroll 8
            for (int x = 0; x < vectors; ++x) v[x] = load(tile + lane * values.stride + 32 * x);
#pragma GCC unroll 8
            for (int i = 0; i < queries; ++i) {
                const vec::Bf16x32 w = vec::splat_pair(weights.at + i * weights.stride + lane);
#pragma GCC unroll 8
                for (int x = 0; x < vectors; ++x) sum[i][x] = vec::dot(w, v[x], sum[i][x]);
            }
        };
        std::int64_t lane = from > begin ? from : begin;
        if (lane % 2 != 0 && lane < last) {
            step(lane - 1, [](const std::uint16_t* at) { return vec::load_pairs(at, false, true); });
            ++lane;
        }
        for (; lane + 1 < last; lane += 2) step(lane, [](const std::uint16_t* at) { return vec::load_pairs(at); });
        if (lane < last) step(lane, [](const std::uint16_t* at) { return vec::load_pairs(at, true, false); });
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) {
        const vec::F32x16 before = vec::splat16(merging.before[i]), now = vec::splat16(merging.now[i]);
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x) merge_sum(sum[i][x], before, now, out + i * out_stride + 16 * x);
    }
}

inline void score_pairs(const PairBlock& q, std::int64_t dim, const KeyTiles<Bf16>& keys, std::int64_t tiles,
                        float* out, std::int64_t out_stride) {
    in_tile_runs(q.count, tiles, [&](auto queries, auto each, std::int64_t t) {
        const KeyTiles<Bf16> from{keys.tile + t, keys.ahead ? keys.ahead + t : nullptr};
        score_pair_block<queries.value, each.value>(q, dim, from, out + t * kv_tile, out_stride);
    });
}

inline void sum_pairs(const PairBlock& weights, std::int64_t from, std::int64_t to, const ValueTiles<Bf16>& values,
                      std::int64_t column, std::int64_t vectors, float* out, std::int64_t out_stride,
                      const Merging& merging) {
    in_vector_runs(weights.count, vectors, [&](auto queries, auto each, std::int64_t x) {
        value_pair_block<queries.value, each.value>(weights, from, to, values, column + x * 16, x, vectors,
                                                    out + x * 16, out_stride, merging);
    });
}
#endif

}  // namespace penstock::PENSTOCK_ISA
