// Reading numbers and scales out of the bytes of a block. Little-endian, any alignment.
#pragma once

#include <bit>
#include <cstdint>

namespace penstock::PENSTOCK_ISA {

using i8 = std::int8_t;
using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

static inline u32 load16(const u8* at) { return at[0] | static_cast<u32>(at[1]) << 8; }
static inline u32 load32(const u8* at) { return load16(at) | load16(at + 2) << 16; }

// IEEE half to float: exact, by integers alone except that a subnormal is scaled from its fraction. No branch, so that
// loops over it become vector code.
static inline float half_bits(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    const u32 normal = (exponent + (exponent == 31 ? 224u : 112u)) << 23 | fraction << 13;
    const u32 subnormal = std::bit_cast<u32>(static_cast<float>(static_cast<int>(fraction)) * 0x1p-24f);
    return std::bit_cast<float>(sign | (exponent == 0 ? subnormal : normal));
}

static inline float half(const u8* at) { return half_bits(load16(at)); }

// Half of the power of two 2^(code - 127), exact also where it is subnormal (OCP Microscaling E8M0).
static inline float half_e8m0(u32 code) {
    return std::bit_cast<float>(code < 2 ? 0x00200000u << code : (code - 1) << 23);
}

// Half the value of an unsigned E4M3 scale. The sign bit is not looked at, and code 127 is 0.
static inline float half_ue4m3(u32 code) {
    const u32 exponent = code >> 3 & 15, fraction = code & 7;
    const float subnormal = static_cast<float>(static_cast<int>(fraction)) * 0x1p-10f;
    const float normal = std::bit_cast<float>((exponent + 119) << 23 | fraction << 20);
    return code == 127 ? 0.0f : exponent == 0 ? subnormal : normal;
}

// Sub-scale of group 0-15 of q3_k: twelve bytes hold four low bits of each, then two high bits.
static inline int scale_q3_k(const u8* packed, int group) {
    const int low = packed[group % 8] >> (group / 8 * 4) & 15, high = packed[8 + group % 4] >> (group / 4 * 2) & 3;
    return (low | high << 4) - 32;
}

struct ScaleMin {
    int scale, least;
};

// Sub-scale and minimum of group 0-7 of q4_k and q5_k: six bits each in twelve bytes.
static inline ScaleMin scale_min(const u8* packed, int group) {
    if (group < 4) return {packed[group] & 63, packed[group + 4] & 63};
    return {(packed[group + 4] & 15) | (packed[group - 4] >> 2 & 48),
            packed[group + 4] >> 4 | (packed[group] >> 2 & 48)};
}

// Sub-scale of group 0-7 of iq4_xs: two high bits each in a word, low nibbles in four bytes after it.
static inline int scale_iq4_xs(const u8* packed, int group) {
    const int low = packed[2 + group / 2] >> (group % 2 * 4) & 15;
    return (low | static_cast<int>(load16(packed) >> (2 * group) & 3) << 4) - 32;
}

}  // namespace penstock::PENSTOCK_ISA
