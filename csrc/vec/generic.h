// Eight lanes as plain arrays: any compiler, any processor. Every vec header offers the same names and the same
// result to the bit.
#pragma once

#include <cstdint>
#include <cstring>

namespace penstock::PENSTOCK_ISA::vec {

struct F32 {
    float lane[8];
};
struct F64 {
    double lane[8];
};
struct U64 {
    std::uint64_t lane[8];
};

template <class V, class F>
static inline V map(F function) {
    V out;
    for (int i = 0; i < 8; ++i) out.lane[i] = function(i);
    return out;
}

template <class F>
static inline unsigned mask(F function) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= static_cast<unsigned>(function(i)) << i;
    return bits;
}

static inline F32 load(const float* from) {
    return map<F32>([=](int i) { return from[i]; });
}
static inline F32 splat(float value) {
    return map<F32>([=](int) { return value; });
}
static inline F32 max(F32 a, F32 b) {
    return map<F32>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
static inline unsigned less(F32 a, F32 b) {
    return mask([&](int i) { return a.lane[i] < b.lane[i]; });
}
static inline unsigned equal(F32 a, F32 b) {
    return mask([&](int i) { return a.lane[i] == b.lane[i]; });
}
static inline F64 widen(F32 a) {
    return map<F64>([&](int i) { return static_cast<double>(a.lane[i]); });
}
static inline F64 splat(double value) {
    return map<F64>([=](int) { return value; });
}
static inline F64 operator+(F64 a, F64 b) {
    return map<F64>([&](int i) { return a.lane[i] + b.lane[i]; });
}
static inline F64 operator-(F64 a, F64 b) {
    return map<F64>([&](int i) { return a.lane[i] - b.lane[i]; });
}
static inline F64 operator*(F64 a, F64 b) {
    return map<F64>([&](int i) { return a.lane[i] * b.lane[i]; });
}
static inline F64 max(F64 a, F64 b) {
    return map<F64>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
// value where x >= limit, else 0
static inline F64 zero_below(F64 value, F64 x, double limit) {
    return map<F64>([&](int i) { return x.lane[i] >= limit ? value.lane[i] : 0.0; });
}
// 2^n, where the double is n + 1.5 * 2^52 and -1022 <= n <= 1023
static inline F64 exp2_of_shifted(F64 shifted) {
    return map<F64>([&](int i) {
        std::uint64_t bits;
        std::memcpy(&bits, &shifted.lane[i], 8);
        bits = (bits << 52) + (std::uint64_t{1023} << 52);
        double out;
        std::memcpy(&out, &bits, 8);
        return out;
    });
}
static inline void store(double* to, F64 a) {
    for (int i = 0; i < 8; ++i) to[i] = a.lane[i];
}
static inline void store(float* to, F32 a) {
    for (int i = 0; i < 8; ++i) to[i] = a.lane[i];
}

// Words of 32 bits in the low halves; the high halves may hold anything.
static inline U64 load_words(const std::uint32_t* from) {
    return map<U64>([=](int i) { return std::uint64_t{from[i]}; });
}
static inline U64 splat_words(std::uint32_t word) {
    return map<U64>([=](int) { return std::uint64_t{word}; });
}
static inline U64 operator^(U64 a, U64 b) {
    return map<U64>([&](int i) { return a.lane[i] ^ b.lane[i]; });
}
// The products of the low halves, whole; and what is in the high halves.
static inline U64 multiply_words(U64 a, U64 b) {
    return map<U64>([&](int i) { return (a.lane[i] & 0xffffffffu) * (b.lane[i] & 0xffffffffu); });
}
static inline U64 high_words(U64 a) {
    return map<U64>([&](int i) { return a.lane[i] >> 32; });
}
static inline void store_words(std::uint32_t* to, U64 a) {
    for (int i = 0; i < 8; ++i) to[i] = static_cast<std::uint32_t>(a.lane[i]);
}

}  // namespace penstock::PENSTOCK_ISA::vec
