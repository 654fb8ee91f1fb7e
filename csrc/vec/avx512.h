// Eight lanes: one 256-bit register of floats, one 512-bit register of doubles.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA::vec {

struct F32 {
    __m256 v;
};
struct F64 {
    __m512d v;
};
struct U64 {
    __m512i v;
};

static inline F32 load(const float* from) { return {_mm256_loadu_ps(from)}; }
static inline F32 splat(float value) { return {_mm256_set1_ps(value)}; }
static inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline unsigned less(F32 a, F32 b) { return _mm256_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
static inline unsigned equal(F32 a, F32 b) { return _mm256_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
static inline F64 widen(F32 a) { return {_mm512_cvtps_pd(a.v)}; }
static inline F64 splat(double value) { return {_mm512_set1_pd(value)}; }
static inline F64 operator+(F64 a, F64 b) { return {_mm512_add_pd(a.v, b.v)}; }
static inline F64 operator-(F64 a, F64 b) { return {_mm512_sub_pd(a.v, b.v)}; }
static inline F64 operator*(F64 a, F64 b) { return {_mm512_mul_pd(a.v, b.v)}; }
static inline F64 max(F64 a, F64 b) { return {_mm512_max_pd(a.v, b.v)}; }
// value where x >= limit, else 0
static inline F64 zero_below(F64 value, F64 x, double limit) {
    return {_mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x.v, _mm512_set1_pd(limit), _CMP_GE_OQ), value.v)};
}
// 2^n, where the double is n + 1.5 * 2^52 and -1022 <= n <= 1023
static inline F64 exp2_of_shifted(F64 shifted) {
    const __m512i bits = _mm512_slli_epi64(_mm512_castpd_si512(shifted.v), 52);
    return {_mm512_castsi512_pd(_mm512_add_epi64(bits, _mm512_set1_epi64(1023LL << 52)))};
}
static inline void store(double* to, F64 a) { _mm512_storeu_pd(to, a.v); }
static inline void store(float* to, F32 a) { _mm256_storeu_ps(to, a.v); }

// Words of 32 bits in the low halves; the high halves may hold anything.
static inline U64 load_words(const std::uint32_t* from) {
    return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
}
static inline U64 splat_words(std::uint32_t word) { return {_mm512_set1_epi64(word)}; }
static inline U64 operator^(U64 a, U64 b) { return {_mm512_xor_si512(a.v, b.v)}; }
// The products of the low halves, whole; and what is in the high halves.
static inline U64 multiply_words(U64 a, U64 b) { return {_mm512_mul_epu32(a.v, b.v)}; }
static inline U64 high_words(U64 a) { return {_mm512_srli_epi64(a.v, 32)}; }
static inline void store_words(std::uint32_t* to, U64 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi64_epi32(a.v));
}

}  // namespace penstock::PENSTOCK_ISA::vec
