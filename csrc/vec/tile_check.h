// Whether matrix units compute what they are documented to.
#pragma once

#include <cstdint>

namespace penstock {

// sums[rows][16] = activations [rows][32 · units] · weights [units][16 pairs][16 columns][2], bfloat16
using TileProduct = void (*)(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units,
                             float* sums);

// Compares products of one to sixteen rows bit by bit, subnormal numbers and cancellation among them.
bool same_products(TileProduct one, TileProduct other);

}  // namespace penstock
