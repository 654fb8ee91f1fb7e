// What the blocks of the lattice formats hold, 32 values at a time: places in a grid, signs and scales.
#pragma once

#include "packing/block_fields.h"
#include "packing/block_formats.h"

namespace penstock::PENSTOCK_ISA {

struct LatticeFields {
    u32 point[8];   // places in the grid, in order: eight of four values or four of eight
    u32 signs;      // bit i: value i is negative; of one-bit formats bit r: run r of eight values is moved down
    u32 scales[2];  // s of the first and the last sixteen values, whose scale is 2 s + 1
};

// Four fields of seven signs → four bytes of eight, the last of which makes their number even.
static inline u32 even_signs(u32 fields) {
    const u32 seven = (fields & 0x7f) | (fields << 1 & 0x7f00) | (fields << 2 & 0x7f0000) | (fields << 3 & 0x7f000000);
    u32 parity = (seven ^ seven >> 4) & 0x0f0f0f0f;
    parity = (parity ^ parity >> 2) & 0x03030303;
    parity = (parity ^ parity >> 1) & 0x01010101;
    return seven | parity << 7;
}

static inline LatticeFields fields_iq2_xxs(const u8* block, int group) {
    const u8* q = block + 2 + 8 * group;
    const u32 tail = load32(q + 4);
    return {{q[0], q[1], q[2], q[3]}, even_signs(tail), {tail >> 28, tail >> 28}};
}

static inline LatticeFields fields_iq2_xs(const u8* block, int group) {
    const u8* q = block + 2 + 8 * group;
    const u32 a = load16(q), b = load16(q + 2), c = load16(q + 4), d = load16(q + 6), scales = block[66 + group];
    const u32 signs = even_signs(a >> 9 | b >> 9 << 7 | c >> 9 << 14 | d >> 9 << 21);
    return {{a & 511, b & 511, c & 511, d & 511}, signs, {scales & 15, scales >> 4}};
}

static inline LatticeFields fields_iq2_s(const u8* block, int group) {
    const u8* q = block + 2 + 4 * group;
    const u32 high = block[66 + group], scales = block[74 + group];
    return {{q[0] | (high << 8 & 768), q[1] | (high << 6 & 768), q[2] | (high << 4 & 768), q[3] | (high << 2 & 768)},
            load32(q + 32),
            {scales & 15, scales >> 4}};
}

static inline LatticeFields fields_iq3_xxs(const u8* block, int group) {
    const u8* q = block + 2 + 8 * group;
    const u32 tail = load32(block + 66 + 4 * group);
    return {{q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]}, even_signs(tail), {tail >> 28, tail >> 28}};
}

static inline LatticeFields fields_iq3_s(const u8* block, int group) {
    const u8* q = block + 2 + 8 * group;
    const u32 high = static_cast<u32>(block[66 + group]) << 8, scale = block[106 + group / 2] >> (group % 2 * 4) & 15u;
    LatticeFields out{{}, load32(block + 74 + 4 * group), {scale, scale}};
    for (int i = 0; i < 8; ++i) out.point[i] = q[i] | (high >> i & 256);
    return out;
}

static inline LatticeFields fields_iq1_s(const u8* block, int group) {
    const u8* q = block + 2 + 4 * group;
    const u32 tail = load16(block + 34 + 2 * group), scale = tail >> 12 & 7;
    LatticeFields out{{}, tail >> 15 ? 15u : 0u, {scale, scale}};
    for (int i = 0; i < 4; ++i) out.point[i] = q[i] | (tail >> 3 * i & 7) << 8;
    return out;
}

static inline LatticeFields fields_iq1_m(const u8* block, int group) {
    const u8 *q = block + 4 * group, *h = block + 32 + 2 * group;
    const u32 packed = load16(block + 48 + group / 2 * 2) >> (group % 2 * 6);
    LatticeFields out{{}, 0, {packed & 7, packed >> 3 & 7}};
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = h[i / 2] >> (i % 2 * 4) & 15u;
        out.point[i] = q[i] | (nibble & 7) << 8;
        out.signs |= nibble >> 3 << i;
    }
    return out;
}

// Fields of the group-th 32 values of a block.
template <BlockFormat Format>
static inline LatticeFields lattice_fields(const u8* block, int group) {
    if constexpr (Format == BlockFormat::iq2_xxs) return fields_iq2_xxs(block, group);
    if constexpr (Format == BlockFormat::iq2_xs) return fields_iq2_xs(block, group);
    if constexpr (Format == BlockFormat::iq2_s) return fields_iq2_s(block, group);
    if constexpr (Format == BlockFormat::iq3_xxs) return fields_iq3_xxs(block, group);
    if constexpr (Format == BlockFormat::iq3_s) return fields_iq3_s(block, group);
    if constexpr (Format == BlockFormat::iq1_s) return fields_iq1_s(block, group);
    if constexpr (Format == BlockFormat::iq1_m) return fields_iq1_m(block, group);
}

// The bits of a block's fp16 scale; in iq1_m it is spread over the top nibbles of four words.
template <BlockFormat Format>
static inline u32 block_scale_bits(const u8* block) {
    if constexpr (Format == BlockFormat::iq1_m)
        return block[49] >> 4 | (block[51] & 240u) | (block[53] & 240u) << 4 | (block[55] & 240u) << 8;
    constexpr int at = Format == BlockFormat::tq1_0 ? 52 : Format == BlockFormat::tq2_0 ? 64 : 0;
    return load16(block + at);
}

}  // namespace penstock::PENSTOCK_ISA
