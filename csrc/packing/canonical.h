// Blocks as small integers and exact scales: what a packing is made of.
//
//     value = scale[g] * (lut ? lut[code] : code - zero) - minimum[g],      g = index / group
//     scale[g] = super_scale * factor * sub_scale[g],   minimum[g] = super_min * sub_min[g]
//
// Every product is exact in fp32, in any order and for every finite scale of the format, so a value is rounded at most
// once (by the subtraction) and equals the reference decode. Only nvfp4 keeps its scales in scale[] alone.
#pragma once

#include <cstdint>

#include "packing/block_formats.h"

namespace penstock {

// Signed values of the codes, 16 for a byte shuffle. In the three- and four-bit lattice formats the top bit of a code
// is the sign (iq1: of the shift by an eighth; its values are eighths) and the rest is an index of a magnitude.
inline constexpr std::int8_t lut_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
inline constexpr std::int8_t lut_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr std::int8_t lut_iq3_xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
inline constexpr std::int8_t lut_iq3_s[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
inline constexpr std::int8_t lut_iq2[16] = {8, 25, 43, 0, -8, -25, -43, 0};
inline constexpr std::int8_t lut_iq1[16] = {-7, 1, 9, 0, -9, -1, 7, 0};

struct CodeInfo {
    int bits;        // a code is below 2^bits; 0: the format has no codes (f16, bf16)
    int zero;        // subtracted from a code where there is no lut
    int group;       // consecutive values of one scale
    bool two_level;  // integer scales of the groups under one scale of the block
    bool has_min;
    const std::int8_t* lut;  // [16], or null
    float factor;            // a power of two
};

inline constexpr CodeInfo code_infos[] = {
    {0, 0, 1, false, false, nullptr, 1.0f},       // f16
    {0, 0, 1, false, false, nullptr, 1.0f},       // bf16
    {4, 8, 32, false, false, nullptr, 1.0f},      // q4_0
    {4, 0, 32, false, true, nullptr, 1.0f},       // q4_1: super_min is -m
    {5, 16, 32, false, false, nullptr, 1.0f},     // q5_0
    {5, 0, 32, false, true, nullptr, 1.0f},       // q5_1
    {8, 128, 32, false, false, nullptr, 1.0f},    // q8_0
    {2, 0, 16, true, true, nullptr, 1.0f},        // q2_k: sub-scales and -minimums 0 to 15
    {3, 4, 16, true, false, nullptr, 1.0f},       // q3_k: -32 to 31
    {4, 0, 32, true, true, nullptr, 1.0f},        // q4_k: 0 to 63
    {5, 0, 32, true, true, nullptr, 1.0f},        // q5_k: 0 to 63
    {6, 32, 16, true, false, nullptr, 1.0f},      // q6_k: -128 to 127
    {4, 0, 32, false, false, lut_e2m1, 1.0f},     // mxfp4: scales are powers of two, halved
    {8, 128, 256, false, false, nullptr, 1.0f},   // q8_k
    {4, 0, 32, false, false, lut_iq4, 1.0f},      // iq4_nl
    {4, 0, 32, true, false, lut_iq4, 1.0f},       // iq4_xs: -32 to 31
    {4, 0, 16, false, false, lut_e2m1, 1.0f},     // nvfp4: a scale a group, each exact in fp16
    {3, 0, 32, true, false, lut_iq2, 0.125f},     // iq2_xxs: odd, 1 to 31, as all below
    {3, 0, 16, true, false, lut_iq2, 0.125f},     // iq2_xs
    {3, 0, 16, true, false, lut_iq2, 0.125f},     // iq2_s
    {4, 0, 32, true, false, lut_iq3_xxs, 0.25f},  // iq3_xxs
    {4, 0, 32, true, false, lut_iq3_s, 1.0f},     // iq3_s
    {3, 0, 32, true, false, lut_iq1, 0.125f},     // iq1_s: 1 to 15
    {3, 0, 16, true, false, lut_iq1, 0.125f},     // iq1_m: 1 to 15
    {2, 1, 256, false, false, nullptr, 1.0f},     // tq1_0
    {2, 1, 256, false, false, nullptr, 1.0f},     // tq2_0
    {2, 1, 128, false, false, nullptr, 1.0f},     // q1_0: codes 0 and 2
    {2, 1, 64, false, false, nullptr, 1.0f},      // q2_0
};
static_assert(sizeof(code_infos) / sizeof(code_infos[0]) == static_cast<std::size_t>(BlockFormat::count));

constexpr const CodeInfo& code_info(BlockFormat format) { return code_infos[static_cast<int>(format)]; }

// One decoded block; of the arrays only what the format's block and group define is written.
struct CodeBlock {
    std::uint8_t codes[256];
    std::int16_t sub_scale[16], sub_min[16];  // 1 and 0 in formats of one level (sub_min: 1 where there is a minimum)
    float super_scale, super_min;             // fp32 of the stored number
    float scale[16], minimum[16];             // of each group, multiplied out
};

// Splits whole blocks into codes and scales, out[i] from block i. False where the format has no codes.
bool decode_codes(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, CodeBlock* out);

}  // namespace penstock
