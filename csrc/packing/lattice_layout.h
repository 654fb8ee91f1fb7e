// How the points of the lattice formats lie in a panel: by field, so that sixteen rows are read at a time.
//
// A unit is 32 inputs of 16 rows, in runs of a point's values (eight; four in iq3):
//     low      [runs][16] uint8                 low eight bits of the point's place in the grid
//     high     [runs][high_bits] uint16         its other bits, lowest first; bit r is row r
//     signs    [8] uint64                       bit 4 r + i of word v: input 4 v + i of row r is negative
//     shifts   [4] uint16 instead of signs      (iq1) bit r of word i: run i of row r is moved down
// A value is stored plus lattice_zero when it is unpacked, which makes it an unsigned byte below 128.
#pragma once

#include <cstdint>

#include "packing/block_formats.h"

namespace penstock {

inline constexpr int lattice_zero = 64, greatest_point = 127;

struct LatticeLayout {
    std::int64_t values;  // of a point: 8 or 4
    std::int64_t high_bits;
    bool shifted;  // as iq1, without signs

    constexpr std::int64_t runs() const { return 32 / values; }
    constexpr std::int64_t high() const { return runs() * 16; }
    constexpr std::int64_t signs() const { return high() + runs() * high_bits * 2; }
    constexpr std::int64_t bytes() const { return signs() + (shifted ? 8 : 64); }
};

constexpr LatticeLayout lattice_layout(BlockFormat format) {
    switch (format) {
        case BlockFormat::iq2_xxs:
            return {8, 0, false};
        case BlockFormat::iq2_xs:
            return {8, 1, false};
        case BlockFormat::iq2_s:
            return {8, 2, false};
        case BlockFormat::iq3_xxs:
            return {4, 0, false};
        case BlockFormat::iq3_s:
            return {4, 1, false};
        default:
            return {8, 3, true};
    }
}

}  // namespace penstock
