// Decoders of the ggml block formats to float32. A block is a scale (and for some a minimum), packed integers, and for
// the K formats a second level of small integer scales; products are rounded in the order ggml defines.
#include "ops.h"

namespace penstock::PENSTOCK_ISA {
namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;

float from_bits(u32 bits) {
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

u32 load16(const u8* at) { return at[0] | static_cast<u32>(at[1]) << 8; }
u32 load32(const u8* at) { return load16(at) | load16(at + 2) << 16; }

u32 to_bits(float value) {
    u32 out;
    __builtin_memcpy(&out, &value, 4);
    return out;
}

// IEEE half to float: exact, by integers alone except that a subnormal is scaled from its fraction. No branch, so that
// loops over it become vector code.
float half(const u8* at) {
    const u32 bits = load16(at), sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    const u32 normal = (exponent + (exponent == 31 ? 224u : 112u)) << 23 | fraction << 13;
    const u32 subnormal = to_bits(static_cast<float>(static_cast<int>(fraction)) * 0x1p-24f);
    return from_bits(sign | (exponent == 0 ? subnormal : normal));
}

void decode_f16(const u8* at, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = half(at + 2 * i);
}

void decode_bf16(const u8* at, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = from_bits(load16(at + 2 * i) << 16);
}

// 32 values, low nibbles first; value = d * (nibble - 8)
void decode_q4_0(const u8* block, float* out) {
    const float d = half(block);
    const u8* q = block + 2;
    for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>((q[i] & 15) - 8);
        out[i + 16] = d * static_cast<float>((q[i] >> 4) - 8);
    }
}

// value = d * nibble + m
void decode_q4_1(const u8* block, float* out) {
    const float d = half(block), m = half(block + 2);
    const u8* q = block + 4;
    for (int i = 0; i < 16; ++i) {
        out[i] = d * static_cast<float>(q[i] & 15) + m;
        out[i + 16] = d * static_cast<float>(q[i] >> 4) + m;
    }
}

// As q4_0 with a fifth bit from a 32-bit word; value = d * (q - 16)
void decode_q5_0(const u8* block, float* out) {
    const float d = half(block);
    const u32 high = load32(block + 2);
    const u8* q = block + 6;
    for (int i = 0; i < 16; ++i) {
        const int first = (q[i] & 15) | static_cast<int>((high >> i & 1) << 4);
        const int second = (q[i] >> 4) | static_cast<int>((high >> (i + 16) & 1) << 4);
        out[i] = d * static_cast<float>(first - 16);
        out[i + 16] = d * static_cast<float>(second - 16);
    }
}

void decode_q5_1(const u8* block, float* out) {
    const float d = half(block), m = half(block + 2);
    const u32 high = load32(block + 4);
    const u8* q = block + 8;
    for (int i = 0; i < 16; ++i) {
        const int first = (q[i] & 15) | static_cast<int>((high >> i & 1) << 4);
        const int second = (q[i] >> 4) | static_cast<int>((high >> (i + 16) & 1) << 4);
        out[i] = d * static_cast<float>(first) + m;
        out[i + 16] = d * static_cast<float>(second) + m;
    }
}

void decode_q8_0(const u8* block, float* out) {
    const float d = half(block);
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(block[2 + i])) * d;
}

// scales[16] (low nibble scale, high nibble minimum), q[64], d, dmin
void decode_q2_k(const u8* block, float* out) {
    const float d = half(block + 80), dmin = half(block + 82);
    for (int group = 0; group < 16; ++group) {
        const float scale = d * static_cast<float>(block[group] & 15);
        const float least = dmin * static_cast<float>(block[group] >> 4);
        const u8* q = block + 16 + group / 8 * 32 + group % 2 * 16;
        const int shift = group % 8 / 2 * 2;
        for (int i = 0; i < 16; ++i) out[group * 16 + i] = scale * static_cast<float>(q[i] >> shift & 3) - least;
    }
}

// high[32], q[64], scales[12] (six bits each: four low, two high), d; a clear high bit subtracts 4
void decode_q3_k(const u8* block, float* out) {
    const u8 *high = block, *low = block + 32, *packed = block + 96;
    const float d = half(block + 108);
    for (int group = 0; group < 16; ++group) {
        const int nibble = packed[group % 8] >> (group / 8 * 4) & 15;
        const int top = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        const float scale = d * static_cast<float>((nibble | top << 4) - 32);
        const u8* q = low + group / 8 * 32 + group % 2 * 16;
        const u8* h = high + group % 2 * 16;
        const int shift = group % 8 / 2 * 2, bit = group / 2;
        for (int i = 0; i < 16; ++i)
            out[group * 16 + i] = scale * static_cast<float>((q[i] >> shift & 3) - (h[i] >> bit & 1 ? 0 : 4));
    }
}

struct ScaleMin {
    float scale, least;
};

// Scale and minimum of group 0-7 out of the twelve bytes of q4_k and q5_k: six bits each.
ScaleMin scale_min(const u8* packed, int group, float d, float dmin) {
    int scale, least;
    if (group < 4) {
        scale = packed[group] & 63;
        least = packed[group + 4] & 63;
    } else {
        scale = (packed[group + 4] & 15) | (packed[group - 4] >> 2 & 48);
        least = packed[group + 4] >> 4 | (packed[group] >> 2 & 48);
    }
    return {d * static_cast<float>(scale), dmin * static_cast<float>(least)};
}

// d, dmin, scales[12], q[128]
void decode_q4_k(const u8* block, float* out) {
    const float d = half(block), dmin = half(block + 2);
    for (int group = 0; group < 8; ++group) {
        const ScaleMin s = scale_min(block + 4, group, d, dmin);
        const u8* q = block + 16 + group / 2 * 32;
        const int shift = group % 2 * 4;
        for (int i = 0; i < 32; ++i) out[group * 32 + i] = s.scale * static_cast<float>(q[i] >> shift & 15) - s.least;
    }
}

// d, dmin, scales[12], high[32], q[128]
void decode_q5_k(const u8* block, float* out) {
    const float d = half(block), dmin = half(block + 2);
    const u8* high = block + 16;
    for (int group = 0; group < 8; ++group) {
        const ScaleMin s = scale_min(block + 4, group, d, dmin);
        const u8* q = block + 48 + group / 2 * 32;
        const int shift = group % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
            out[group * 32 + i] = s.scale * static_cast<float>(value) - s.least;
        }
    }
}

// low[128], high[64], scales[16] (signed), d
void decode_q6_k(const u8* block, float* out) {
    const float d = half(block + 208);
    for (int group = 0; group < 16; ++group) {
        const float scale = d * static_cast<float>(static_cast<std::int8_t>(block[192 + group]));
        const int part = group / 8, lane = group % 8;
        const u8* low = block + part * 64 + lane % 4 * 16;
        const u8* high = block + 128 + part * 32 + lane % 2 * 16;
        const int low_shift = lane / 4 * 4, high_shift = lane / 2 * 2;
        for (int i = 0; i < 16; ++i) {
            const int value = (low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4;
            out[group * 16 + i] = scale * static_cast<float>(value - 32);
        }
    }
}

// OCP Microscaling: an E8M0 exponent (stored one higher, as the values are doubled) and 32 E2M1 nibbles
void decode_mxfp4(const u8* block, float* out) {
    constexpr float doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const u32 e = block[0];
    const float d = from_bits(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    for (int i = 0; i < 16; ++i) {
        out[i] = d * doubled[block[1 + i] & 15];
        out[i + 16] = d * doubled[block[1 + i] >> 4];
    }
}

// A decoder of one block, run over many of them.
template <void (*Decode)(const u8*, float*), BlockFormat Format>
void each(const u8* blocks, std::int64_t num_blocks, float* out) {
    constexpr BlockLayout layout = block_layouts[static_cast<int>(Format)];
    for (std::int64_t i = 0; i < num_blocks; ++i) Decode(blocks + i * layout.bytes, out + i * layout.elements);
}

using DecodeAll = void (*)(const u8*, std::int64_t, float*);
constexpr DecodeAll decoders[static_cast<std::size_t>(BlockFormat::count)] = {
    decode_f16,
    decode_bf16,
    each<decode_q4_0, BlockFormat::q4_0>,
    each<decode_q4_1, BlockFormat::q4_1>,
    each<decode_q5_0, BlockFormat::q5_0>,
    each<decode_q5_1, BlockFormat::q5_1>,
    each<decode_q8_0, BlockFormat::q8_0>,
    each<decode_q2_k, BlockFormat::q2_k>,
    each<decode_q3_k, BlockFormat::q3_k>,
    each<decode_q4_k, BlockFormat::q4_k>,
    each<decode_q5_k, BlockFormat::q5_k>,
    each<decode_q6_k, BlockFormat::q6_k>,
    each<decode_mxfp4, BlockFormat::mxfp4>,
};

}  // namespace

void dequantize(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, float* out) {
    if (const DecodeAll decode = decoders[static_cast<int>(format)]) decode(blocks, num_blocks, out);
}

}  // namespace penstock::PENSTOCK_ISA
