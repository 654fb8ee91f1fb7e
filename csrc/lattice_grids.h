// The grids of the iq1 to iq3 formats, a point's values as the bytes of a word, first value lowest.
#pragma once

#include <array>
#include <cstdint>

namespace penstock {

struct LatticeGrids {
    std::array<std::uint64_t, 256> iq2_xxs;  // magnitudes
    std::array<std::uint64_t, 512> iq2_xs;
    std::array<std::uint64_t, 1024> iq2_s;
    std::array<std::uint32_t, 256> iq3_xxs;
    std::array<std::uint32_t, 512> iq3_s;
    std::array<std::uint64_t, 2048> iq1;  // eighths shifted up by one, plus 128: no byte borrows when two are taken off
};

extern const LatticeGrids lattice_grids;

}  // namespace penstock
