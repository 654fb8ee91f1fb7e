// The innermost loops: a few rows of activations times 64 columns (four panels), over one span of inputs.
//
// The order of a sum is the same whatever the tile: units of inputs ascending, in each one fused multiply-add of the
// products and, with minimums, one of the activations' sum.
#pragma once

#include "ops/activations.h"
#include "packing/codes.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr std::int64_t group_columns = 64;  // columns of a task

// A span of four panels, unpacked: 4 inputs of 64 columns after the other.
struct alignas(64) CodeTile {
    std::uint8_t bytes[64][4][64];
    SpanScales scales;
};

inline constexpr std::int64_t minimum_offset = 16 * 64;  // from a scale to its minimum in SpanScales

struct TileShape {
    std::int64_t first, units;  // of 32 inputs, of the span's 1 to 8
    std::int32_t zero;
    int group_shift;  // log2 of the units (of 16 or 32) of a scale
    bool has_min;
};

// Hides where a pointer comes from: the compiler addresses what lies around it by constant offsets instead of keeping a
// pointer to each, and does not gather pointers with vector instructions (slow in gcc's code).
template <class T>
static inline T* opaque(T* at) {
    asm("" : "+r"(at));
    return at;
}

// Sums of rows of 64 columns: what they go on from, where they are left, and what is added to them before; null for
// zeros.
struct SumPlace {
    const float* from;
    float* to;
    const float* before;

    SumPlace at(std::int64_t offset) const {
        return {from ? from + offset : nullptr, to + offset, before ? before + offset : nullptr};
    }
};

// Calls use(integral_constant<i>) for i = 0 … count - 1.
template <int count, class F>
[[gnu::always_inline]] static inline void in_numbers(F&& use) {
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        (use(std::integral_constant<int, i>{}), ...);
    }(std::make_integer_sequence<int, count>{});
}

// R rows at rows[r] times P panels of a tile from `panel` on; unit 16 or 32, codes up to `most`.
template <int R, int P, int unit, int most>
static inline void multiply_codes(const CodeTile& tile, const TileShape& shape, const ActivationSpan* const* rows,
                                  int panel, const SumPlace& sums) {
    constexpr int steps = unit / 4, wide = vec::column_parts, lanes = 16 / wide;
    vec::ColumnFloats kept[R][P][wide];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int c = 0; c < wide; ++c)
                kept[r][p][c] = sums.from
                                    ? vec::load_columns(sums.from + r * group_columns + 16 * (panel + p) + lanes * c)
                                    : vec::splat_columns(0.0f);
    const std::uint8_t* weights_at = tile.bytes[8 * shape.first][panel];
    const std::int64_t end = (shape.first + shape.units) * (32 / unit);
    for (std::int64_t u = shape.first * (32 / unit); u < end; ++u) {
        vec::CodeSum<most, steps> acc[R][P][wide];
        in_numbers<steps>([&](auto s) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) {
                const vec::Bytes64 bytes = vec::load64(weights_at + s.value * 4 * 64 + 64 * p);
                vec::ColumnCodes<most> weights[wide];
                in_numbers<wide>([&](auto c) __attribute__((always_inline)) {
                    weights[c.value] = vec::ColumnCodes<most>::template of<c.value>(bytes);
                });
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                    for (int c = 0; c < wide; ++c)
                        acc[r][p][c].template add<s.value>(weights[c], rows[r]->value + u * unit + 4 * s.value);
            }
        });
        weights_at += steps * 4 * 64;
        const float* const scale = opaque(tile.scales.scale[u >> shape.group_shift] + 16 * panel);
        const std::int32_t zero = vec::code_base<most> - shape.zero;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const std::int32_t sum = unit == 32 ? rows[r]->sum32[u] : rows[r]->sum16[u];
            const vec::ColumnFloats by = vec::splat_columns(rows[r]->scale[u * unit / 32]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
                for (int c = 0; c < wide; ++c) {
                    const auto& one = acc[r][p][c];
                    const vec::ColumnFloats products = zero == 0 ? one.total() : one.total(zero * sum);
                    kept[r][p][c] =
                        vec::fma(products, vec::load_columns(scale + 16 * p + lanes * c) * by, kept[r][p][c]);
                }
        }
        if (!shape.has_min) continue;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const vec::ColumnFloats total = vec::splat_columns(unit == 32 ? rows[r]->total32[u] : rows[r]->total16[u]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
                for (int c = 0; c < wide; ++c)
                    kept[r][p][c] =
                        vec::fma(vec::load_columns(scale + minimum_offset + 16 * p + lanes * c), total, kept[r][p][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
            for (int c = 0; c < wide; ++c) {
                const std::int64_t at = r * group_columns + 16 * (panel + p) + lanes * c;
                const vec::ColumnFloats sum = kept[r][p][c];
                vec::store(sums.to + at, sums.before ? vec::load_columns(sums.before + at) + sum : sum);
            }
}

// 64 inputs of four panels as floats.
struct alignas(64) FloatTile {
    float value[64][64];
};

// sums[row][64] += of R rows of `count` inputs each, inputs ascending.
template <int R, int P>
static inline void multiply_floats(const FloatTile& tile, std::int64_t count, const float* const* rows, int panel,
                                   float* sums) {
    vec::F32x16 acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = vec::load16(sums + r * group_columns + 16 * (panel + p));
#pragma GCC unroll 1
    for (std::int64_t k = 0; k < count; ++k) {
        vec::F32x16 weights[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) weights[p] = vec::load16(tile.value[k] + 16 * (panel + p));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const vec::F32x16 x = vec::splat16(rows[r][k]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) acc[r][p] = vec::fma(x, weights[p], acc[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) vec::store(sums + r * group_columns + 16 * (panel + p), acc[r][p]);
}

// Calls use.template operator()<R>() with R the compile-time value of `rows`, 1 to tile_rows.
template <class F>
static inline void with_rows(int rows, F&& use) {
    [&]<int... r>(std::integer_sequence<int, r...>) {
        ((rows == r + 1 ? use(std::integral_constant<int, r + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, vec::tile_rows>{});
}

}  // namespace penstock::PENSTOCK_ISA
