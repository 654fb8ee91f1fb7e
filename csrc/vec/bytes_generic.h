// Sixty-four bytes, and sixteen integers, as plain arrays.
#pragma once

#include "wide_generic.h"

namespace penstock::PENSTOCK_ISA::vec {

inline constexpr int tile_rows = 3;
inline constexpr int stream_rows = 2;    // of activations, whose sums with four panels fit in registers
inline constexpr int most_streamed = 1;  // rows that read codes as they are stored
static constexpr int streamed_rows(int) { return most_streamed; }
static constexpr int float_tile_panels(int) { return 1; }
static constexpr int tile_panels(int) { return 1; }

struct Bytes64 {
    std::uint8_t lane[64];
};
struct I32x16 {
    std::int32_t lane[16];
};

template <class F>
static inline Bytes64 map64(F function) {
    Bytes64 out;
    for (int i = 0; i < 64; ++i) out.lane[i] = static_cast<std::uint8_t>(function(i));
    return out;
}

static inline Bytes64 load64(const std::uint8_t* from) {
    Bytes64 out;
    std::memcpy(out.lane, from, 64);
    return out;
}
static inline void store64(std::uint8_t* to, Bytes64 a) { std::memcpy(to, a.lane, 64); }
static inline Bytes64 repeat16(const std::uint8_t* from) {
    return map64([=](int i) { return from[i % 16]; });
}
static inline Bytes64 operator|(Bytes64 a, Bytes64 b) {
    return map64([&](int i) { return a.lane[i] | b.lane[i]; });
}
static inline Bytes64 operator+(Bytes64 a, Bytes64 b) {
    return map64([&](int i) { return a.lane[i] + b.lane[i]; });
}
template <int bits>
static inline Bytes64 shift_right(Bytes64 a) {  // to the left where negative
    return map64([&](int i) { return bits >= 0 ? a.lane[i] >> (bits & 7) : a.lane[i] << (-bits & 7); });
}
static inline Bytes64 mask(Bytes64 a, std::uint8_t bits) {
    return map64([&](int i) { return a.lane[i] & bits; });
}
// table[i] for every byte i < 16; `table` holds its 16 bytes four times
static inline Bytes64 lookup(Bytes64 table, Bytes64 at) {
    return map64([&](int i) { return table.lane[at.lane[i] & 15]; });
}
// 1 where a >= limit, else 0
static inline Bytes64 at_least(Bytes64 a, std::uint8_t limit) {
    return map64([&](int i) { return a.lane[i] >= limit; });
}

static inline Bytes64 operator-(Bytes64 a, Bytes64 b) {
    return map64([&](int i) { return a.lane[i] - b.lane[i]; });
}
// Bits set in all bytes.
static inline Bytes64 either(Bytes64 a, std::uint8_t bits) {
    return map64([&](int i) { return a.lane[i] | bits; });
}
// 128 - a where the bit of the eight bytes at `bits` is set
static inline Bytes64 reflect_where(Bytes64 a, const std::uint8_t* bits) {
    return map64([&](int i) {
        const int set = bits[i / 8] >> i % 8 & 1;
        return (a.lane[i] ^ -set) + set * 129;
    });
}
// For each four bytes: `set` where the bit of the two bytes at `bits` is set, else `clear`.
static inline Bytes64 fours_where(const std::uint8_t* bits, std::uint8_t clear, std::uint8_t set) {
    return map64([=](int i) { return bits[i / 32] >> i / 4 % 8 & 1 ? set : clear; });
}

struct TwoBytes64 {
    Bytes64 first, second;
};
// The first four bytes of sixteen entries, and the last four.
template <class Place>
static inline TwoBytes64 look_up_eights(const std::uint64_t* table, const Place* at) {
    TwoBytes64 out;
    for (int i = 0; i < 16; ++i) {
        const std::uint64_t entry = table[at[i]];
        std::memcpy(out.first.lane + 4 * i, &entry, 4);
        const std::uint64_t rest = entry >> 32;
        std::memcpy(out.second.lane + 4 * i, &rest, 4);
    }
    return out;
}
// table[nibble] for the four nibbles, low first, of thirty-two words, at places low[i] and 256 more where the bit of
// the four bytes at `high` is set (if there are more words than 256)
template <std::size_t words>
static inline TwoBytes64 look_up_fours(const std::uint16_t* from, const std::uint8_t* low, const std::uint8_t* high,
                                       const Bytes64& table) {
    TwoBytes64 out;
    for (int i = 0; i < 32; ++i) {
        const int word = from[words > 256 ? low[i] | (high[i / 8] >> i % 8 & 1) << 8 : low[i]];
        for (int j = 0; j < 4; ++j)
            (i < 16 ? out.first : out.second).lane[i % 16 * 4 + j] = table.lane[word >> 4 * j & 15];
    }
    return out;
}
// to[i] = low[i] + 256 for bit i of the first two bytes at `high` + 512 for that of the next two …, i < 16
template <std::int64_t high_bits>
static inline void store_places(std::uint32_t* to, const std::uint8_t* low, const std::uint8_t* high) {
    for (int i = 0; i < 16; ++i) {
        to[i] = low[i];
        for (std::int64_t b = 0; b < high_bits; ++b) to[i] += (high[2 * b + i / 8] >> i % 8 & 1u) << (8 + b);
    }
}

static inline I32x16 splat_i32(std::int32_t value) {
    I32x16 out;
    for (auto& lane : out.lane) lane = value;
    return out;
}
// sum[i] + the products of unsigned weights 4 i … 4 i + 3 and the four signed activations at `four`
static inline I32x16 dot4(I32x16 sum, const Bytes64& weights, const std::int8_t* four) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 4; ++j) sum.lane[i] += weights.lane[4 * i + j] * four[j];
    return sum;
}
static inline F32x16 to_float(I32x16 a) {
    return map16([&](int i) { return static_cast<float>(a.lane[i]); });
}
static inline I32x16 operator+(I32x16 a, I32x16 b) {
    for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
    return a;
}

// 256 a + b, modulo 2^32
static inline I32x16 shift_add(I32x16 a, std::int32_t b) {
    for (auto& lane : a.lane)
        lane = static_cast<std::int32_t>(static_cast<std::uint32_t>(lane) * 256u + static_cast<std::uint32_t>(b));
    return a;
}
// Whole numbers of -128 to 127.
static inline void store16_i8(std::int8_t* to, F32x16 a) {
    for (int i = 0; i < 16; ++i) to[i] = static_cast<std::int8_t>(a.lane[i]);
}

static inline F32x16 load16_u8(const std::uint8_t* from) {
    return map16([=](int i) { return static_cast<float>(from[i]); });
}
// Scales 2^(e - 128), e = 0 to 255.
static inline F32x16 load16_e8m0(const std::uint8_t* from) {
    return map16([=](int i) {
        const std::uint32_t e = from[i];
        return from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    });
}
// table[nibble] of the low four bits of sixteen bytes, and of their high four bits
struct Table16 {
    float value[16];
};
static inline Table16 load_table(const float* table) {
    Table16 out;
    std::memcpy(out.value, table, 64);
    return out;
}
static inline F32x16 lookup_low(const Table16& table, const std::uint8_t* from) {
    return map16([&](int i) { return table.value[from[i] & 15]; });
}
static inline F32x16 lookup_high(const Table16& table, const std::uint8_t* from) {
    return map16([&](int i) { return table.value[from[i] >> 4]; });
}

// The greatest absolute value of 32 floats; NaN if any is NaN.
static inline float most_absolute(const float* x) {
    std::uint32_t top = 0;
    for (int i = 0; i < 32; ++i) {
        const std::uint32_t bits = to_bits(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    return from_bits(top);
}
// to[i] = x[i] * by to the nearest integer, ties to even, i < 16, of magnitude below 128; returns their sum
static inline std::int32_t store16_rounded(std::int8_t* to, const float* x, float by) {
    std::int32_t sum = 0;
    for (int i = 0; i < 16; ++i) {
        const float scaled = std::nearbyintf(x[i] * by);
        const auto value = static_cast<std::int8_t>(scaled >= -127.0f && scaled <= 127.0f ? scaled : 0.0f);
        to[i] = value;
        sum += value;
    }
    return sum;
}

}  // namespace penstock::PENSTOCK_ISA::vec

#include "code_sums.h"
