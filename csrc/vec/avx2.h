// Eight lanes: one 256-bit register of floats, two of doubles.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace penstock::PENSTOCK_ISA::vec {

struct F32 {
    __m256 v;
};
struct F64 {
    __m256d low, high;
};
struct U64 {
    __m256i low, high;
};

static inline F32 load(const float* from) { return {_mm256_loadu_ps(from)}; }
static inline F32 splat(float value) { return {_mm256_set1_ps(value)}; }
static inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
static inline unsigned less(F32 a, F32 b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)));
}
static inline unsigned equal(F32 a, F32 b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)));
}
static inline F64 widen(F32 a) {
    return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v)), _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1))};
}
static inline F64 splat(double value) { return {_mm256_set1_pd(value), _mm256_set1_pd(value)}; }
static inline F64 operator+(F64 a, F64 b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
static inline F64 operator-(F64 a, F64 b) { return {_mm256_sub_pd(a.low, b.low), _mm256_sub_pd(a.high, b.high)}; }
static inline F64 operator*(F64 a, F64 b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
static inline F64 max(F64 a, F64 b) { return {_mm256_max_pd(a.low, b.low), _mm256_max_pd(a.high, b.high)}; }
// value where x >= limit, else 0
static inline F64 zero_below(F64 value, F64 x, double limit) {
    const __m256d at = _mm256_set1_pd(limit);
    return {_mm256_and_pd(value.low, _mm256_cmp_pd(x.low, at, _CMP_GE_OQ)),
            _mm256_and_pd(value.high, _mm256_cmp_pd(x.high, at, _CMP_GE_OQ))};
}
static inline __m256d exp2_of_shifted(__m256d shifted) {
    const __m256i bits = _mm256_slli_epi64(_mm256_castpd_si256(shifted), 52);
    return _mm256_castsi256_pd(_mm256_add_epi64(bits, _mm256_set1_epi64x(1023LL << 52)));
}
// 2^n, where the double is n + 1.5 * 2^52 and -1022 <= n <= 1023
static inline F64 exp2_of_shifted(F64 shifted) { return {exp2_of_shifted(shifted.low), exp2_of_shifted(shifted.high)}; }
static inline void store(double* to, F64 a) {
    _mm256_storeu_pd(to, a.low);
    _mm256_storeu_pd(to + 4, a.high);
}
static inline void store(float* to, F32 a) { _mm256_storeu_ps(to, a.v); }

// Words of 32 bits in the low halves; the high halves may hold anything.
static inline U64 load_words(const std::uint32_t* from) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_cvtepu32_epi64(_mm256_castsi256_si128(words)),
            _mm256_cvtepu32_epi64(_mm256_extracti128_si256(words, 1))};
}
static inline U64 splat_words(std::uint32_t word) { return {_mm256_set1_epi64x(word), _mm256_set1_epi64x(word)}; }
static inline U64 operator^(U64 a, U64 b) { return {_mm256_xor_si256(a.low, b.low), _mm256_xor_si256(a.high, b.high)}; }
// The products of the low halves, whole; and what is in the high halves.
static inline U64 multiply_words(U64 a, U64 b) {
    return {_mm256_mul_epu32(a.low, b.low), _mm256_mul_epu32(a.high, b.high)};
}
static inline U64 high_words(U64 a) { return {_mm256_srli_epi64(a.low, 32), _mm256_srli_epi64(a.high, 32)}; }
static inline void store_words(std::uint32_t* to, U64 a) {
    const __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high), 0x88);
    const __m256d ordered = _mm256_permute4x64_pd(_mm256_castps_pd(both), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_castpd_si256(ordered));
}

}  // namespace penstock::PENSTOCK_ISA::vec
