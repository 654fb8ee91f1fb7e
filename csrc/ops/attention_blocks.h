// The inner loops of attention: blocks of queries times blocks of vectors, sums in registers. Every sum is one chain of
// fused multiply-adds in ascending order, so that a block's shape leaves no trace in the result.
#pragma once

#include <algorithm>
#include <utility>

#include "ops/kv_layout.h"
#include "vec/prefetch.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// Where `paired`, element d of a tile's keys, or a lane's values, is one of a pair (kv_layout.h).
template <KvType type>
struct Codes;
template <>
struct Codes<KvType::f32> {
    using Code = float;
    static constexpr bool paired = false;
    template <bool>
    static vec::F32x16 load(const Code* from) {
        return vec::load16(from);
    }
};
template <>
struct Codes<KvType::bf16> {
    using Code = std::uint16_t;
    static constexpr bool paired = true;
    template <bool second>
    static vec::F32x16 load(const Code* from) {
        return vec::load16_bf16_pairs<second>(from);
    }
};
template <>
struct Codes<KvType::f16> {
    using Code = std::uint16_t;
    static constexpr bool paired = false;
    template <bool>
    static vec::F32x16 load(const Code* from) {
        return vec::load16_f16(from);
    }
};
template <>
struct Codes<KvType::f8_e4m3> {
    using Code = std::uint8_t;
    static constexpr bool paired = false;
    template <bool>
    static vec::F32x16 load(const Code* from) {
        return vec::load16_e4m3(from);
    }
};
template <>
struct Codes<KvType::i8> {
    using Code = std::int8_t;
    static constexpr bool paired = false;
    template <bool>
    static vec::F32x16 load(const Code* from) {
        return vec::load16_i8(from);
    }
};

// Whole lines; any address will do.
static inline void prefetch(const std::byte* from, std::int64_t bytes) {
    for (std::int64_t i = 0; i < bytes; i += 64) vec::prefetch(from + i);
}
// Part i of `count` of a stretch of whole lines.
static inline void prefetch_part(const std::byte* from, std::int64_t bytes, std::int64_t i, std::int64_t count) {
    const std::int64_t lines = bytes / 64, begin = lines * i / count, end = lines * (i + 1) / count;
    prefetch(from + begin * 64, (end - begin) * 64);
}

// Calls step(i, whether i is the second of a pair) for [from, to) in ascending order.
template <class Codes, class F>
inline void in_pairs(std::int64_t from, std::int64_t to, F&& step) {
    constexpr std::false_type even;
    if constexpr (Codes::paired) {
        constexpr std::true_type odd;
        if (from % 2 != 0 && from < to) step(from++, odd);
        for (; from + 1 < to; from += 2) {
            step(from, even);
            step(from + 1, odd);
        }
        if (from < to) step(from, even);
    } else {
        for (; from < to; ++from) step(from, even);
    }
}

// Queries of a block: rows `stride` floats apart.
struct QueryBlock {
    const float* at;
    std::int64_t stride, count;
};

// Tiles of keys; of those at `ahead`, as many bytes are asked for as are read.
template <class Codes>
struct KeyTiles {
    const typename Codes::Code* const* tile;
    const std::byte* const* ahead;  // or null
};

// Scores of a query block and `tiles` tiles of keys, [query][tile][16], rows `out_stride` floats apart.
template <class Codes, int queries, int tiles>
inline void score_block(const QueryBlock& q, std::int64_t dim, const KeyTiles<Codes>& keys, float* out,
                        std::int64_t out_stride) {
    constexpr std::int64_t row_bytes = kv_tile * sizeof(typename Codes::Code);
    vec::F32x16 sum[queries][tiles];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) sum[i][t] = vec::splat16(0.0f);
    in_pairs<Codes>(0, dim, [&](std::int64_t d, auto second) __attribute__((always_inline)) {
        const std::int64_t at = second ? d - 1 : d;
        vec::F32x16 k[tiles];
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) k[t] = Codes::template load<second.value>(keys.tile[t] + at * kv_tile);
        if (keys.ahead && d * row_bytes % 64 == 0)
#pragma GCC unroll 8
            for (int t = 0; t < tiles; ++t) vec::prefetch(keys.ahead[t] + d * row_bytes);
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i) {
            const vec::F32x16 x = vec::splat16(q.at[i * q.stride + d]);
#pragma GCC unroll 8
            for (int t = 0; t < tiles; ++t) sum[i][t] = vec::fma(x, k[t], sum[i][t]);
        }
    });
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int t = 0; t < tiles; ++t) vec::store(out + i * out_stride + t * kv_tile, sum[i][t]);
}

// What is read next: while the values of tile t are read, the stretches [end[t], end[t + 1]) are asked for; where there
// are many, a part with each run of columns: asked for at once they would fill the processor's queues.
struct Stretch {
    const std::byte* at;
    std::int64_t bytes;
};
struct Ahead {
    const Stretch* const* end = nullptr;  // or null
    bool many = false;

    // With the columns [from, to) of `columns`.
    void ask(std::int64_t t, std::int64_t from, std::int64_t to, std::int64_t columns) const {
        if (!end || (!many && from > 0)) return;
        if (!many) to = columns;
        for (const Stretch* stretch = end[t]; stretch < end[t + 1]; ++stretch) {
            const std::int64_t lines = stretch->bytes / 64, begin = lines * from / columns;
            prefetch(stretch->at + 64 * begin, 64 * (lines * to / columns - begin));
        }
    }
};

// Values of consecutive lanes of a partition: tile t's lane l lies at tile[t] + l * stride.
template <class Codes>
struct ValueTiles {
    const typename Codes::Code* const* tile;
    std::int64_t stride;
    Ahead ahead;
};

// What a partition's sum is merged with: sum · now + out · before.
struct Merging {
    const float* before;  // [queries]
    const float* now;
};

inline void merge_sum(vec::F32x16 sum, vec::F32x16 before, vec::F32x16 now, float* out) {
    vec::store(out, vec::fma(vec::load16(out), before, sum * now));
}

// Lanes of a partition; sums go on from `part` unless they begin, and go there unless they end.
struct LaneRange {
    std::int64_t from, to;
    bool begins, ends;
};

// The tiles of which as many bytes are asked for as are read: one soon, into the nearest cache, one later; or null.
struct TilesAhead {
    const std::byte *soon, *later;
};

// Sums of weight times value over lanes of a partition, merged into `vectors` vectors of each query's `out`.
template <class Codes, int queries, int vectors, bool asks>
inline void value_block(const QueryBlock& weights, const LaneRange& lanes, const ValueTiles<Codes>& values,
                        std::int64_t column, std::int64_t columns, const TilesAhead& tiles, float* part, float* out,
                        std::int64_t out_stride, const Merging& merging) {
    constexpr std::int64_t bytes = vectors * 16 * sizeof(typename Codes::Code);  // of a lane
    const std::int64_t from = lanes.from, to = lanes.to;
    vec::F32x16 sum[queries][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x)
            sum[i][x] = lanes.begins ? vec::splat16(0.0f) : vec::load16(part + i * columns + 16 * x);
    for (std::int64_t t = from / kv_tile; t * kv_tile < to; ++t) {
        const std::int64_t begin = t * kv_tile;
        const std::int64_t last = to - begin < kv_tile ? to : begin + kv_tile;
        const auto* const tile = values.tile[t] + (Codes::paired ? 2 : 1) * column - begin * values.stride;
        values.ahead.ask(t, column, column + 16 * vectors, columns);
        in_pairs<Codes>(from > begin ? from : begin, last,
                        [&](std::int64_t lane, auto second) __attribute__((always_inline)) {
                            const std::int64_t place = (column / (16 * vectors) * kv_tile + lane - begin) * bytes;
                            if (asks && place % 64 == 0)
#pragma GCC unroll 4
                                for (std::int64_t line = place; line < place + bytes; line += 64) {
                                    vec::prefetch<3>(tiles.soon + line);
                                    vec::prefetch(tiles.later + line);
                                }
                            const auto* const at = tile + (second ? lane - 1 : lane) * values.stride;
                            vec::F32x16 v[vectors];
#pragma GCC unroll 8
                            for (int x = 0; x < vectors; ++x)
                                v[x] = Codes::template load<second.value>(at + (Codes::paired ? 32 : 16) * x);
#pragma GCC unroll 8
                            for (int i = 0; i < queries; ++i) {
                                const vec::F32x16 w = vec::splat16(weights.at[i * weights.stride + lane]);
#pragma GCC unroll 8
                                for (int x = 0; x < vectors; ++x) sum[i][x] = vec::fma(w, v[x], sum[i][x]);
                            }
                        });
    }
    if (!lanes.ends) {
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
            for (int x = 0; x < vectors; ++x) vec::store(part + i * columns + 16 * x, sum[i][x]);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i) {
        const vec::F32x16 before = vec::splat16(merging.before[i]), now = vec::splat16(merging.now[i]);
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x) merge_sum(sum[i][x], before, now, out + i * out_stride + 16 * x);
    }
}

// Calls function with `count` (1 to `most`) as a constant.
template <int most, class F>
inline void with_constant(std::int64_t count, F&& function) {
    if constexpr (most > 1) {
        if (count < most) return with_constant<most - 1>(count, std::forward<F>(function));
    }
    function(std::integral_constant<int, most>{});
}

// Cuts the tiles that a block of `count` queries meets: calls block(queries, how many, first), the first two constants.
template <int most = vec::many_queries, class F>
inline void in_tile_runs(std::int64_t count, std::int64_t tiles, F&& block) {
    with_constant<most>(count, [&](auto queries) {
        std::int64_t t = 0;
        if constexpr (queries.value <= vec::query_block)
            for (; t + vec::vector_block <= tiles; t += vec::vector_block)
                block(queries, std::integral_constant<int, vec::vector_block>{}, t);
        for (; t < tiles; ++t) block(queries, std::integral_constant<int, 1>{}, t);
    });
}

// The same of vectors of values.
template <int most = vec::many_queries, class F>
inline void in_vector_runs(std::int64_t count, std::int64_t vectors, F&& block) {
    with_constant<most>(count, [&](auto queries) {
        std::int64_t x = 0;
        const auto take = [&](auto each) {
            for (; x + each.value <= vectors; x += each.value) block(queries, each, x);
        };
        // Few queries leave room for a longer stretch of each value, which is then read from memory in order.
        if constexpr (2 * queries.value <= vec::query_block) take(std::integral_constant<int, 2 * vec::vector_block>{});
        if constexpr (queries.value <= vec::query_block) take(std::integral_constant<int, vec::vector_block>{});
        take(std::integral_constant<int, 1>{});
    });
}

template <class Codes, int most = vec::many_queries>
inline void score_tiles(const QueryBlock& q, std::int64_t dim, const KeyTiles<Codes>& keys, std::int64_t tiles,
                        float* out, std::int64_t out_stride) {
    in_tile_runs<most>(q.count, tiles, [&](auto queries, auto each, std::int64_t t) {
        const KeyTiles<Codes> from{keys.tile + t, keys.ahead ? keys.ahead + t : nullptr};
        score_block<Codes, queries.value, each.value>(q, dim, from, out + t * kv_tile, out_stride);
    });
}

template <class Codes, bool asks = false>
inline void sum_values(const QueryBlock& weights, const LaneRange& lanes, const ValueTiles<Codes>& values,
                       std::int64_t vectors, const TilesAhead& tiles, float* part, float* out, std::int64_t out_stride,
                       const Merging& merging) {
    in_vector_runs<asks ? vec::few_queries : vec::many_queries>(
        weights.count, vectors, [&](auto queries, auto each, std::int64_t x) {
            value_block<Codes, queries.value, each.value, asks>(weights, lanes, values, x * 16, vectors * 16, tiles,
                                                                part + x * 16, out + x * 16, out_stride, merging);
        });
}

}  // namespace penstock::PENSTOCK_ISA
