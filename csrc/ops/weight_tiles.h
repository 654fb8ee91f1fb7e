// Weights of every packed kind as bfloat16 tiles: the values unpack_row() gives, rounded to nearest, ties to even.
#pragma once

#include <bit>
#include <cmath>

#include "ops/activations.h"
#include "packing/codes.h"
#include "packing/float_panels.h"
#include PENSTOCK_TILE_HEADER

namespace penstock::PENSTOCK_ISA {

// A span of a panel: eight tiles of 32 inputs, pairs of inputs of sixteen columns a row. Four neighbouring columns of
// each of four 128-bit lanes give their first two to the lower half of a row and the others to the upper half: place 2
// l + i of the lower half is column 4 l + i.
struct alignas(64) WeightTiles {
    std::uint16_t pairs[8][16][32];
};

alignas(64) inline constexpr std::int32_t place_of_column[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

// What a span of codes passes through on its way.
struct CodeSpan {
    std::uint8_t codes[8][8][64];
    SpanScales scales;
    alignas(64) float zero[16][16];
};

// A value of each column, as the two halves of a tile's row take it.
struct Halves {
    __m512 lower, upper;
};

static inline Halves spread(const float* columns) {
    const __m512 all = _mm512_loadu_ps(columns);
    const __m512i lower = _mm512_setr_epi32(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13);
    return {_mm512_permutexvar_ps(lower, all),
            _mm512_permutexvar_ps(_mm512_add_epi32(lower, _mm512_set1_epi32(2)), all)};
}

// Of one group: a weight is (code - zero) · scale + minimum. Where scale · code and scale · zero have no more than 24
// bits
// (`fused`) that is fma(code, scale, minimum - zero · scale), bit for bit.
template <bool fused>
struct GroupLanes {
    Halves scale, minimum, zero;

    GroupLanes(const CodeSpan& span, std::int64_t group)
        : scale(spread(span.scales.scale[group])),
          minimum(spread(span.scales.minimum[group])),
          zero(fused ? Halves{} : spread(span.zero[group])) {}

    static __m512 weigh(__m512i code, __m512 scale, __m512 minimum, [[maybe_unused]] __m512 zero) {
        const __m512 value = _mm512_cvtepi32_ps(code);
        if constexpr (fused) return _mm512_fmadd_ps(value, scale, minimum);
        return _mm512_add_ps(_mm512_mul_ps(_mm512_sub_ps(value, zero), scale), minimum);
    }
    __m512i pairs(__m512i lower, __m512i upper) const {
        return vec::to_bf16(weigh(lower, scale.lower, minimum.lower, zero.lower),
                            weigh(upper, scale.upper, minimum.upper, zero.upper));
    }
};

// Inputs `pair` and `pair` + 1 of four of two columns in each lane, the first of which is `column`, as integers.
template <int column, int pair>
static inline __m512i code_pairs(__m512i codes) {
    constexpr auto from = [](int c, int i) { return static_cast<int>(0x80808000u) | (4 * c + i); };
    const __m128i places =
        _mm_setr_epi32(from(column, pair), from(column, pair + 1), from(column + 1, pair), from(column + 1, pair + 1));
    return _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(places));
}

// A unit of codes, four inputs of sixteen columns a vector, of one group or of two of 16 inputs.
template <bool fused, bool two_groups>
static inline void weigh_unit(const CodeSpan& span, std::int64_t unit, std::int64_t group, WeightTiles& out) {
    const GroupLanes<fused> first(span, group), second(span, group + two_groups);
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
        const __m512i codes = _mm512_load_si512(span.codes[unit][v]);
        const GroupLanes<fused>& by = two_groups && v >= 4 ? second : first;
        _mm512_store_si512(out.pairs[unit][2 * v], by.pairs(code_pairs<0, 0>(codes), code_pairs<2, 0>(codes)));
        _mm512_store_si512(out.pairs[unit][2 * v + 1], by.pairs(code_pairs<0, 2>(codes), code_pairs<2, 2>(codes)));
    }
}

static inline bool products_are_exact(const PackedHeader& header) {
    int exponent;
    return header.scale != ScaleKind::f32 && header.scale != ScaleKind::squares &&
           header.minimum != MinKind::fractions && std::frexp(std::fabs(header.factor), &exponent) == 0.5f;
}

// zero and minimum of each group, the latter with - zero · scale where products are fused.
static inline void prepare_groups(const PackedHeader& header, const SpanLayout& layout, const std::byte* span,
                                  bool fused, std::int64_t groups, CodeSpan& out) {
    const vec::F32x16 nothing = vec::splat16(0.0f), zero = vec::splat16(static_cast<float>(header.zero));
    const std::byte* const zeros = span + layout.minimums;
    const auto zeros_of = [&](std::int64_t g) {
        if (header.minimum == MinKind::fractions)
            return load_scales(header.scale, zeros + 16 * scale_bytes(header.scale) * g);
        if (header.minimum != MinKind::zeros) return zero;
        return vec::load16_u8(reinterpret_cast<const std::uint8_t*>(zeros) + 16 * g);
    };
    for (std::int64_t g = 0; g < groups; ++g) {
        float* const minimum = out.scales.minimum[g];
        if (header.minimum == MinKind::none)
            vec::store(minimum, fused ? nothing - zero * vec::load16(out.scales.scale[g]) : nothing);
        else if (header.minimum == MinKind::stored && fused && header.zero)
            vec::store(minimum, vec::load16(minimum) - zero * vec::load16(out.scales.scale[g]));
        else if (header.minimum != MinKind::stored && !fused)
            vec::store(minimum, nothing);
        if (!fused) vec::store(out.zero[g], zeros_of(g));
    }
}

static inline void make_code_tiles(const PackedMatrix& matrix, const std::byte* panel, std::int64_t s, CodeSpan& by,
                                   WeightTiles& out) {
    const PackedHeader& header = matrix.header();
    const SpanPlace place = matrix.place(s);
    const std::byte* const span = panel + place.offset;
    const std::int64_t units = place.units;
    const std::int64_t groups = (units * unit_inputs + header.group - 1) / header.group;
    const bool fused = products_are_exact(header), two_groups = header.group == 16;
    const int shift = std::countr_zero(static_cast<std::uint64_t>(header.group)) - 5;  // log2 of a group's units
    group_scales(matrix, place.layout, span, groups, 0, by.scales);
    prepare_groups(header, place.layout, span, fused, groups, by);
    unpack_codes(header, span, place, 64, by.codes[0][0]);
    const std::int64_t ahead = (place.layout.bytes / 8 + 63) / 64 * 64;  // of the next span, asked for between units
    for (std::int64_t u = 0; u < units; ++u) {
        for (std::int64_t at = 0; at < ahead; at += 64) vec::prefetch(span + place.layout.bytes + u * ahead + at);
        if (two_groups)
            fused ? weigh_unit<true, true>(by, u, 2 * u, out) : weigh_unit<false, true>(by, u, 2 * u, out);
        else
            fused ? weigh_unit<true, false>(by, u, u >> shift, out) : weigh_unit<false, false>(by, u, u >> shift, out);
    }
}

// Values of two inputs, sixteen columns each, as a row of pairs.
static inline __m512i interleave(__m512i values) {
    alignas(64) static constexpr std::uint16_t places[32] = {0,  16, 1,  17, 4,  20, 5,  21, 8,  24, 9,
                                                             25, 12, 28, 13, 29, 2,  18, 3,  19, 6,  22,
                                                             7,  23, 10, 26, 11, 27, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(places), values);
}

// Inputs first … first + inner - 1 of a panel of floats.
template <PackedKind kind>
static inline void make_float_tiles(const PackedHeader& header, const std::byte* panel, std::int64_t first,
                                    std::int64_t inner, WeightTiles& out) {
    const FloatPanel from(header, panel);
    const vec::Table16 table = vec::load_table(header.table);
    for (std::int64_t at = 0; at < inner; at += 32) {
        const std::int64_t begin = first + at, end = first + std::min(at + 32, inner);
        alignas(64) float value[32][16];
        for (std::int64_t b = 0; b < 32 * value_bytes<kind>; b += 64)
            vec::prefetch(from.data + (begin + span_inputs) * value_bytes<kind> + b);
        each_scale(header, begin, end, [&](std::int64_t k, std::int64_t stop, std::int64_t tile) {
            const vec::F32x16 scale = from.scales ? vec::load16(from.scales + 16 * tile) : vec::splat16(1.0f);
            for (; k < stop; ++k) vec::store(value[k - begin], scale * load_weights<kind>(from.data, k, table));
        });
        for (std::int64_t k = end - begin; k < 32; ++k) vec::store(value[k], vec::splat16(0.0f));
        for (int j = 0; j < 16; ++j)
            _mm512_store_si512(out.pairs[at / 32][j], interleave(vec::to_bf16(_mm512_load_ps(value[2 * j]),
                                                                              _mm512_load_ps(value[2 * j + 1]))));
    }
}

// bfloat16 weights without a scale are only put in order.
static inline void make_bf16_tiles(const std::byte* data, std::int64_t first, std::int64_t inner, WeightTiles& out) {
    for (std::int64_t k = 0; k < (inner + 31) / 32 * 32; k += 2) {
        const std::byte* const from = data + (first + k) * 32;
        vec::prefetch(from + span_inputs * 32);
        const std::int64_t left = std::clamp<std::int64_t>(inner - k, 0, 2);
        const auto there = static_cast<__mmask16>((1u << 8 * left) - 1);
        _mm512_store_si512(out.pairs[k / 32][k / 2 % 16], interleave(_mm512_maskz_loadu_epi32(there, from)));
    }
}

// Inputs of span s, `inner` of them, of a panel.
static inline void make_tiles(const PackedMatrix& matrix, const std::byte* panel, std::int64_t s, std::int64_t inner,
                              CodeSpan& codes, WeightTiles& out) {
    const PackedHeader& header = matrix.header();
    const std::int64_t first = s * span_inputs;
    switch (header.kind) {
        case PackedKind::f32:
            return make_float_tiles<PackedKind::f32>(header, panel, first, inner, out);
        case PackedKind::bf16:
            if (header.scale == ScaleKind::none) return make_bf16_tiles(panel, first, inner, out);
            return make_float_tiles<PackedKind::bf16>(header, panel, first, inner, out);
        case PackedKind::f16:
            return make_float_tiles<PackedKind::f16>(header, panel, first, inner, out);
        case PackedKind::f8_e4m3:
            return make_float_tiles<PackedKind::f8_e4m3>(header, panel, first, inner, out);
        case PackedKind::f8_e5m2:
            return make_float_tiles<PackedKind::f8_e5m2>(header, panel, first, inner, out);
        case PackedKind::table:
            return make_float_tiles<PackedKind::table>(header, panel, first, inner, out);
        default:
            return make_code_tiles(matrix, panel, s, codes, out);
    }
}

}  // namespace penstock::PENSTOCK_ISA
