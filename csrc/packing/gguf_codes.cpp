// Splits blocks into codes and exact scales, as canonical.h says.
#include "packing/block_fields.h"
#include "packing/canonical.h"
#include "packing/lattice.h"

namespace penstock::PENSTOCK_ISA {
namespace {

void low_nibbles_first(const u8* packed, u8* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = packed[i] & 15;
        codes[i + 16] = packed[i] >> 4;
    }
}

// A fifth bit of 32 codes.
void add_fifth_bits(u32 high, u8* codes) {
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<u8>(codes[i] | (high >> i & 1) << 4);
}

void signed_bytes(const u8* values, int count, u8* codes) {
    for (int i = 0; i < count; ++i) codes[i] = values[i] ^ 128;
}

void split_q4_0(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    low_nibbles_first(block + 2, out.codes);
}

void split_q4_1(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    out.super_min = -half(block + 2);
    low_nibbles_first(block + 4, out.codes);
}

void split_q5_0(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    low_nibbles_first(block + 6, out.codes);
    add_fifth_bits(load32(block + 2), out.codes);
}

void split_q5_1(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    out.super_min = -half(block + 2);
    low_nibbles_first(block + 8, out.codes);
    add_fifth_bits(load32(block + 4), out.codes);
}

void split_q8_0(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    signed_bytes(block + 2, 32, out.codes);
}

void split_q2_k(const u8* block, CodeBlock& out) {
    out.super_scale = half(block + 80);
    out.super_min = half(block + 82);
    for (int group = 0; group < 16; ++group) {
        out.sub_scale[group] = block[group] & 15;
        out.sub_min[group] = block[group] >> 4;
    }
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i) out.codes[32 * run + i] = block[16 + run / 4 * 32 + i] >> (run % 4 * 2) & 3;
}

void split_q3_k(const u8* block, CodeBlock& out) {
    out.super_scale = half(block + 108);
    for (int group = 0; group < 16; ++group)
        out.sub_scale[group] = static_cast<std::int16_t>(scale_q3_k(block + 96, group));
    for (int run = 0; run < 8; ++run)
        for (int i = 0; i < 32; ++i)
            out.codes[32 * run + i] =
                static_cast<u8>((block[32 + run / 4 * 32 + i] >> (run % 4 * 2) & 3) | (block[i] >> run & 1) << 2);
}

void split_scale_mins(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    out.super_min = half(block + 2);
    for (int group = 0; group < 8; ++group) {
        const ScaleMin s = scale_min(block + 4, group);
        out.sub_scale[group] = static_cast<std::int16_t>(s.scale);
        out.sub_min[group] = static_cast<std::int16_t>(s.least);
    }
}

void split_q4_k(const u8* block, CodeBlock& out) {
    split_scale_mins(block, out);
    for (int group = 0; group < 8; ++group)
        for (int i = 0; i < 32; ++i) out.codes[32 * group + i] = block[16 + group / 2 * 32 + i] >> (group % 2 * 4) & 15;
}

void split_q5_k(const u8* block, CodeBlock& out) {
    split_scale_mins(block, out);
    for (int group = 0; group < 8; ++group)
        for (int i = 0; i < 32; ++i)
            out.codes[32 * group + i] = static_cast<u8>((block[48 + group / 2 * 32 + i] >> (group % 2 * 4) & 15) |
                                                        (block[16 + i] >> group & 1) << 4);
}

void split_q6_k(const u8* block, CodeBlock& out) {
    out.super_scale = half(block + 208);
    for (int group = 0; group < 16; ++group) out.sub_scale[group] = static_cast<i8>(block[192 + group]);
    for (int run = 0; run < 8; ++run) {
        const u8 *low = block + run / 4 * 64 + run % 2 * 32, *high = block + 128 + run / 4 * 32;
        const int low_shift = run % 4 / 2 * 4, high_shift = run % 4 * 2;
        for (int i = 0; i < 32; ++i)
            out.codes[32 * run + i] = static_cast<u8>((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
    }
}

void split_mxfp4(const u8* block, CodeBlock& out) {
    out.super_scale = half_e8m0(block[0]);
    low_nibbles_first(block + 1, out.codes);
}

void split_q8_k(const u8* block, CodeBlock& out) {
    out.super_scale = std::bit_cast<float>(load32(block));
    signed_bytes(block + 4, 256, out.codes);
}

void split_iq4_nl(const u8* block, CodeBlock& out) { split_q4_0(block, out); }

void split_iq4_xs(const u8* block, CodeBlock& out) {
    out.super_scale = half(block);
    for (int group = 0; group < 8; ++group) {
        out.sub_scale[group] = static_cast<std::int16_t>(scale_iq4_xs(block + 2, group));
        low_nibbles_first(block + 8 + 16 * group, out.codes + 32 * group);
    }
}

void split_nvfp4(const u8* block, CodeBlock& out) {
    out.super_scale = 1.0f;
    for (int group = 0; group < 4; ++group) {
        out.scale[group] = half_ue4m3(block[group]);
        for (int i = 0; i < 8; ++i) {
            out.codes[16 * group + i] = block[4 + 8 * group + i] & 15;
            out.codes[16 * group + i + 8] = block[4 + 8 * group + i] >> 4;
        }
    }
}

// The place of a value in its table: arithmetic instead of a search, so that loops become vector code.
template <BlockFormat Format>
constexpr u8 lattice_code(i8 value) {
    constexpr int first = code_info(Format).lut[0];
    if constexpr (first == lut_iq1[0])  // odd neighbours of -8, 0 and 8: the upper ones end in 001
        return static_cast<u8>((value + 9) >> 3 | (value & 2) << 1);
    constexpr int shift = first == lut_iq2[0] ? 4 : first == lut_iq3_xxs[0] ? 3 : 1;
    constexpr int sign = 1 << (code_info(Format).bits - 1);
    return static_cast<u8>((value < 0 ? -value : value) >> shift | (value < 0 ? sign : 0));
}

template <BlockFormat Format>
constexpr bool inverts_table() {
    const CodeInfo info = code_info(Format);
    for (int code = 0; code < 1 << info.bits; ++code)
        if (info.lut[code] != 0 && lattice_code<Format>(info.lut[code]) != code) return false;
    return true;
}

template <BlockFormat Format>
void split_lattice(const u8* block, CodeBlock& out) {
    static_assert(inverts_table<Format>());
    constexpr bool by_sixteen = code_info(Format).group == 16;
    out.super_scale = block_scale<Format>(block);
    for (int run = 0; run < 8; ++run) {
        i8 values[32];
        const SubScales sub = unpack32<Format>(block, run, values);
        for (int i = 0; i < 32; ++i) out.codes[32 * run + i] = lattice_code<Format>(values[i]);
        out.sub_scale[by_sixteen ? 2 * run : run] = static_cast<std::int16_t>(sub.first);
        if constexpr (by_sixteen) out.sub_scale[2 * run + 1] = static_cast<std::int16_t>(sub.second);
    }
}

template <BlockFormat Format>
void split_ternary(const u8* block, CodeBlock& out) {
    out.super_scale = block_scale<Format>(block);
    for (int run = 0; run < block_layout(Format).elements / 32; ++run) {
        i8 values[32];
        unpack32<Format>(block, run, values);
        for (int i = 0; i < 32; ++i) out.codes[32 * run + i] = static_cast<u8>(values[i] + 1);
    }
}

template <BlockFormat Format, void (*Split)(const u8*, CodeBlock&)>
void each(const u8* blocks, std::int64_t num_blocks, CodeBlock* out) {
    constexpr CodeInfo info = code_info(Format);
    constexpr BlockLayout layout = block_layout(Format);
    for (std::int64_t b = 0; b < num_blocks; ++b) {
        CodeBlock& to = out[b];
        to.super_min = 0.0f;
        Split(blocks + b * layout.bytes, to);
        for (int group = 0; group < layout.elements / info.group; ++group) {
            if constexpr (!info.two_level) {
                to.sub_scale[group] = 1;
                to.sub_min[group] = info.has_min;
            } else if constexpr (!info.has_min) {
                to.sub_min[group] = 0;
            }
            if constexpr (Format != BlockFormat::nvfp4)
                to.scale[group] = to.super_scale * info.factor * static_cast<float>(to.sub_scale[group]);
            to.minimum[group] = to.super_min * static_cast<float>(to.sub_min[group]);
        }
    }
}

using SplitAll = void (*)(const u8*, std::int64_t, CodeBlock*);
template <BlockFormat Format>
constexpr SplitAll lattice = each<Format, split_lattice<Format>>;
template <BlockFormat Format>
constexpr SplitAll ternary = each<Format, split_ternary<Format>>;

constexpr SplitAll splitters[] = {
    nullptr,  // f16
    nullptr,  // bf16
    each<BlockFormat::q4_0, split_q4_0>,
    each<BlockFormat::q4_1, split_q4_1>,
    each<BlockFormat::q5_0, split_q5_0>,
    each<BlockFormat::q5_1, split_q5_1>,
    each<BlockFormat::q8_0, split_q8_0>,
    each<BlockFormat::q2_k, split_q2_k>,
    each<BlockFormat::q3_k, split_q3_k>,
    each<BlockFormat::q4_k, split_q4_k>,
    each<BlockFormat::q5_k, split_q5_k>,
    each<BlockFormat::q6_k, split_q6_k>,
    each<BlockFormat::mxfp4, split_mxfp4>,
    each<BlockFormat::q8_k, split_q8_k>,
    each<BlockFormat::iq4_nl, split_iq4_nl>,
    each<BlockFormat::iq4_xs, split_iq4_xs>,
    each<BlockFormat::nvfp4, split_nvfp4>,
    lattice<BlockFormat::iq2_xxs>,
    lattice<BlockFormat::iq2_xs>,
    lattice<BlockFormat::iq2_s>,
    lattice<BlockFormat::iq3_xxs>,
    lattice<BlockFormat::iq3_s>,
    lattice<BlockFormat::iq1_s>,
    lattice<BlockFormat::iq1_m>,
    ternary<BlockFormat::tq1_0>,
    ternary<BlockFormat::tq2_0>,
    ternary<BlockFormat::q1_0>,
    ternary<BlockFormat::q2_0>,
};
static_assert(sizeof(splitters) / sizeof(splitters[0]) == static_cast<std::size_t>(BlockFormat::count));

}  // namespace

bool decode_codes(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, CodeBlock* out) {
    const SplitAll split = splitters[static_cast<int>(format)];
    if (split != nullptr) split(blocks, num_blocks, out);
    return split != nullptr;
}

}  // namespace penstock::PENSTOCK_ISA
