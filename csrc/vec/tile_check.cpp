#include "vec/tile_check.h"

#include <cstring>
#include <initializer_list>

namespace penstock {

bool same_products(TileProduct one, TileProduct other) {
    constexpr int units = 3;
    alignas(64) std::uint16_t activations[16 * 32 * units], weights[512 * units];
    std::uint32_t state = 1;
    const auto next = [&] { return (state = state * 1664525u + 1013904223u) >> 16; };  // Numerical Recipes' generator
    // Exponents of 2^-8 to 2^7, every 29th value subnormal, so that sums cancel and round in every step.
    const auto fill = [&](std::uint16_t* out, int count) {
        for (int i = 0; i < count; ++i) {
            const std::uint32_t bits = next();
            const std::uint32_t exponent = i % 29 == 0 ? 0 : 119 + (bits >> 8 & 15);
            out[i] = static_cast<std::uint16_t>((bits & 0x807f) | exponent << 7);
        }
    };
    fill(activations, 16 * 32 * units);
    fill(weights, 512 * units);
    for (int i = 0; i < 32 * units; ++i)
        activations[i] = static_cast<std::uint16_t>((i & 1) << 15 | 3 << 7);  // tiny sums
    for (const int rows : {16, 5, 1}) {
        alignas(64) float a[256] = {}, b[256] = {};
        one(activations, rows, weights, units, a);
        other(activations, rows, weights, units, b);
        if (std::memcmp(a, b, sizeof(a)) != 0) return false;
    }
    return true;
}

}  // namespace penstock
