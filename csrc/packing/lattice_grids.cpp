#include "packing/lattice_grids.h"

#include <algorithm>

namespace penstock {
namespace {

// The words of penstock/quant/formats/lattice_grids.txt.
constexpr std::uint16_t points[] = {
#include "lattice_points.inc"
};
static_assert(sizeof(points) == 2 * (256 + 512 + 1024 + 256 + 512 + 2048));

template <class Word, std::size_t Size>
constexpr void expand(const std::uint16_t*& at, const std::uint8_t* magnitudes, std::array<Word, Size>& out) {
    constexpr unsigned values = sizeof(Word), bits = 16 / values;
    for (Word& word : out) {
        word = 0;
        for (unsigned i = 0; i < values; ++i)
            word |= static_cast<Word>(magnitudes[*at >> i * bits & ((1u << bits) - 1)]) << 8 * i;
        ++at;
    }
}

constexpr LatticeGrids expand_all() {
    constexpr std::uint8_t iq2[4] = {8, 25, 43}, iq1[4] = {128 - 7, 128 + 1, 128 + 9};
    constexpr std::uint8_t iq3_xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62}, iq3_s[16] = {1, 3, 5, 7, 9, 11, 13, 15};
    LatticeGrids out{};
    const std::uint16_t* at = points;
    expand(at, iq2, out.iq2_xxs);
    expand(at, iq2, out.iq2_xs);
    expand(at, iq2, out.iq2_s);
    std::copy_n(at, 256, out.iq3_xxs_words.begin());
    std::copy_n(at + 256, 512, out.iq3_s_words.begin());
    std::copy_n(iq3_xxs, 16, out.iq3_xxs_magnitudes.begin());
    std::copy_n(iq3_s, 16, out.iq3_s_magnitudes.begin());
    expand(at, iq3_xxs, out.iq3_xxs);
    expand(at, iq3_s, out.iq3_s);
    expand(at, iq1, out.iq1);
    return out;
}

}  // namespace

constinit const LatticeGrids lattice_grids = expand_all();

int lattice_point(BlockFormat format, int place, int i) {
    const auto value = [=](const auto& grid) {
        return static_cast<int>(grid[static_cast<std::size_t>(place)] >> 8 * i & 255);
    };
    switch (format) {
        case BlockFormat::iq2_xxs:
            return value(lattice_grids.iq2_xxs);
        case BlockFormat::iq2_xs:
            return value(lattice_grids.iq2_xs);
        case BlockFormat::iq2_s:
            return value(lattice_grids.iq2_s);
        case BlockFormat::iq3_xxs:
            return value(lattice_grids.iq3_xxs);
        case BlockFormat::iq3_s:
            return value(lattice_grids.iq3_s);
        default:
            return value(lattice_grids.iq1);
    }
}

}  // namespace penstock
