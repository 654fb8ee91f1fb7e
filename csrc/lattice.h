// The formats of one to three bits, 32 values at a time: small enough to stay as stored and be unpacked in a kernel.
//
//     value i of the group = block_scale<format>(block) * code_info(format).factor * sub[i / 16] * out[i]
//
// where out and sub are what unpack32<format>(block, group, out) gives; every product is exact in fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "block_fields.h"
#include "canonical.h"
#include "lattice_grids.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace penstock::PENSTOCK_ISA {

// Whether unpack32 is there for a format.
constexpr bool unpacks32(BlockFormat format) { return format >= BlockFormat::iq2_xxs && format <= BlockFormat::q2_0; }

constexpr u64 every_byte = 0x0101010101010101u;

// out = magnitude, negated where the bit of `signs` is set. No magnitude is zero.
static inline void store_signed(const u64 (&magnitude)[4], u32 signs, i8* out) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitude));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_mask_sub_epi8(v, signs, _mm256_setzero_si256(), v));
#elif defined(__AVX2__)
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(magnitude));
    const __m256i byte_of = _mm256_setr_epi64x(0, every_byte, 2 * every_byte, 3 * every_byte);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201u));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(signs)), byte_of);
    const __m256i negative = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_sub_epi8(_mm256_xor_si256(v, negative), negative));
#else
    for (int i = 0; i < 4; ++i) {
        const u64 bits = (signs >> (8 * i) & 255) * every_byte & 0x8040201008040201u;
        const u64 ones = (bits + 0x7f7f7f7f7f7f7f7fu) >> 7 & every_byte;
        const u64 word = (magnitude[i] ^ ones * 255) + ones;  // no carry between bytes, as none is zero
        std::memcpy(out + 8 * i, &word, 8);
    }
#endif
}

// Four fields of seven signs → four bytes of eight, the last of which makes their number even.
static inline u32 even_signs(u32 fields) {
    const u32 seven = (fields & 0x7f) | (fields << 1 & 0x7f00) | (fields << 2 & 0x7f0000) | (fields << 3 & 0x7f000000);
    u32 parity = (seven ^ seven >> 4) & 0x0f0f0f0f;
    parity = (parity ^ parity >> 2) & 0x03030303;
    parity = (parity ^ parity >> 1) & 0x01010101;
    return seven | parity << 7;
}

// Integer scales of the first and the last sixteen values of a group.
struct SubScales {
    int first, second;
};

static inline SubScales odd_scales(u32 first, u32 second) {
    return {static_cast<int>(2 * first + 1), static_cast<int>(2 * second + 1)};
}

static inline SubScales unpack_iq2_xxs(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 8 * group;
    const u32 tail = load32(q + 4);
    const auto& grid = lattice_grids.iq2_xxs;
    store_signed({grid[q[0]], grid[q[1]], grid[q[2]], grid[q[3]]}, even_signs(tail), out);
    return odd_scales(tail >> 28, tail >> 28);
}

static inline SubScales unpack_iq2_xs(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 8 * group;
    const u32 a = load16(q), b = load16(q + 2), c = load16(q + 4), d = load16(q + 6);
    const auto& grid = lattice_grids.iq2_xs;
    const u32 signs = even_signs(a >> 9 | b >> 9 << 7 | c >> 9 << 14 | d >> 9 << 21);
    store_signed({grid[a & 511], grid[b & 511], grid[c & 511], grid[d & 511]}, signs, out);
    return odd_scales(block[66 + group] & 15, block[66 + group] >> 4);
}

static inline SubScales unpack_iq2_s(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 4 * group;
    const u32 high = block[66 + group];
    const auto& grid = lattice_grids.iq2_s;
    store_signed({grid[q[0] | (high << 8 & 768)], grid[q[1] | (high << 6 & 768)], grid[q[2] | (high << 4 & 768)],
                  grid[q[3] | (high << 2 & 768)]},
                 load32(q + 32), out);
    return odd_scales(block[74 + group] & 15, block[74 + group] >> 4);
}

static inline u64 join(u32 low, u32 high) { return low | static_cast<u64>(high) << 32; }

static inline SubScales unpack_iq3_xxs(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 8 * group;
    const u32 tail = load32(block + 66 + 4 * group);
    const auto& grid = lattice_grids.iq3_xxs;
    store_signed({join(grid[q[0]], grid[q[1]]), join(grid[q[2]], grid[q[3]]), join(grid[q[4]], grid[q[5]]),
                  join(grid[q[6]], grid[q[7]])},
                 even_signs(tail), out);
    return odd_scales(tail >> 28, tail >> 28);
}

static inline SubScales unpack_iq3_s(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 8 * group;
    const u32 high = static_cast<u32>(block[66 + group]) << 8;
    const auto point = [&](int i) { return lattice_grids.iq3_s[q[i] | (high >> i & 256)]; };
    store_signed(
        {join(point(0), point(1)), join(point(2), point(3)), join(point(4), point(5)), join(point(6), point(7))},
        load32(block + 74 + 4 * group), out);
    const u32 code = block[106 + group / 2] >> (group % 2 * 4) & 15u;
    return odd_scales(code, code);
}

// Run i of eight values of the one-bit grid, in eighths.
static inline void store_shifted(u64 point, bool down, int i, i8* out) {
    const u64 word = (point - (down ? 2 * every_byte : 0)) ^ 128 * every_byte;
    std::memcpy(out + 8 * i, &word, 8);
}

static inline SubScales unpack_iq1_s(const u8* block, int group, i8* out) {
    const u8* q = block + 2 + 4 * group;
    const u32 tail = load16(block + 34 + 2 * group);
    for (int i = 0; i < 4; ++i) store_shifted(lattice_grids.iq1[q[i] | (tail >> 3 * i & 7) << 8], tail >> 15, i, out);
    return odd_scales(tail >> 12 & 7, tail >> 12 & 7);
}

static inline SubScales unpack_iq1_m(const u8* block, int group, i8* out) {
    const u8 *q = block + 4 * group, *h = block + 32 + 2 * group;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = h[i / 2] >> (i % 2 * 4) & 15u;
        store_shifted(lattice_grids.iq1[q[i] | (nibble & 7) << 8], nibble >> 3, i, out);
    }
    const u32 packed = load16(block + 48 + group / 2 * 2) >> (group % 2 * 6);
    return odd_scales(packed & 7, packed >> 3 & 7);
}

// Digit `level` of each of Count bytes: times a power of three, the digits before it overflow; times three, it does.
template <int Count>
static inline void store_trits(const u8* packed, int level, i8* out) {
    constexpr u8 powers[5] = {1, 3, 9, 27, 81};
    for (int i = 0; i < Count; ++i) {
        const u8 rest = static_cast<u8>(packed[i] * powers[level]);
        out[i] = static_cast<i8>((rest * 3 >> 8) - 1);
    }
}

static inline SubScales unpack_tq1_0(const u8* block, int group, i8* out) {
    if (group < 5) {
        store_trits<32>(block, group, out);
    } else {
        store_trits<16>(block + 32, 2 * (group - 5), out);
        if (group < 7) store_trits<16>(block + 32, 2 * (group - 5) + 1, out + 16);
    }
    if (group == 7)
        for (int level = 0; level < 4; ++level) store_trits<4>(block + 48, level, out + 16 + 4 * level);
    return {1, 1};
}

static inline SubScales unpack_tq2_0(const u8* block, int group, i8* out) {
    const u8* q = block + group / 4 * 32;
    const int shift = group % 4 * 2;
    for (int i = 0; i < 32; ++i) out[i] = static_cast<i8>((q[i] >> shift & 3) - 1);
    return {1, 1};
}

static inline SubScales unpack_q1_0(const u8* block, int group, i8* out) {
    const u64 ones[4] = {every_byte, every_byte, every_byte, every_byte};
    store_signed(ones, ~load32(block + 2 + 4 * group), out);
    return {1, 1};
}

static inline SubScales unpack_q2_0(const u8* block, int group, i8* out) {
    for (int i = 0; i < 8; ++i) {
        const u32 q = block[2 + 8 * group + i], fields = (q | q << 6 | q << 12 | q << 18) & 0x03030303;
        const u32 word = ((fields | 0x80808080) - 0x01010101) ^ 0x80808080;
        std::memcpy(out + 4 * i, &word, 4);
    }
    return {1, 1};
}

// The fp16 scale of a block; in iq1_m it is spread over the top nibbles of four words.
template <BlockFormat Format>
static inline float block_scale(const u8* block) {
    if constexpr (Format == BlockFormat::iq1_m)
        return half_bits(block[49] >> 4 | (block[51] & 240u) | (block[53] & 240u) << 4 | (block[55] & 240u) << 8);
    constexpr int at = Format == BlockFormat::tq1_0 ? 52 : Format == BlockFormat::tq2_0 ? 64 : 0;
    return half(block + at);
}

// The group-th 32 values of a block.
template <BlockFormat Format>
static inline SubScales unpack32(const u8* block, int group, i8* out) {
    static_assert(unpacks32(Format));
    if constexpr (Format == BlockFormat::iq2_xxs) return unpack_iq2_xxs(block, group, out);
    if constexpr (Format == BlockFormat::iq2_xs) return unpack_iq2_xs(block, group, out);
    if constexpr (Format == BlockFormat::iq2_s) return unpack_iq2_s(block, group, out);
    if constexpr (Format == BlockFormat::iq3_xxs) return unpack_iq3_xxs(block, group, out);
    if constexpr (Format == BlockFormat::iq3_s) return unpack_iq3_s(block, group, out);
    if constexpr (Format == BlockFormat::iq1_s) return unpack_iq1_s(block, group, out);
    if constexpr (Format == BlockFormat::iq1_m) return unpack_iq1_m(block, group, out);
    if constexpr (Format == BlockFormat::tq1_0) return unpack_tq1_0(block, group, out);
    if constexpr (Format == BlockFormat::tq2_0) return unpack_tq2_0(block, group, out);
    if constexpr (Format == BlockFormat::q1_0) return unpack_q1_0(block, group, out);
    if constexpr (Format == BlockFormat::q2_0) return unpack_q2_0(block, group, out);
}

}  // namespace penstock::PENSTOCK_ISA
