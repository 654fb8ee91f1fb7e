// Few rows times one panel's span, codes unpacked in registers on their way to the products. The sums, and their order, are
// those of multiply_codes().
#pragma once

#include "tiles.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr int stream_code_rows = 4;
inline constexpr std::int64_t code_bytes_ahead = 6144;  // of the memory being read; the best of 1 to 12 KiB

struct SpanShape {
    std::int64_t units;  // of 32 inputs
    std::int32_t zero;
    int group_shift;     // log2 of the units (of 16 or 32) of a scale
    bool has_min;
};

// sums[row][64] += of R rows; scales are those of the panel's columns in SpanScales.
template <int bits, bool has_lut, int unit, int R>
void stream_codes(const std::uint8_t* codes, const std::uint8_t* lut, const float* scales, const SpanShape& shape,
                  const ActivationSpan* const* rows, float* sums) {
    constexpr int parts = 32 / unit;
    const vec::Bytes64 table = vec::repeat16(lut);
    vec::F32x16 kept[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) kept[r] = vec::load16(sums + r * group_columns);
    for (std::int64_t u = 0; u < shape.units; ++u, codes += 64 * bits) {
#pragma GCC unroll 8
        for (int i = 0; i < bits; ++i) vec::prefetch(codes + code_bytes_ahead + 64 * i);
        vec::I32x16 acc[R][parts];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < parts; ++i) {
                const std::int32_t sum = unit == 32 ? rows[r]->sum32[u] : rows[r]->sum16[2 * u + i];
                acc[r][i] = vec::splat_i32(-shape.zero * sum);
            }
        each_vector<bits, has_lut>(codes, table, [&](auto v, vec::Bytes64 weights) {
            constexpr int part = decltype(v)::value * 4 / unit;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                acc[r][part] = vec::dot4<(bits == 8 || has_lut)>(acc[r][part], weights, rows[r]->value + 32 * u + 4 * v);
        });
#pragma GCC unroll 2
        for (int i = 0; i < parts; ++i) {
            const float* const scale = scales + (((u * parts + i) >> shape.group_shift) * group_columns);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const vec::F32x16 by = vec::splat16(rows[r]->scale[u]);
                kept[r] = vec::fma(vec::to_float(acc[r][i]), vec::load16(scale) * by, kept[r]);
                if (shape.has_min) {
                    const float total = unit == 32 ? rows[r]->total32[u] : rows[r]->total16[2 * u + i];
                    kept[r] = vec::fma(vec::load16(scale + minimum_offset), vec::splat16(total), kept[r]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) vec::store(sums + r * group_columns, kept[r]);
}

using StreamCodes = void (*)(const std::uint8_t*, const std::uint8_t*, const float*, const SpanShape&,
                             const ActivationSpan* const*, float*);

template <int bits, bool has_lut, int unit>
static inline StreamCodes stream_for_rows(std::int64_t rows) {
    switch (rows) {
        case 1: return stream_codes<bits, has_lut, unit, 1>;
        case 2: return stream_codes<bits, has_lut, unit, 2>;
        case 3: return stream_codes<bits, has_lut, unit, 3>;
        case 4: return stream_codes<bits, has_lut, unit, 4>;
        default: return nullptr;
    }
}

template <int bits, bool has_lut>
static inline StreamCodes stream_for_group(const PackedHeader& header, std::int64_t rows) {
    return header.group == 16 ? stream_for_rows<bits, has_lut, 16>(rows) : stream_for_rows<bits, has_lut, 32>(rows);
}

// The kernel for that many rows of a matrix, or null where they go through a tile.
static inline StreamCodes choose_stream(const PackedHeader& header, std::int64_t rows) {
    if (header.kind == PackedKind::ternary) return nullptr;
    if (header.has_lut) return header.bits == 4 ? stream_for_group<4, true>(header, rows) : nullptr;
    switch (header.bits) {
        case 2: return stream_for_group<2, false>(header, rows);
        case 3: return stream_for_group<3, false>(header, rows);
        case 4: return stream_for_group<4, false>(header, rows);
        case 5: return stream_for_group<5, false>(header, rows);
        case 6: return stream_for_group<6, false>(header, rows);
        case 8: return stream_for_group<8, false>(header, rows);
        default: return nullptr;
    }
}

}  // namespace penstock::PENSTOCK_ISA
