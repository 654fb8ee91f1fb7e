// Sixty-four bytes, and sixteen integers, in one 512-bit register.
#pragma once

#include "wide_avx512.h"

namespace penstock::PENSTOCK_ISA::vec {

inline constexpr int tile_rows =
    6;  // of activations; rows and panels of a tile make 12 sums of integers and 12 of floats
inline constexpr int stream_rows = 6;    // of activations, whose sums with four panels fit in registers
inline constexpr int most_streamed = 4;  // rows that read codes as they are stored
static constexpr int streamed_rows(int) { return most_streamed; }
static constexpr int float_tile_panels(int) { return 4; }
static constexpr int tile_panels(int rows) { return rows > 3 ? 2 : 4; }

struct Bytes64 {
    __m512i v;
};
struct I32x16 {
    __m512i v;
};

static inline Bytes64 load64(const std::uint8_t* from) { return {_mm512_loadu_si512(from)}; }
static inline void store64(std::uint8_t* to, Bytes64 a) { _mm512_storeu_si512(to, a.v); }
static inline Bytes64 repeat16(const std::uint8_t* from) {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
static inline Bytes64 operator|(Bytes64 a, Bytes64 b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline Bytes64 operator+(Bytes64 a, Bytes64 b) { return {_mm512_add_epi8(a.v, b.v)}; }
// Bits of neighbouring bytes come in: mask() what is wanted.
template <int bits>
static inline Bytes64 shift_right(Bytes64 a) {  // to the left where negative
    if constexpr (bits > 0) return {_mm512_srli_epi16(a.v, bits)};
    if constexpr (bits < 0) return {_mm512_slli_epi16(a.v, -bits)};
    return a;
}
static inline Bytes64 mask(Bytes64 a, std::uint8_t bits) {
    return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(bits)))};
}
// table[i] for every byte i < 16; `table` holds its 16 bytes four times
static inline Bytes64 lookup(Bytes64 table, Bytes64 i) { return {_mm512_shuffle_epi8(table.v, i.v)}; }
// 1 where a >= limit, else 0
static inline Bytes64 at_least(Bytes64 a, std::uint8_t limit) {
    const __mmask64 holds = _mm512_cmpge_epu8_mask(a.v, _mm512_set1_epi8(static_cast<char>(limit)));
    return {_mm512_maskz_set1_epi8(holds, 1)};
}

static inline Bytes64 operator-(Bytes64 a, Bytes64 b) { return {_mm512_sub_epi8(a.v, b.v)}; }
// Bits set in all bytes.
static inline Bytes64 either(Bytes64 a, std::uint8_t bits) {
    return {_mm512_or_si512(a.v, _mm512_set1_epi8(static_cast<char>(bits)))};
}
// 128 - a where the bit of the eight bytes at `bits` is set
static inline Bytes64 reflect_where(Bytes64 a, const std::uint8_t* bits) {
    __mmask64 where;
    __builtin_memcpy(&where, bits, 8);
    return {_mm512_mask_sub_epi8(a.v, where, _mm512_set1_epi8(-128), a.v)};
}
// For each four bytes: `set` where the bit of the two bytes at `bits` is set, else `clear`.
static inline Bytes64 fours_where(const std::uint8_t* bits, std::uint8_t clear, std::uint8_t set) {
    __mmask16 where;
    __builtin_memcpy(&where, bits, 2);
    return {_mm512_mask_mov_epi32(_mm512_set1_epi8(static_cast<char>(clear)), where,
                                  _mm512_set1_epi8(static_cast<char>(set)))};
}

struct TwoBytes64 {
    Bytes64 first, second;
};
// The first four bytes of sixteen entries, and the last four. Two are moved at a time: gather instructions are slow on
// some processors.
template <class Place>
static inline TwoBytes64 look_up_eights(const std::uint64_t* table, const Place* at) {
    const auto two = [&](int i) {
        const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + at[i]));
        return _mm_castpd_si128(
            _mm_loadh_pd(_mm_castsi128_pd(first), reinterpret_cast<const double*>(table + at[i + 1])));
    };
    const auto four = [&](int i) { return _mm256_inserti128_si256(_mm256_castsi128_si256(two(i)), two(i + 2), 1); };
    const __m512i low = _mm512_inserti64x4(_mm512_castsi256_si512(four(0)), four(4), 1);
    const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(four(8)), four(12), 1);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return {{_mm512_permutex2var_epi32(low, even, high)},
            {_mm512_permutex2var_epi32(low, _mm512_or_si512(even, _mm512_set1_epi32(1)), high)}};
}
// table[nibble] for the four nibbles, low first, of thirty-two words, at places low[i] and 256 more where the bit of
// the four bytes at `high` is set (if there are more words than 256)
template <std::size_t words>
static inline TwoBytes64 look_up_fours(const std::uint16_t* from, const std::uint8_t* low, const std::uint8_t* high,
                                       Bytes64 table) {
    const __m512i at = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    const __mmask32 by64 = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
    const __mmask32 by128 = _mm512_test_epi16_mask(at, _mm512_set1_epi16(128));
    const auto of64 = [&](const std::uint16_t* x) {
        return _mm512_permutex2var_epi16(_mm512_loadu_si512(x), at, _mm512_loadu_si512(x + 32));
    };
    const auto of128 = [&](const std::uint16_t* x) { return _mm512_mask_blend_epi16(by64, of64(x), of64(x + 64)); };
    const auto of256 = [&](const std::uint16_t* x) { return _mm512_mask_blend_epi16(by128, of128(x), of128(x + 128)); };
    __m512i found = of256(from);
    if constexpr (words > 256) {
        __mmask32 by256;
        __builtin_memcpy(&by256, high, 4);
        found = _mm512_mask_blend_epi16(by256, found, of256(from + 256));
    }
    const auto spread = [&](__m256i half) {
        __m512i w = _mm512_cvtepu16_epi32(half);
        w = _mm512_and_si512(_mm512_or_si512(w, _mm512_slli_epi32(w, 8)), _mm512_set1_epi32(0x00ff00ff));
        w = _mm512_and_si512(_mm512_or_si512(w, _mm512_slli_epi32(w, 4)), _mm512_set1_epi32(0x0f0f0f0f));
        return lookup(table, {w});
    };
    return {spread(_mm512_castsi512_si256(found)), spread(_mm512_extracti64x4_epi64(found, 1))};
}
// to[i] = low[i] + 256 for bit i of the first two bytes at `high` + 512 for that of the next two …, i < 16
template <std::int64_t high_bits>
static inline void store_places(std::uint32_t* to, const std::uint8_t* low, const std::uint8_t* high) {
    __m512i out = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    for (std::int64_t b = 0; b < high_bits; ++b) {
        __mmask16 where;
        __builtin_memcpy(&where, high + 2 * b, 2);
        out = _mm512_mask_add_epi32(out, where, out, _mm512_set1_epi32(256 << b));
    }
    _mm512_storeu_si512(to, out);
}

static inline I32x16 splat_i32(std::int32_t value) { return {_mm512_set1_epi32(value)}; }
// sum[i] + the products of unsigned weights 4 i … 4 i + 3 and the four signed activations at `four`
static inline I32x16 dot4(I32x16 sum, Bytes64 weights, const std::int8_t* four) {
    std::int32_t word;
    __builtin_memcpy(&word, four, 4);
    // The intrinsic makes gcc 12 copy and spill its sums.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(weights.v), "v"(_mm512_set1_epi32(word)));
    return sum;
}
static inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I32x16 operator+(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }

// 256 a + b
static inline I32x16 shift_add(I32x16 a, std::int32_t b) {
    return {_mm512_add_epi32(_mm512_slli_epi32(a.v, 8), _mm512_set1_epi32(b))};
}
// Whole numbers of -128 to 127.
static inline void store16_i8(std::int8_t* to, F32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

static inline F32x16 load16_u8(const std::uint8_t* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
// Scales 2^(e - 128), e = 0 to 255.
static inline F32x16 load16_e8m0(const std::uint8_t* from) {
    const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(e, _mm512_set1_epi32(2)), tiny))};
}
// table[nibble] of the low four bits of sixteen bytes, and of their high four bits
struct Table16 {
    __m512 v;
};
static inline Table16 load_table(const float* table) { return {_mm512_loadu_ps(table)}; }
static inline F32x16 lookup_low(Table16 table, const std::uint8_t* from) {
    return {
        _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), table.v)};
}
static inline F32x16 lookup_high(Table16 table, const std::uint8_t* from) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(wide, 4), table.v)};
}

// The greatest absolute value of 32 floats; NaN if any is NaN.
static inline float most_absolute(const float* x) {
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi32(0x7fffffff));
    const __m512i b = _mm512_and_si512(_mm512_loadu_si512(x + 16), _mm512_set1_epi32(0x7fffffff));
    const std::uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(a, b));
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}
// to[i] = x[i] * by to the nearest integer, ties to even, i < 16, of magnitude below 128; returns their sum
static inline std::int32_t store16_rounded(std::int8_t* to, const float* x, float by) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(by)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(q));
    return _mm512_reduce_add_epi32(q);
}

}  // namespace penstock::PENSTOCK_ISA::vec

#include "code_sums.h"
