// AVX-512 with dot products of bfloat16 pairs.
#pragma once

#include "wide_avx512.h"

#define PENSTOCK_BF16_DOTS 1

namespace penstock::PENSTOCK_ISA::vec {

struct Bf16x32 {
    __m512i v;
};

static inline Bf16x32 load_pairs(const std::uint16_t* from) { return {_mm512_loadu_si512(from)}; }
// The first of each pair if `first`, the second if `second`; zero bits elsewhere.
static inline Bf16x32 load_pairs(const std::uint16_t* from, bool first, bool second) {
    const std::uint32_t bits = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
    return {_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(static_cast<int>(bits)))};
}
// Sixteen pairs as they are, to be moved only.
static inline F32x16 load_bits(const std::uint16_t* from) { return {_mm512_loadu_ps(from)}; }
// a0 b0 a1 b1 … of the bfloat16 of a and b: 64 of them, or the first 32.
static inline void store_pairs(std::uint16_t* to, F32x16 a, F32x16 b, bool all) {
    const __m512i x = _mm512_castps_si512(a.v), y = _mm512_castps_si512(b.v);
    const __m512i even = _mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16));  // of elements 0, 2, …
    const __m512i odd = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(even, low, odd));
    if (all) _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi32(even, high, odd));
}
static inline void store_pairs(std::uint16_t* to, Bf16x32 a) { _mm512_storeu_si512(to, a.v); }
// Pairs of the first and second sixteen values.
static inline Bf16x32 interleave(const std::uint16_t* from) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(16)), 16));
    return {_mm512_permutexvar_epi16(index, _mm512_loadu_si512(from))};
}
// Pairs of floats that bfloat16 holds exactly.
static inline Bf16x32 exact_pairs(F32x16 first, F32x16 second) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first.v), 16);
    return {_mm512_or_si512(low, _mm512_castps_si512(second.v))};
}
// One pair in all lanes.
static inline Bf16x32 splat_pair(const std::uint16_t* from) {
    int bits;
    __builtin_memcpy(&bits, from, 4);
    return {_mm512_set1_epi32(bits)};
}
// Stores the nearest bfloat16, ties to even and subnormal numbers as zero; returns them.
static inline F32x16 store_nearest_bf16(std::uint16_t* to, F32x16 a) {
    const __m256i bits = (__m256i)_mm512_cvtneps_pbh(a.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
// c + a b over each lane's pair. Subnormal numbers count as zero.
static inline F32x16 dot(Bf16x32 a, Bf16x32 b, F32x16 c) {
    return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
}

}  // namespace penstock::PENSTOCK_ISA::vec
