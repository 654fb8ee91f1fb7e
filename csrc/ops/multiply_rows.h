// What the products of every kind share: four panels at a time, rows in tiles.
#pragma once

#include "ops/multiply.h"
#include "ops/tiles.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr int all_panels = 4;
static_assert(task_columns == group_columns);

// Rows are cut into tiles as equal as can be: seven rows are four and three, not six and one.
template <class F>
static inline void each_tile(std::int64_t count, F&& use) {
    const std::int64_t tiles = (count + vec::tile_rows - 1) / vec::tile_rows;
    for (std::int64_t i = 0, at = 0; i < tiles; ++i) {
        const std::int64_t rows = (count - at + tiles - i - 1) / (tiles - i);
        with_rows(static_cast<int>(rows), [&](auto fixed) { use(at, fixed); });
        at += rows;
    }
}

}  // namespace penstock::PENSTOCK_ISA
