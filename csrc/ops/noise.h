// The noise of draws: one Gumbel number for each (seed, sequence, position, token), made of integer operations alone,
// so that every instruction set and device has the same bits. kernels/reference/noise.py says what it is and how exact.
#pragma once

#include <bit>
#include <cstdint>

namespace penstock {

// A number is in units of 2^-noise_bits; between these, in ones, lies all noise.
constexpr int noise_bits = 40;
constexpr double least_noise = -3.14, most_noise = 22.88;
// Scaled distances from the largest logit count as no less.
constexpr double least_distance = -64.0;

// Whose noise: the fourth word of a Philox counter is the token's id without its last two bits, which choose the lane.
struct NoiseKey {
    std::uint64_t seed, position;
    std::uint32_t sequence;
};

// ln(value / 2^Width) = log / 2^63 - halvings ln 2.
struct Logarithm {
    std::int64_t halvings, log;
};

template <int Width>
static inline Logarithm logarithm(std::int64_t value) {
    // ln(1 + f) / f on [-1/4, 1/2] in units of 2^-30.
    constexpr std::int64_t coefficients[] = {86068139,  -113810753, 122539236, -134194957, 153184005, -178941705,
                                             214753608, -268435895, 357913893, -536870909, 1073741824};
    const int used = 64 - std::countl_zero(static_cast<std::uint64_t>(value));
    const std::int64_t mantissa = value << (Width - used) >> (Width - 33);
    const bool low = mantissa < std::int64_t{3} << 31;
    const std::int64_t fraction = (low ? 2 * mantissa : mantissa) - (std::int64_t{1} << 33);
    const std::int64_t argument = fraction >> 3;
    std::int64_t factor = -33533226;
    for (const std::int64_t coefficient : coefficients) factor = coefficient + (factor * argument >> 30);
    return {Width - used + low, fraction * factor};
}

// The noise that 32 random bits stand for.
static inline std::int64_t gumbel(std::uint32_t bits) {
    constexpr std::int64_t ln2_58 = 199786072581291488, ln2_40 = 762123384786;
    const Logarithm first = logarithm<33>(2 * static_cast<std::int64_t>(bits) + 1);
    const std::int64_t time = first.halvings * ln2_58 - (first.log >> 5);
    const Logarithm second = logarithm<63>(time);
    return (second.halvings - 5) * ln2_40 - (second.log >> (63 - noise_bits));
}

}  // namespace penstock
