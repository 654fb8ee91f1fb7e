// Sixteen lanes in one 512-bit register.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA::vec {

struct F32x16 {
    __m512 v;
};

static inline __mmask16 first(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

static inline F32x16 load16(const float* from) { return {_mm512_loadu_ps(from)}; }
// The first `count` (0 to 15) values, then zeros; nothing beyond them is read.
static inline F32x16 load16(const float* from, std::int64_t count) {
    return {_mm512_maskz_loadu_ps(first(count), from)};
}
static inline F32x16 splat16(float value) { return {_mm512_set1_ps(value)}; }
static inline void store(float* to, F32x16 a) { _mm512_storeu_ps(to, a.v); }
static inline void store(float* to, F32x16 a, std::int64_t count) { _mm512_mask_storeu_ps(to, first(count), a.v); }
static inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }  // b if either is NaN
static inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F32x16 abs(F32x16 a) { return {_mm512_abs_ps(a.v)}; }
static inline F32x16 round(F32x16 a) {  // to the nearest integer, ties to even
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// value where x >= limit, else 0
static inline F32x16 zero_below(F32x16 value, F32x16 x, F32x16 limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), value.v)};
}
// a * 2^n for whole n, -126 <= n <= 127
static inline F32x16 scale_by_power(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// Sixteen stored values as floats.
static inline F32x16 load16_bf16(const std::uint16_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// Sixteen pairs' first values, or second ones.
template <bool second>
static inline F32x16 load16_bf16_pairs(const std::uint16_t* from) {
    const __m512i bits = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(second ? _mm512_and_si512(bits, _mm512_set1_epi32(-0x10000))
                                       : _mm512_slli_epi32(bits, 16))};
}
static inline F32x16 load16_f16(const std::uint16_t* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
static inline F32x16 load16_i8(const std::int8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
// e4m3 without infinities (OCP 8-bit floating point v1.0); the two NaN codes become +-480.
static inline F32x16 load16_e4m3(const std::uint8_t* from) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8);
    const __m256i rest = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0f))};
}
static inline F32x16 load16_e5m2(const std::uint8_t* from) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm512_cvtph_ps(_mm256_slli_epi16(wide, 8))};
}
// Rounded to nearest, ties to even.
static inline void store16_bf16(std::uint16_t* to, F32x16 a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16)));
}
static inline void store16_f16(std::uint16_t* to, F32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

// a in lanes from <= i < to, other elsewhere
static inline F32x16 keep(F32x16 a, std::int64_t from, std::int64_t to, F32x16 other) {
    return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(first(to) & ~first(from)), a.v)};
}
// Sixteen bytes' lower and upper four bits.
static inline void load16_nibbles(const std::uint8_t* from, F32x16& low, F32x16& high) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    low = {_mm512_cvtepi32_ps(_mm512_and_si512(wide, _mm512_set1_epi32(15)))};
    high = {_mm512_cvtepi32_ps(_mm512_srli_epi32(wide, 4))};
}
constexpr int query_block = 6, vector_block = 4;  // sums of a block fit into the registers
constexpr int few_queries = query_block, many_queries = query_block;

// The sum, and the greatest, of all lanes: of lanes 8 apart first, then 4, 2 and 1.
static inline float sum(F32x16 a) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float most(F32x16 a) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Lane j of row i becomes lane i of row j.
static inline void transpose(F32x16 (&row)[16]) {
    __m512 a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_ps(row[i].v, row[i + 1].v);
        a[i + 1] = _mm512_unpackhi_ps(row[i].v, row[i + 1].v);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // b[i + c]: column 4 l + c of rows i to i + 3, in 128-bit lane l
        b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        const __m512 even_top = _mm512_shuffle_f32x4(b[c], b[c + 4], 0x88),
                     odd_top = _mm512_shuffle_f32x4(b[c], b[c + 4], 0xdd);
        const __m512 even_low = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0x88),
                     odd_low = _mm512_shuffle_f32x4(b[c + 8], b[c + 12], 0xdd);
        row[c].v = _mm512_shuffle_f32x4(even_top, even_low, 0x88);
        row[c + 4].v = _mm512_shuffle_f32x4(odd_top, odd_low, 0x88);
        row[c + 8].v = _mm512_shuffle_f32x4(even_top, even_low, 0xdd);
        row[c + 12].v = _mm512_shuffle_f32x4(odd_top, odd_low, 0xdd);
    }
}

}  // namespace penstock::PENSTOCK_ISA::vec
