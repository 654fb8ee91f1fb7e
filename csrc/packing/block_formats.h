// The block formats of GGUF files: which there are and how large their blocks are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum class BlockFormat : int {
    f16,
    bf16,
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q8_0,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
    mxfp4,
    q8_k,
    iq4_nl,
    iq4_xs,
    nvfp4,
    iq2_xxs,
    iq2_xs,
    iq2_s,
    iq3_xxs,
    iq3_s,
    iq1_s,
    iq1_m,
    tq1_0,
    tq2_0,
    q1_0,
    q2_0,
    count
};

struct BlockLayout {
    const char* name;
    std::int64_t elements;  // values in one block
    std::int64_t bytes;     // bytes of one block
};

inline constexpr BlockLayout block_layouts[] = {
    {"f16", 1, 2},        {"bf16", 1, 2},      {"q4_0", 32, 18},     {"q4_1", 32, 20},    {"q5_0", 32, 22},
    {"q5_1", 32, 24},     {"q8_0", 32, 34},    {"q2_k", 256, 84},    {"q3_k", 256, 110},  {"q4_k", 256, 144},
    {"q5_k", 256, 176},   {"q6_k", 256, 210},  {"mxfp4", 32, 17},    {"q8_k", 256, 292},  {"iq4_nl", 32, 18},
    {"iq4_xs", 256, 136}, {"nvfp4", 64, 36},   {"iq2_xxs", 256, 66}, {"iq2_xs", 256, 74}, {"iq2_s", 256, 82},
    {"iq3_xxs", 256, 98}, {"iq3_s", 256, 110}, {"iq1_s", 256, 50},   {"iq1_m", 256, 56},  {"tq1_0", 256, 54},
    {"tq2_0", 256, 66},   {"q1_0", 128, 18},   {"q2_0", 64, 18},
};
static_assert(sizeof(block_layouts) / sizeof(block_layouts[0]) == static_cast<std::size_t>(BlockFormat::count));

// Whether values are points of a grid (iq1 to iq3), in blocks of 256.
constexpr bool is_lattice(BlockFormat format) { return format >= BlockFormat::iq2_xxs && format <= BlockFormat::iq1_m; }

constexpr const BlockLayout& block_layout(BlockFormat format) { return block_layouts[static_cast<int>(format)]; }

}  // namespace penstock
