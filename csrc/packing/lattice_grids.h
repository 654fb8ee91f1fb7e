// The grids of the iq1 to iq3 formats, a point's values as the bytes of a word, first value lowest.
#pragma once

#include <array>
#include <cstdint>

#include "packing/block_formats.h"

namespace penstock {

struct LatticeGrids {
    std::array<std::uint64_t, 256> iq2_xxs;  // magnitudes
    std::array<std::uint64_t, 512> iq2_xs;
    std::array<std::uint64_t, 1024> iq2_s;
    std::array<std::uint32_t, 256> iq3_xxs;
    std::array<std::uint32_t, 512> iq3_s;
    std::array<std::uint16_t, 256> iq3_xxs_words;  // places among the magnitudes, four bits each
    std::array<std::uint16_t, 512> iq3_s_words;
    std::array<std::uint8_t, 16> iq3_xxs_magnitudes, iq3_s_magnitudes;
    std::array<std::uint64_t, 2048> iq1;  // eighths shifted up by one, plus 128: no byte borrows when two are taken off
};

extern const LatticeGrids lattice_grids;

// Points of the grid of a lattice format, eight or four bytes each.
template <BlockFormat Format>
constexpr const auto& lattice_grid() {
    if constexpr (Format == BlockFormat::iq2_xxs)
        return lattice_grids.iq2_xxs;
    else if constexpr (Format == BlockFormat::iq2_xs)
        return lattice_grids.iq2_xs;
    else if constexpr (Format == BlockFormat::iq2_s)
        return lattice_grids.iq2_s;
    else if constexpr (Format == BlockFormat::iq3_xxs)
        return lattice_grids.iq3_xxs;
    else if constexpr (Format == BlockFormat::iq3_s)
        return lattice_grids.iq3_s;
    else
        return lattice_grids.iq1;
}

// The same of iq3 as words of four nibbles, and what they stand for.
template <BlockFormat Format>
constexpr const auto& lattice_words() {
    if constexpr (Format == BlockFormat::iq3_xxs)
        return lattice_grids.iq3_xxs_words;
    else
        return lattice_grids.iq3_s_words;
}

template <BlockFormat Format>
constexpr const auto& lattice_magnitudes() {
    if constexpr (Format == BlockFormat::iq3_xxs)
        return lattice_grids.iq3_xxs_magnitudes;
    else
        return lattice_grids.iq3_s_magnitudes;
}

// Value i of a point, by the name of its format.
int lattice_point(BlockFormat format, int place, int i);

}  // namespace penstock
