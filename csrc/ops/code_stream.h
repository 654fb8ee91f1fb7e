// Few rows times one panel's span, codes unpacked in registers on their way to the products. The sums, and their order,
// are those of multiply_codes().
#pragma once

#include <algorithm>
#include <type_traits>

#include "ops/tiles.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr int stream_code_rows = std::min(4, vec::most_streamed);  // at a time
inline constexpr std::int64_t code_bytes_ahead = 6144;  // of the memory being read; the best of 1 to 12 KiB

struct SpanShape {
    std::int64_t first, units;  // of 32 inputs, of the span
    std::int32_t zero;
    int group_shift;  // log2 of the units (of 16 or 32) of a scale
    bool has_min;
};

// The columns of the parts from `part` on, `wide` of them.
template <class Codes, int unit, int R, int part, int wide>
[[gnu::always_inline]] static inline void stream_parts(const PackedHeader& header, const std::uint8_t* codes,
                                                       const float* scales, const SpanShape& shape,
                                                       const ActivationSpan* const* rows, const SumPlace& sums) {
    constexpr int pieces = 32 / unit, lanes = 16 / vec::column_parts, first = lanes * part;
    const std::int32_t zero = vec::code_base<Codes::most> - shape.zero;
    const Codes source(header, codes, shape.units);
    vec::ColumnFloats kept[R][wide];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < wide; ++c)
            kept[r][c] = sums.from ? vec::load_columns(sums.from + r * group_columns + first + lanes * c)
                                   : vec::splat_columns(0.0f);
    for (std::int64_t u = shape.first; u < shape.first + shape.units; ++u, codes += Codes::unit_bytes) {
        if constexpr (part == 0)
#pragma GCC unroll 8
            for (int i = 0; i < (Codes::unit_bytes + 63) / 64; ++i) vec::prefetch(codes + code_bytes_ahead + 64 * i);
        vec::CodeSum<Codes::most, unit / 4> acc[R][wide][pieces];
        source.each(u - shape.first, [&](auto v, vec::Bytes64 bytes) __attribute__((always_inline)) {
            constexpr int at = decltype(v)::value, step = at % (unit / 4);
            in_numbers<wide>([&](auto c) __attribute__((always_inline)) {
                const auto weights = vec::ColumnCodes<Codes::most>::template of<part + c.value>(bytes);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    acc[r][c.value][at * 4 / unit].template add<step>(weights, rows[r]->value + 32 * u + 4 * at);
            });
        });
#pragma GCC unroll 2
        for (int i = 0; i < pieces; ++i) {
            const float* const scale = scales + (((u * pieces + i) >> shape.group_shift) * group_columns) + first;
            // What does not change from row to row is asked once, not in the loops over rows and columns.
            const auto add_products = [&](auto centred) __attribute__((always_inline)) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const std::int32_t sum = unit == 32 ? rows[r]->sum32[u] : rows[r]->sum16[2 * u + i];
                    const vec::ColumnFloats by = vec::splat_columns(rows[r]->scale[u]);
#pragma GCC unroll 2
                    for (int c = 0; c < wide; ++c) {
                        const auto& one = acc[r][c][i];
                        const vec::ColumnFloats products = centred.value ? one.total() : one.total(zero * sum);
                        kept[r][c] = vec::fma(products, vec::load_columns(scale + lanes * c) * by, kept[r][c]);
                    }
                }
            };
            zero == 0 ? add_products(std::true_type()) : add_products(std::false_type());
            if (!shape.has_min) continue;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const float total = unit == 32 ? rows[r]->total32[u] : rows[r]->total16[2 * u + i];
#pragma GCC unroll 2
                for (int c = 0; c < wide; ++c)
                    kept[r][c] = vec::fma(vec::load_columns(scale + minimum_offset + lanes * c),
                                          vec::splat_columns(total), kept[r][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int c = 0; c < wide; ++c) {
            const std::int64_t at = r * group_columns + first + lanes * c;
            vec::store(sums.to + at, sums.before ? vec::load_columns(sums.before + at) + kept[r][c] : kept[r][c]);
        }
}

// Of R rows; scales are those of the panel's columns in SpanScales. Of more than two rows the sums of all columns do
// not fit in registers: of codes that are quickly unpacked, one part of the columns goes through the span before the
// next.
template <class Codes, int unit, int R>
void stream_codes(const PackedHeader& header, const std::uint8_t* codes, const float* scales, const SpanShape& shape,
                  const ActivationSpan* const* rows, const SumPlace& sums) {
    if constexpr (R < 3 || Codes::most > 15)
        stream_parts<Codes, unit, R, 0, vec::column_parts>(header, codes, scales, shape, rows, sums);
    else
        in_numbers<vec::column_parts>([&](auto part) __attribute__((always_inline)) {
            stream_parts<Codes, unit, R, part.value, 1>(header, codes, scales, shape, rows, sums);
        });
}

using StreamCodes = void (*)(const PackedHeader&, const std::uint8_t*, const float*, const SpanShape&,
                             const ActivationSpan* const*, const SumPlace&);

template <class Codes, int unit>
static inline StreamCodes stream_for_rows(std::int64_t rows) {
    StreamCodes found = nullptr;
    in_numbers<stream_code_rows>([&](auto r) {
        if (rows == r.value + 1) found = stream_codes<Codes, unit, r.value + 1>;
    });
    return found;
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
