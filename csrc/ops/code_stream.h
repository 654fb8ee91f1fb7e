// Few rows times one panel's span, codes unpacked in registers on their way to the products. The sums, and their order,
// are those of multiply_codes().
#pragma once

#include "ops/tiles.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr int stream_code_rows = 4;
inline constexpr std::int64_t code_bytes_ahead = 6144;  // of the memory being read; the best of 1 to 12 KiB

struct SpanShape {
    std::int64_t first, units;  // of 32 inputs, of the span
    std::int32_t zero;
    int group_shift;  // log2 of the units (of 16 or 32) of a scale
    bool has_min;
};

// Of R rows; scales are those of the panel's columns in SpanScales.
template <class Codes, int unit, int R>
void stream_codes(const PackedHeader& header, const std::uint8_t* codes, const float* scales, const SpanShape& shape,
                  const ActivationSpan* const* rows, const SumPlace& sums) {
    constexpr int parts = 32 / unit;
    const Codes source(header, codes, shape.units);
    vec::F32x16 kept[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) kept[r] = sums.from ? vec::load16(sums.from + r * group_columns) : vec::splat16(0.0f);
    for (std::int64_t u = shape.first; u < shape.first + shape.units; ++u, codes += Codes::unit_bytes) {
#pragma GCC unroll 8
        for (int i = 0; i < (Codes::unit_bytes + 63) / 64; ++i) vec::prefetch(codes + code_bytes_ahead + 64 * i);
        vec::I32x16 acc[R][parts];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < parts; ++i) {
                const std::int32_t sum = unit == 32 ? rows[r]->sum32[u] : rows[r]->sum16[2 * u + i];
                acc[r][i] = vec::splat_i32(-shape.zero * sum);
            }
        source.each(u - shape.first, [&](auto v, vec::Bytes64 weights) {
            constexpr int part = decltype(v)::value * 4 / unit;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                acc[r][part] = vec::dot4<Codes::wide>(acc[r][part], weights, rows[r]->value + 32 * u + 4 * v);
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
    for (int r = 0; r < R; ++r) {
        const std::int64_t at = r * group_columns;
        vec::store(sums.to + at, sums.before ? vec::load16(sums.before + at) + kept[r] : kept[r]);
    }
}

using StreamCodes = void (*)(const PackedHeader&, const std::uint8_t*, const float*, const SpanShape&,
                             const ActivationSpan* const*, const SumPlace&);

template <class Codes, int unit>
static inline StreamCodes stream_for_rows(std::int64_t rows) {
    switch (rows) {
        case 1:
            return stream_codes<Codes, unit, 1>;
        case 2:
            return stream_codes<Codes, unit, 2>;
        case 3:
            return stream_codes<Codes, unit, 3>;
        case 4:
            return stream_codes<Codes, unit, 4>;
        default:
            return nullptr;
    }
}

// The kernel for that many rows of a matrix, or null where they go through a tile; `width`, if not 0, is that of the
// codes.
static inline StreamCodes choose_stream(const PackedHeader& header, std::uint32_t width, std::int64_t rows) {
    const auto choose = [&]<class Codes>() -> StreamCodes {
        if constexpr (!Codes::streamed)
            return nullptr;
        else if constexpr (Codes::group != 0)
            return stream_for_rows<Codes, Codes::group>(rows);
        else
            return header.group == 16 ? stream_for_rows<Codes, 16>(rows) : stream_for_rows<Codes, 32>(rows);
    };
    return width ? with_plane_codes(width, choose) : with_codes(header, choose, StreamCodes{nullptr});
}

}  // namespace penstock::PENSTOCK_ISA
