// The formats of one to three bits as they are stored, 32 values at a time.
//
//     value i of the group = block_scale<format>(block) * code_info(format).factor * sub[i / 16] * out[i]
//
// where out and sub are what unpack32<format>(block, group, out) gives; every product is exact in fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "packing/block_fields.h"
#include "packing/canonical.h"
#include "packing/lattice_fields.h"
#include "packing/lattice_grids.h"

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

// Integer scales of the first and the last sixteen values of a group.
struct SubScales {
    int first, second;
};

static inline u64 join(u32 low, u32 high) { return low | static_cast<u64>(high) << 32; }

// Run i of eight values of the one-bit grid, in eighths.
static inline void store_shifted(u64 point, bool down, int i, i8* out) {
    const u64 word = (point - (down ? 2 * every_byte : 0)) ^ 128 * every_byte;
    std::memcpy(out + 8 * i, &word, 8);
}

template <BlockFormat Format>
static inline SubScales unpack_lattice(const u8* block, int group, i8* out) {
    const LatticeFields f = lattice_fields<Format>(block, group);
    const auto& grid = lattice_grid<Format>();
    if constexpr (Format == BlockFormat::iq1_s || Format == BlockFormat::iq1_m)
        for (int i = 0; i < 4; ++i) store_shifted(grid[f.point[i]], f.signs >> i & 1, i, out);
    else if constexpr (sizeof(grid[0]) == 8)
        store_signed({grid[f.point[0]], grid[f.point[1]], grid[f.point[2]], grid[f.point[3]]}, f.signs, out);
    else
        store_signed({join(grid[f.point[0]], grid[f.point[1]]), join(grid[f.point[2]], grid[f.point[3]]),
                      join(grid[f.point[4]], grid[f.point[5]]), join(grid[f.point[6]], grid[f.point[7]])},
                     f.signs, out);
    return {static_cast<int>(2 * f.scales[0] + 1), static_cast<int>(2 * f.scales[1] + 1)};
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

// The fp16 scale of a block.
template <BlockFormat Format>
static inline float block_scale(const u8* block) {
    return half_bits(block_scale_bits<Format>(block));
}

// The group-th 32 values of a block.
template <BlockFormat Format>
static inline SubScales unpack32(const u8* block, int group, i8* out) {
    static_assert(unpacks32(Format));
    if constexpr (is_lattice(Format)) return unpack_lattice<Format>(block, group, out);
    if constexpr (Format == BlockFormat::tq1_0) return unpack_tq1_0(block, group, out);
    if constexpr (Format == BlockFormat::tq2_0) return unpack_tq2_0(block, group, out);
    if constexpr (Format == BlockFormat::q1_0) return unpack_q1_0(block, group, out);
    if constexpr (Format == BlockFormat::q2_0) return unpack_q2_0(block, group, out);
}

}  // namespace penstock::PENSTOCK_ISA
