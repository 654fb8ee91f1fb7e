// Decoders of the ggml block formats to float32. A block is a scale (and for some a minimum), packed integers, and for
// the K formats a second level of small integer scales; products are rounded in the order ggml defines.
#include "ops/ops.h"
#include "packing/block_fields.h"
#include "packing/lattice.h"

namespace penstock::PENSTOCK_ISA {
namespace {

void decode_f16(const u8* at, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = half(at + 2 * i);
}

void decode_bf16(const u8* at, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = std::bit_cast<float>(load16(at + 2 * i) << 16);
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
    for (int i = 0; i < 32; ++i) out[i] = static_cast<float>(static_cast<i8>(block[2 + i])) * d;
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
        const float scale = d * static_cast<float>(scale_q3_k(packed, group));
        const u8* q = low + group / 8 * 32 + group % 2 * 16;
        const u8* h = high + group % 2 * 16;
        const int shift = group % 8 / 2 * 2, bit = group / 2;
        for (int i = 0; i < 16; ++i)
            out[group * 16 + i] = scale * static_cast<float>((q[i] >> shift & 3) - (h[i] >> bit & 1 ? 0 : 4));
    }
}

// d, dmin, scales[12], q[128]
void decode_q4_k(const u8* block, float* out) {
    const float d = half(block), dmin = half(block + 2);
    for (int group = 0; group < 8; ++group) {
        const ScaleMin s = scale_min(block + 4, group);
        const float scale = d * static_cast<float>(s.scale), least = dmin * static_cast<float>(s.least);
        const u8* q = block + 16 + group / 2 * 32;
        const int shift = group % 2 * 4;
        for (int i = 0; i < 32; ++i) out[group * 32 + i] = scale * static_cast<float>(q[i] >> shift & 15) - least;
    }
}

// d, dmin, scales[12], high[32], q[128]
void decode_q5_k(const u8* block, float* out) {
    const float d = half(block), dmin = half(block + 2);
    const u8* high = block + 16;
    for (int group = 0; group < 8; ++group) {
        const ScaleMin s = scale_min(block + 4, group);
        const float scale = d * static_cast<float>(s.scale), least = dmin * static_cast<float>(s.least);
        const u8* q = block + 48 + group / 2 * 32;
        const int shift = group % 2 * 4;
        for (int i = 0; i < 32; ++i) {
            const int value = (q[i] >> shift & 15) | (high[i] >> group & 1) << 4;
            out[group * 32 + i] = scale * static_cast<float>(value) - least;
        }
    }
}

// low[128], high[64], scales[16] (signed), d
void decode_q6_k(const u8* block, float* out) {
    const float d = half(block + 208);
    for (int group = 0; group < 16; ++group) {
        const float scale = d * static_cast<float>(static_cast<i8>(block[192 + group]));
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

// d (fp32), q[256], sums of 16
void decode_q8_k(const u8* block, float* out) {
    const float d = std::bit_cast<float>(load32(block));
    for (int i = 0; i < 256; ++i) out[i] = d * static_cast<float>(static_cast<i8>(block[4 + i]));
}

// The values of sixteen low nibbles, then of the high ones.
void look_up(const i8* lut, const u8* packed, i8* out) {
#if defined(__AVX2__)
    const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lut)), low = _mm_set1_epi8(15);
    const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(packed));
    const __m128i first = _mm_shuffle_epi8(table, _mm_and_si128(q, low));
    const __m128i second = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(q, 4), low));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), second);
#else
    for (int i = 0; i < 16; ++i) {
        out[i] = lut[packed[i] & 15];
        out[i + 16] = lut[packed[i] >> 4];
    }
#endif
}

// count is a multiple of eight.
void scale_up(const i8* values, int count, float scale, float* out) {
#if defined(__AVX2__)
    for (int i = 0; i < count; i += 8) {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + i));
        const __m256 wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_set1_ps(scale), wide));
    }
#else
    for (int i = 0; i < count; ++i) out[i] = scale * static_cast<float>(values[i]);
#endif
}

// OCP Microscaling: an E8M0 exponent (stored one higher, as the values are doubled) and 32 E2M1 nibbles
void decode_mxfp4(const u8* block, float* out) {
    i8 values[32];
    look_up(lut_e2m1, block + 1, values);
    scale_up(values, 32, half_e8m0(block[0]), out);
}

void decode_iq4_nl(const u8* block, float* out) {
    i8 values[32];
    look_up(lut_iq4, block + 2, values);
    scale_up(values, 32, half(block), out);
}

// d, scales[6], q[128]
void decode_iq4_xs(const u8* block, float* out) {
    const float d = half(block);
    for (int group = 0; group < 8; ++group) {
        i8 values[32];
        look_up(lut_iq4, block + 8 + 16 * group, values);
        scale_up(values, 32, d * static_cast<float>(scale_iq4_xs(block + 2, group)), out + 32 * group);
    }
}

// scales[4] (E4M3 without a sign), q[32]: eight bytes of two nibbles for each sixteen values
void decode_nvfp4(const u8* block, float* out) {
    for (int pair = 0; pair < 2; ++pair) {
        i8 values[32];
        look_up(lut_e2m1, block + 4 + 16 * pair, values);
        for (int half_group = 0; half_group < 4; ++half_group) {
            const int group = 2 * pair + half_group % 2, at = half_group / 2 * 8;
            scale_up(values + 8 * half_group, 8, half_ue4m3(block[group]), out + 16 * group + at);
        }
    }
}

template <BlockFormat Format>
void decode_lattice(const u8* block, float* out) {
    const float d = block_scale<Format>(block) * code_info(Format).factor;
    for (int group = 0; group < block_layout(Format).elements / 32; ++group) {
        i8 values[32];
        const SubScales sub = unpack32<Format>(block, group, values);
        scale_up(values, 16, d * static_cast<float>(sub.first), out + 32 * group);
        scale_up(values + 16, 16, d * static_cast<float>(sub.second), out + 32 * group + 16);
    }
}

// A decoder of one block, run over many of them.
template <BlockFormat Format, void (*Decode)(const u8*, float*)>
void each(const u8* blocks, std::int64_t num_blocks, float* out) {
    constexpr BlockLayout layout = block_layout(Format);
    for (std::int64_t i = 0; i < num_blocks; ++i) Decode(blocks + i * layout.bytes, out + i * layout.elements);
}

using DecodeAll = void (*)(const u8*, std::int64_t, float*);
template <BlockFormat Format>
constexpr DecodeAll lattice = each<Format, decode_lattice<Format>>;

constexpr DecodeAll decoders[] = {
    decode_f16,
    decode_bf16,
    each<BlockFormat::q4_0, decode_q4_0>,
    each<BlockFormat::q4_1, decode_q4_1>,
    each<BlockFormat::q5_0, decode_q5_0>,
    each<BlockFormat::q5_1, decode_q5_1>,
    each<BlockFormat::q8_0, decode_q8_0>,
    each<BlockFormat::q2_k, decode_q2_k>,
    each<BlockFormat::q3_k, decode_q3_k>,
    each<BlockFormat::q4_k, decode_q4_k>,
    each<BlockFormat::q5_k, decode_q5_k>,
    each<BlockFormat::q6_k, decode_q6_k>,
    each<BlockFormat::mxfp4, decode_mxfp4>,
    each<BlockFormat::q8_k, decode_q8_k>,
    each<BlockFormat::iq4_nl, decode_iq4_nl>,
    each<BlockFormat::iq4_xs, decode_iq4_xs>,
    each<BlockFormat::nvfp4, decode_nvfp4>,
    lattice<BlockFormat::iq2_xxs>,
    lattice<BlockFormat::iq2_xs>,
    lattice<BlockFormat::iq2_s>,
    lattice<BlockFormat::iq3_xxs>,
    lattice<BlockFormat::iq3_s>,
    lattice<BlockFormat::iq1_s>,
    lattice<BlockFormat::iq1_m>,
    lattice<BlockFormat::tq1_0>,
    lattice<BlockFormat::tq2_0>,
    lattice<BlockFormat::q1_0>,
    lattice<BlockFormat::q2_0>,
};
static_assert(sizeof(decoders) / sizeof(decoders[0]) == static_cast<std::size_t>(BlockFormat::count));

}  // namespace

void dequantize(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, float* out) {
    decoders[static_cast<int>(format)](blocks, num_blocks, out);
}

}  // namespace penstock::PENSTOCK_ISA
