// Sixteen lanes as a plain array: any compiler, any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace penstock::PENSTOCK_ISA::vec {

struct F32x16 {
    float lane[16];
};

template <class F>
static inline F32x16 map16(F function) {
    F32x16 out;
    for (int i = 0; i < 16; ++i) out.lane[i] = function(i);
    return out;
}

static inline float from_bits(std::uint32_t bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}
static inline std::uint32_t to_bits(float value) {
    std::uint32_t out;
    std::memcpy(&out, &value, 4);
    return out;
}
static inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0));
    if (rest >= 0x400) return from_bits(sign | ((rest << 13) + 0x38000000));
    const float tiny = static_cast<float>(rest) * 0x1p-24f;
    return from_bits(sign | to_bits(tiny));
}
static inline std::uint16_t float_to_half(float value) {  // ties to even
    const std::uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return static_cast<std::uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return static_cast<std::uint16_t>(sign | 0x7c00);
    if (rest >= 0x38800000) {
        const std::uint32_t up = rest + 0xfff + (rest >> 13 & 1);
        return static_cast<std::uint16_t>(sign | (up - 0x38000000) >> 13);
    }
    const float scaled = from_bits(rest) * 0x1p24f;  // exact; its nearest integer is the subnormal's fraction
    return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::nearbyintf(scaled)));
}

static inline F32x16 load16(const float* from) {
    return map16([=](int i) { return from[i]; });
}
// The first `count` (0 to 15) values, then zeros; nothing beyond them is read.
static inline F32x16 load16(const float* from, std::int64_t count) {
    return map16([=](int i) { return i < count ? from[i] : 0.0f; });
}
static inline F32x16 splat16(float value) {
    return map16([=](int) { return value; });
}
static inline void store(float* to, F32x16 a) { std::memcpy(to, a.lane, sizeof(a.lane)); }
static inline void store(float* to, F32x16 a, std::int64_t count) {
    std::memcpy(to, a.lane, static_cast<std::size_t>(count) * 4);
}
static inline F32x16 operator+(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] + b.lane[i]; });
}
static inline F32x16 operator-(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] - b.lane[i]; });
}
static inline F32x16 operator*(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] * b.lane[i]; });
}
static inline F32x16 operator/(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] / b.lane[i]; });
}
static inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return map16([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
static inline F32x16 max(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
static inline F32x16 min(F32x16 a, F32x16 b) {
    return map16([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
static inline F32x16 abs(F32x16 a) {
    return map16([&](int i) { return std::fabs(a.lane[i]); });
}
static inline F32x16 round(F32x16 a) {  // to the nearest integer, ties to even
    return map16([&](int i) { return std::nearbyintf(a.lane[i]); });
}
// value where x >= limit, else 0
static inline F32x16 zero_below(F32x16 value, F32x16 x, F32x16 limit) {
    return map16([&](int i) { return x.lane[i] >= limit.lane[i] ? value.lane[i] : 0.0f; });
}
// a * 2^n for whole n, -126 <= n <= 127
static inline F32x16 scale_by_power(F32x16 a, F32x16 n) {
    return map16([&](int i) {
        return a.lane[i] * from_bits(static_cast<std::uint32_t>(static_cast<std::int32_t>(n.lane[i]) + 127) << 23);
    });
}

// Sixteen stored values as floats.
static inline F32x16 load16_bf16(const std::uint16_t* from) {
    return map16([=](int i) { return from_bits(static_cast<std::uint32_t>(from[i]) << 16); });
}
// Sixteen pairs' first values, or second ones.
template <bool second>
static inline F32x16 load16_bf16_pairs(const std::uint16_t* from) {
    return map16([=](int i) { return from_bits(static_cast<std::uint32_t>(from[2 * i + second]) << 16); });
}
static inline F32x16 load16_f16(const std::uint16_t* from) {
    return map16([=](int i) { return half_to_float(from[i]); });
}
static inline F32x16 load16_i8(const std::int8_t* from) {
    return map16([=](int i) { return static_cast<float>(from[i]); });
}
// e4m3 without infinities (OCP 8-bit floating point v1.0); the two NaN codes become +-480.
static inline F32x16 load16_e4m3(const std::uint8_t* from) {
    return map16([=](int i) {
        const std::uint32_t bits = from[i];
        return half_to_float(static_cast<std::uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7)) * 256.0f;
    });
}
static inline F32x16 load16_e5m2(const std::uint8_t* from) {
    return map16([=](int i) { return half_to_float(static_cast<std::uint16_t>(from[i] << 8)); });
}
// Rounded to nearest, ties to even.
static inline void store16_bf16(std::uint16_t* to, F32x16 a) {
    for (int i = 0; i < 16; ++i) {
        const std::uint32_t bits = to_bits(a.lane[i]);
        to[i] = static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}
static inline void store16_f16(std::uint16_t* to, F32x16 a) {
    for (int i = 0; i < 16; ++i) to[i] = float_to_half(a.lane[i]);
}

// a in lanes from <= i < to, other elsewhere
static inline F32x16 keep(F32x16 a, std::int64_t from, std::int64_t to, F32x16 other) {
    return map16([&](int i) { return i >= from && i < to ? a.lane[i] : other.lane[i]; });
}
// Sixteen bytes' lower and upper four bits.
static inline void load16_nibbles(const std::uint8_t* from, F32x16& low, F32x16& high) {
    low = map16([=](int i) { return static_cast<float>(from[i] & 15); });
    high = map16([=](int i) { return static_cast<float>(from[i] >> 4); });
}
constexpr int query_block = 2, vector_block = 1;  // sums of a block fit into the registers
constexpr int few_queries = query_block, many_queries = query_block;

// The sum, and the greatest, of all lanes: of lanes 8 apart first, then 4, 2 and 1.
static inline float sum(F32x16 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] + a.lane[i + half];
    return a.lane[0];
}
static inline float most(F32x16 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    return a.lane[0];
}

// Lane j of row i becomes lane i of row j.
static inline void transpose(F32x16 (&row)[16]) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) std::swap(row[i].lane[j], row[j].lane[i]);
}

}  // namespace penstock::PENSTOCK_ISA::vec
