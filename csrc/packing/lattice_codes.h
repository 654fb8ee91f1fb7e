// Points of the lattice formats as the bytes that a dot product takes; see lattice_layout.h.
#pragma once

#include "packing/lattice_grids.h"
#include "packing/packed.h"
#include "vec/bytes.h"

namespace penstock::PENSTOCK_ISA {

template <BlockFormat Format>
class LatticePoints {
public:
    static constexpr LatticeLayout layout = lattice_layout(Format);
    static constexpr std::int64_t unit_bytes = layout.bytes();
    static constexpr int most = greatest_point;
    static constexpr bool streamed = true;
    static constexpr int group = code_infos[static_cast<int>(Format)].group;

    // At most a span of units.
    LatticePoints(const PackedHeader&, const std::uint8_t* codes, std::int64_t units) : codes_(codes) {
        if constexpr (has_places)  // all before the first is looked up: a word of a vector just stored is slow to load
            for (std::int64_t u = 0; u < units; ++u, codes += unit_bytes)
                for (int i = 0; i < layout.runs(); ++i)
                    vec::store_places<layout.high_bits>(places_[u] + 16 * i, codes + 16 * i,
                                                        codes + layout.high() + 2 * layout.high_bits * i);
    }

    // Calls use(integral_constant<v>, bytes) for the eight vectors of unit u, in order.
    template <class F>
    void each(std::int64_t u, F&& use) const {
        const std::uint8_t* const signs = codes_ + u * unit_bytes + layout.signs();
        const auto two = [&]<int i>(std::integral_constant<int, i>) {
            vec::TwoBytes64 values = points<i>(u);
            if constexpr (layout.shifted) {  // the grid has 128 more than the upper value
                const vec::Bytes64 less = vec::fours_where(signs + 2 * i, 128 - lattice_zero, 130 - lattice_zero);
                values = {values.first - less, values.second - less};
            } else {
                values = {vec::reflect_where(vec::either(values.first, lattice_zero), signs + 16 * i),
                          vec::reflect_where(vec::either(values.second, lattice_zero), signs + 16 * i + 8)};
            }
            use(std::integral_constant<int, 2 * i>{}, values.first);
            use(std::integral_constant<int, 2 * i + 1>{}, values.second);
        };
        [&]<int... i>(std::integer_sequence<int, i...>) {
            (two(std::integral_constant<int, i>{}), ...);
        }(std::make_integer_sequence<int, 4>{});
    }

private:
    static constexpr bool has_places = layout.values == 8 && layout.high_bits > 0;

    // Magnitudes of vectors 2 i and 2 i + 1 of unit u.
    template <int i>
    vec::TwoBytes64 points(std::int64_t u) const {
        const std::uint8_t* const unit = codes_ + u * unit_bytes;
        if constexpr (layout.values == 4) {
            const auto& words = lattice_words<Format>();
            const vec::Bytes64 table = vec::repeat16(lattice_magnitudes<Format>().data());
            return vec::look_up_fours<words.size()>(words.data(), unit + 32 * i, unit + layout.high() + 4 * i, table);
        } else {
            const auto* const grid = lattice_grid<Format>().data();
            if constexpr (has_places)
                return vec::look_up_eights(grid, places_[u] + 16 * i);
            else
                return vec::look_up_eights(grid, unit + 16 * i);
        }
    }

    const std::uint8_t* codes_;
    alignas(64) std::uint32_t places_[has_places ? 8 : 1][64];  // of eights, where they do not fit in a byte
};

}  // namespace penstock::PENSTOCK_ISA
