// Floats of 16 and 8 bits, one at a time and in plain C++.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace penstock {

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline float f16_to_float(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000u | (rest & 0x3ff) << 13);
    if (rest >= 0x400) return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000u));
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(static_cast<float>(rest) * 0x1p-24f));
}

// OCP e4m3 without infinities; its NaN is NaN here.
inline float e4m3_to_float(std::uint8_t bits) {
    if ((bits & 0x7f) == 0x7f) return NAN;
    const auto half = static_cast<std::uint16_t>((bits & 0x80) << 8 | (bits & 0x7f) << 7);
    return f16_to_float(half) * 256.0f;
}
inline float e5m2_to_float(std::uint8_t bits) { return f16_to_float(static_cast<std::uint16_t>(bits << 8)); }

// 2^(e - 128)
inline float e8m0_to_float(std::uint8_t e) { return std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1u) << 23); }

// The stored number that is `value`, exactly, or false.
inline bool exact_bf16(float value, std::uint16_t& out) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    out = static_cast<std::uint16_t>(bits >> 16);
    return (bits & 0xffff) == 0;
}
inline bool exact_f16(float value, std::uint16_t& out) {
    const auto bits = std::bit_cast<std::uint32_t>(value), rest = bits & 0x7fffffffu;
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    if (rest >= 0x38800000)
        out = static_cast<std::uint16_t>(sign | ((rest - 0x38000000u) >> 13 & 0x7fffu));
    else
        out = static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p24f));
    return std::bit_cast<std::uint32_t>(f16_to_float(out)) == bits;
}
inline bool exact_e8m0(float value, std::uint8_t& out) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    out = bits == 0x00200000u ? 0 : bits == 0x00400000u ? 1 : static_cast<std::uint8_t>((bits >> 23) + 1);
    return std::bit_cast<std::uint32_t>(e8m0_to_float(out)) == bits;
}
inline bool exact_e4m3(float value, std::uint8_t& out) {
    std::uint16_t half = 0;
    if (!exact_f16(value * 0x1p-8f, half) || (half & 0x7f) != 0 || (half & 0x4000)) return false;
    out = static_cast<std::uint8_t>((half & 0x8000) >> 8 | (half >> 7 & 0x7f));
    return e4m3_to_float(out) == value;
}

}  // namespace penstock
