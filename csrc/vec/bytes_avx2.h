// Sixty-four bytes in two 256-bit registers.
#pragma once

#include "wide_avx2.h"

#define PENSTOCK_WHOLE_NUMBERS 1  // see attention_digits.h

namespace penstock::PENSTOCK_ISA::vec {

inline constexpr int tile_rows = 6;      // of activations: 12 sums, 2 weights, 1 activation in 16 registers
inline constexpr int stream_rows = 1;    // of activations, whose sums with four panels fit in registers
inline constexpr int most_streamed = 8;  // rows that read codes as they are stored
// The same of codes up to `greatest`: four bits, whose sums need no widening before a unit ends, gain most from a tile.
static constexpr int streamed_rows(int greatest) { return greatest > 15 ? most_streamed : 6; }
static constexpr int float_tile_panels(int) { return 1; }
static constexpr int tile_panels(int) { return 1; }

struct Bytes64 {
    __m256i low, high;
};

static inline Bytes64 load64(const std::uint8_t* from) {
    const auto* at = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
static inline void store64(std::uint8_t* to, Bytes64 a) {
    auto* at = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(at, a.low);
    _mm256_storeu_si256(at + 1, a.high);
}
static inline Bytes64 repeat16(const std::uint8_t* from) {
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return {both, both};
}
static inline Bytes64 operator|(Bytes64 a, Bytes64 b) {
    return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)};
}
static inline Bytes64 operator+(Bytes64 a, Bytes64 b) {
    return {_mm256_add_epi8(a.low, b.low), _mm256_add_epi8(a.high, b.high)};
}
// Bits of neighbouring bytes come in: mask() what is wanted.
template <int bits>
static inline Bytes64 shift_right(Bytes64 a) {  // to the left where negative
    if constexpr (bits > 0) return {_mm256_srli_epi16(a.low, bits), _mm256_srli_epi16(a.high, bits)};
    if constexpr (bits < 0) return {_mm256_slli_epi16(a.low, -bits), _mm256_slli_epi16(a.high, -bits)};
    return a;
}
static inline Bytes64 mask(Bytes64 a, std::uint8_t bits) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(bits));
    return {_mm256_and_si256(a.low, all), _mm256_and_si256(a.high, all)};
}
// table[i] for every byte i < 16; `table` holds its 16 bytes four times
static inline Bytes64 lookup(Bytes64 table, Bytes64 i) {
    return {_mm256_shuffle_epi8(table.low, i.low), _mm256_shuffle_epi8(table.high, i.high)};
}
// 1 where a >= limit, else 0
static inline Bytes64 at_least(Bytes64 a, std::uint8_t limit) {
    const __m256i least = _mm256_set1_epi8(static_cast<char>(limit)), one = _mm256_set1_epi8(1);
    const auto half = [&](__m256i x) { return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_max_epu8(x, least), x), one); };
    return {half(a.low), half(a.high)};
}

static inline Bytes64 operator-(Bytes64 a, Bytes64 b) {
    return {_mm256_sub_epi8(a.low, b.low), _mm256_sub_epi8(a.high, b.high)};
}
// Bits set in all bytes.
static inline Bytes64 either(Bytes64 a, std::uint8_t bits) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(bits));
    return {_mm256_or_si256(a.low, all), _mm256_or_si256(a.high, all)};
}
// 128 - a where the bit of the eight bytes at `bits` is set
static inline Bytes64 reflect_where(Bytes64 a, const std::uint8_t* bits) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    const auto half = [&](__m256i x, const std::uint8_t* at) {
        std::int32_t word;
        __builtin_memcpy(&word, at, 4);
        const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(word), byte_of);
        const __m256i where = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        return _mm256_blendv_epi8(x, _mm256_sub_epi8(_mm256_set1_epi8(-128), x), where);
    };
    return {half(a.low, bits), half(a.high, bits + 4)};
}
// All ones in the lanes whose bits are set in the two bytes at `bits`.
struct Lanes16 {
    __m256i low, high;
};
static inline Lanes16 lanes_where(const std::uint8_t* bits) {
    std::uint16_t word;
    __builtin_memcpy(&word, bits, 2);
    const __m256i all = _mm256_set1_epi32(word), bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i next = _mm256_slli_epi32(bit, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit), _mm256_cmpeq_epi32(_mm256_and_si256(all, next), next)};
}
// For each four bytes: `set` where the bit of the two bytes at `bits` is set, else `clear`.
static inline Bytes64 fours_where(const std::uint8_t* bits, std::uint8_t clear, std::uint8_t set) {
    const Lanes16 where = lanes_where(bits);
    const __m256i no = _mm256_set1_epi8(static_cast<char>(clear)), yes = _mm256_set1_epi8(static_cast<char>(set));
    return {_mm256_blendv_epi8(no, yes, where.low), _mm256_blendv_epi8(no, yes, where.high)};
}

struct TwoBytes64 {
    Bytes64 first, second;
};
// The first four bytes of sixteen entries, and the last four.
template <class Place>
static inline TwoBytes64 look_up_eights(const std::uint64_t* table, const Place* at) {
    const auto two = [&](int i) {
        const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + at[i]));
        return _mm_castpd_si128(
            _mm_loadh_pd(_mm_castsi128_pd(first), reinterpret_cast<const double*>(table + at[i + 1])));
    };
    const auto four = [&](int i) {
        return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(two(i)), two(i + 2), 1));
    };
    const auto ordered = [](__m256 x) { return _mm256_permute4x64_epi64(_mm256_castps_si256(x), 0xd8); };
    const __m256 a = four(0), b = four(4), c = four(8), d = four(12);
    return {{ordered(_mm256_shuffle_ps(a, b, 0x88)), ordered(_mm256_shuffle_ps(c, d, 0x88))},
            {ordered(_mm256_shuffle_ps(a, b, 0xdd)), ordered(_mm256_shuffle_ps(c, d, 0xdd))}};
}
// table[nibble] for the four nibbles, low first, of thirty-two words, at places low[i] and 256 more where the bit of
// the four bytes at `high` is set (if there are more words than 256)
template <std::size_t words>
static inline TwoBytes64 look_up_fours(const std::uint16_t* from, const std::uint8_t* low, const std::uint8_t* high,
                                       Bytes64 table) {
    std::uint32_t by256 = 0;
    if constexpr (words > 256) __builtin_memcpy(&by256, high, 4);
    const auto word = [&](int i) -> int { return from[low[i] | (by256 >> i & 1) << 8]; };
    const auto eight = [&](int i) {
        __m256i w = _mm256_setr_epi32(word(i), word(i + 1), word(i + 2), word(i + 3), word(i + 4), word(i + 5),
                                      word(i + 6), word(i + 7));
        w = _mm256_and_si256(_mm256_or_si256(w, _mm256_slli_epi32(w, 8)), _mm256_set1_epi32(0x00ff00ff));
        w = _mm256_and_si256(_mm256_or_si256(w, _mm256_slli_epi32(w, 4)), _mm256_set1_epi32(0x0f0f0f0f));
        return _mm256_shuffle_epi8(table.low, w);
    };
    return {{eight(0), eight(8)}, {eight(16), eight(24)}};
}
// to[i] = low[i] + 256 for bit i of the first two bytes at `high` + 512 for that of the next two …, i < 16
template <std::int64_t high_bits>
static inline void store_places(std::uint32_t* to, const std::uint8_t* low, const std::uint8_t* high) {
    const auto half = [](const std::uint8_t* at) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
    };
    __m256i first = half(low), second = half(low + 8);
    for (std::int64_t b = 0; b < high_bits; ++b) {
        const Lanes16 where = lanes_where(high + 2 * b);
        const __m256i more = _mm256_set1_epi32(256 << b);
        first = _mm256_add_epi32(first, _mm256_and_si256(where.low, more));
        second = _mm256_add_epi32(second, _mm256_and_si256(where.high, more));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), second);
}

// Whole numbers of 16 bits times codes: four codes of sixteen lanes, widened, and sums of their products with four
// numbers.
struct WideCodes {
    __m256i four[4];  // of four lanes each

    explicit WideCodes(const std::uint8_t* from) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            four[i] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * i)));
    }
};
struct NumberSum {
    __m256i pairs[4] = {};  // of a lane's first and last two codes

    [[gnu::always_inline]] inline void add(const WideCodes& codes, const std::int8_t* numbers) {
        std::int64_t word;
        __builtin_memcpy(&word, numbers, 8);
        const __m256i four = _mm256_set1_epi64x(word);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) pairs[i] = _mm256_add_epi32(pairs[i], _mm256_madd_epi16(codes.four[i], four));
    }
    F32x16 total(std::int32_t more) const {
        const auto eight = [&](__m256i a, __m256i b) {
            const __m256i lanes = _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8);
            return _mm256_cvtepi32_ps(_mm256_add_epi32(lanes, _mm256_set1_epi32(more)));
        };
        return {eight(pairs[0], pairs[1]), eight(pairs[2], pairs[3])};
    }
};
static inline void store16_i16(std::int8_t* to, F32x16 a) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
}

// A panel's sixteen columns in parts, each a register of floats.
inline constexpr int column_parts = 2;
struct ColumnFloats {
    __m256 v;
};
static inline ColumnFloats load_columns(const float* from) { return {_mm256_loadu_ps(from)}; }
static inline ColumnFloats splat_columns(float value) { return {_mm256_set1_ps(value)}; }
static inline void store(float* to, ColumnFloats a) { _mm256_storeu_ps(to, a.v); }
static inline ColumnFloats operator+(ColumnFloats a, ColumnFloats b) { return {_mm256_add_ps(a.v, b.v)}; }
static inline ColumnFloats operator*(ColumnFloats a, ColumnFloats b) { return {_mm256_mul_ps(a.v, b.v)}; }
static inline ColumnFloats fma(ColumnFloats a, ColumnFloats b, ColumnFloats c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}

// Sums of products of unsigned codes up to `most` with signed bytes of at most 127, of `steps` steps of four each, over
// the columns of a part. Products of two bytes have 16 bits: as many steps as fit are summed in these before they are
// widened. Codes that fit not even once are taken minus 128 (code_base), with their signs given to the other factor.
inline constexpr bool sums_by_greatest = true;
template <int most>
inline constexpr int code_base = 2 * most * 127 > 32767 ? 128 : 0;
template <int most>
struct ColumnCodes {
    __m256i magnitudes, codes;

    template <int part>
    [[gnu::always_inline]] static inline ColumnCodes of(Bytes64 bytes) {
        const __m256i half = part ? bytes.high : bytes.low;
        if constexpr (code_base<most> == 0) return {half, half};
        const __m256i codes = _mm256_xor_si256(half, _mm256_set1_epi8(-128));
        return {_mm256_abs_epi8(codes), codes};
    }
};
template <int most, int steps>
class CodeSum {
public:
    template <int step>
    [[gnu::always_inline]] inline void add(const ColumnCodes<most>& codes, const std::int8_t* four) {
        std::int32_t word;
        __builtin_memcpy(&word, four, 4);
        __m256i a = _mm256_set1_epi32(word);
        if constexpr (code_base<most> != 0) a = _mm256_sign_epi8(a, codes.codes);
        const __m256i products = _mm256_maddubs_epi16(codes.magnitudes, a);
        if constexpr (step % held == 0)
            sum_ = products;
        else if constexpr (held < 4)
            sum_ = _mm256_add_epi16(sum_, products);
        else  // the intrinsic lets gcc 12 make all products before any sum, and spill them
            asm("vpaddw %1, %0, %0" : "+x"(sum_) : "x"(products));
        if constexpr ((step + 1) % held != 0 && step + 1 != steps) return;
        const __m256i wide = _mm256_madd_epi16(sum_, _mm256_set1_epi16(1));
        total_ = step < held ? wide : _mm256_add_epi32(total_, wide);
    }
    [[gnu::always_inline]] inline ColumnFloats total(std::int32_t more) const {
        return {_mm256_cvtepi32_ps(_mm256_add_epi32(total_, _mm256_set1_epi32(more)))};
    }
    [[gnu::always_inline]] inline ColumnFloats total() const { return {_mm256_cvtepi32_ps(total_)}; }

private:
    static constexpr int held = code_base<most> ? 1 : 32767 / (2 * most * 127);  // steps in 16 bits
    __m256i sum_, total_;                                                        // of 16 and of 32 bits
};

static inline F32x16 load16_u8(const std::uint8_t* from) {
    const auto half = [](const std::uint8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    };
    return {half(from), half(from + 8)};
}
// Scales 2^(e - 128), e = 0 to 255.
static inline F32x16 load16_e8m0(const std::uint8_t* from) {
    const auto half = [](const std::uint8_t* at) {
        const __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
        const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e)));
    };
    return {half(from), half(from + 8)};
}
// table[nibble] of the low four bits of sixteen bytes, and of their high four bits
struct Table16 {
    __m256 low, high;
};
static inline Table16 load_table(const float* table) { return {_mm256_loadu_ps(table), _mm256_loadu_ps(table + 8)}; }
static inline __m256 lookup8(Table16 table, __m256i i) {
    const __m256 below = _mm256_permutevar8x32_ps(table.low, i), above = _mm256_permutevar8x32_ps(table.high, i);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
}
static inline F32x16 lookup_low(Table16 table, const std::uint8_t* from) {
    const auto half = [&](const std::uint8_t* at) {
        return lookup8(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    };
    return {half(from), half(from + 8)};
}
static inline F32x16 lookup_high(Table16 table, const std::uint8_t* from) {
    const auto half = [&](const std::uint8_t* at) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
        return lookup8(table, _mm256_srli_epi32(wide, 4));
    };
    return {half(from), half(from + 8)};
}

// The greatest absolute value of 32 floats; NaN if any is NaN.
static inline float most_absolute(const float* x) {
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 32; i += 8) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        top = _mm256_max_epu32(top, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}
// to[i] = x[i] * by to the nearest integer, ties to even, i < 16, of magnitude below 128; returns their sum
static inline std::int32_t store16_rounded(std::int8_t* to, const float* x, float by) {
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), _mm256_set1_ps(by)));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), _mm256_set1_ps(by)));
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
    const __m256i sums = _mm256_add_epi32(a, b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
}

}  // namespace penstock::PENSTOCK_ISA::vec
