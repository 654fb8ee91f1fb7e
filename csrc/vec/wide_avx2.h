// Sixteen lanes in two 256-bit registers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace penstock::PENSTOCK_ISA::vec {

struct F32x16 {
    __m256 low, high;
};

static inline F32x16 load16(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
// The first `count` (0 to 15) values, then zeros; nothing beyond them is read.
static inline F32x16 load16(const float* from, std::int64_t count) {
    float lane[16] = {};
    std::memcpy(lane, from, static_cast<std::size_t>(count) * 4);
    return load16(lane);
}
static inline F32x16 splat16(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline void store(float* to, F32x16 a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
static inline void store(float* to, F32x16 a, std::int64_t count) {
    float lane[16];
    store(lane, a);
    std::memcpy(to, lane, static_cast<std::size_t>(count) * 4);
}
static inline F32x16 operator+(F32x16 a, F32x16 b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static inline F32x16 operator-(F32x16 a, F32x16 b) {
    return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
static inline F32x16 operator*(F32x16 a, F32x16 b) {
    return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static inline F32x16 operator/(F32x16 a, F32x16 b) {
    return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline F32x16 max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline F32x16 min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
static inline F32x16 abs(F32x16 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
static inline F32x16 round(F32x16 a) {  // to the nearest integer, ties to even
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}
// value where x >= limit, else 0
static inline F32x16 zero_below(F32x16 value, F32x16 x, F32x16 limit) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.low, limit.low, _CMP_GE_OQ), value.low),
            _mm256_and_ps(_mm256_cmp_ps(x.high, limit.high, _CMP_GE_OQ), value.high)};
}
// a * 2^n for whole n, -126 <= n <= 127
static inline F32x16 scale_by_power(F32x16 a, F32x16 n) {
    const auto power = [](__m256 x) {
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
    };
    return {_mm256_mul_ps(a.low, power(n.low)), _mm256_mul_ps(a.high, power(n.high))};
}

// Sixteen stored values as floats.
static inline F32x16 load16_bf16(const std::uint16_t* from) {
    const auto half = [](const std::uint16_t* at) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    };
    return {half(from), half(from + 8)};
}
// Sixteen pairs' first values, or second ones.
template <bool second>
static inline F32x16 load16_bf16_pairs(const std::uint16_t* from) {
    const auto half = [](const std::uint16_t* at) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
        return _mm256_castsi256_ps(second ? _mm256_and_si256(bits, _mm256_set1_epi32(-0x10000))
                                          : _mm256_slli_epi32(bits, 16));
    };
    return {half(from), half(from + 16)};
}
static inline F32x16 load16_f16(const std::uint16_t* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
}
static inline F32x16 load16_i8(const std::int8_t* from) {
    const auto half = [](const std::int8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    };
    return {half(from), half(from + 8)};
}
// e4m3 without infinities (OCP 8-bit floating point v1.0); the two NaN codes become +-480.
static inline F32x16 load16_e4m3(const std::uint8_t* from) {
    const auto half = [](const std::uint8_t* at) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m128i sign = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8);
        const __m128i rest = _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7);
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, rest)), _mm256_set1_ps(256.0f));
    };
    return {half(from), half(from + 8)};
}
static inline F32x16 load16_e5m2(const std::uint8_t* from) {
    const auto half = [](const std::uint8_t* at) {
        const __m128i wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        return _mm256_cvtph_ps(_mm_slli_epi16(wide, 8));
    };
    return {half(from), half(from + 8)};
}
// Rounded to nearest, ties to even.
static inline void store16_bf16(std::uint16_t* to, F32x16 a) {
    const auto half = [](__m256 x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up =
            _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
    };
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half(a.low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), half(a.high));
}
static inline void store16_f16(std::uint16_t* to, F32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT));
}

// a in lanes from <= i < to, other elsewhere
static inline F32x16 keep(F32x16 a, std::int64_t from, std::int64_t to, F32x16 other) {
    alignas(32) static constexpr std::int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m256i least = _mm256_set1_epi32(static_cast<int>(from) - 1), end = _mm256_set1_epi32(static_cast<int>(to));
    const auto half = [=](__m256 x, __m256 y, const std::int32_t* at) {
        const __m256i lane = _mm256_load_si256(reinterpret_cast<const __m256i*>(at));
        const __m256i inside = _mm256_and_si256(_mm256_cmpgt_epi32(lane, least), _mm256_cmpgt_epi32(end, lane));
        return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(inside));
    };
    return {half(a.low, other.low, numbers), half(a.high, other.high, numbers + 8)};
}
// Sixteen bytes' lower and upper four bits.
static inline void load16_nibbles(const std::uint8_t* from, F32x16& low, F32x16& high) {
    const auto wide = [](const std::uint8_t* at) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    };
    const __m256i a = wide(from), b = wide(from + 8), mask = _mm256_set1_epi32(15);
    low = {_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(b, mask))};
    high = {_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), _mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4))};
}
constexpr int query_block = 2, vector_block = 2;  // sums of a block fit into the registers
constexpr int few_queries = 4;                    // whose sums fit with one vector
constexpr int many_queries = 6;  // of more, read from the nearest cache: 4 leave multiplications waiting for each other

// The sum, and the greatest, of all lanes: of lanes 8 apart first, then 4, 2 and 1.
static inline float sum(F32x16 a) {
    const __m256 eight = _mm256_add_ps(a.low, a.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float most(F32x16 a) {
    const __m256 eight = _mm256_max_ps(a.low, a.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline void transpose(__m256 (&row)[8]) {
    __m256 a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        row[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
        row[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
    }
}
// Lane j of row i becomes lane i of row j.
static inline void transpose(F32x16 (&row)[16]) {
    __m256 quarter[4][8];  // upper left, upper right, lower left, lower right
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        quarter[0][i] = row[i].low;
        quarter[1][i] = row[i].high;
        quarter[2][i] = row[i + 8].low;
        quarter[3][i] = row[i + 8].high;
    }
#pragma GCC unroll 4
    for (auto& part : quarter) transpose(part);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        row[i] = {quarter[0][i], quarter[2][i]};
        row[i + 8] = {quarter[1][i], quarter[3][i]};
    }
}

}  // namespace penstock::PENSTOCK_ISA::vec
