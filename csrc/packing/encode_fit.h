// Searches for the scales of a group of weights: least squares, weighted by how much each input matters. Included by
// one source of each instruction set. All sums run over sixteen lanes and are joined in one order, so that every
// instruction set finds the same bits.
#pragma once

#include <algorithm>
#include <cmath>

namespace penstock::PENSTOCK_ISA {
namespace fit {

constexpr int lanes = 16;

// To the nearest integer, ties to even; |v| below 2^22.
inline float nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }

// Sum of term(0) … term(G - 1); G is a multiple of the lanes, or below them.
template <int G, class Term>
float total(const Term& term) {
    constexpr int width = std::min(G, lanes);
    float lane[width] = {};
    for (int i = 0; i < G; i += width)
        for (int l = 0; l < width; ++l) lane[l] += term(i + l);
    for (int step = width / 2; step > 0; step /= 2)
        for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
    return lane[0];
}

// Integers lo … hi.
struct Integers {
    float lo, hi;
    template <int G>
    void round(const float* x, float inverse, float* q) const {
        for (int i = 0; i < G; ++i) q[i] = nearest(std::min(std::max(x[i] * inverse, lo), hi));
    }
};

// The sixteen non-linear values of IQ4_NL and IQ4_XS.
inline constexpr float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Iq4 {
    float lo = iq4_values[0], hi = iq4_values[15];
    template <int G>
    void round(const float* x, float inverse, float* q) const {
        float v[G];
        for (int i = 0; i < G; ++i) {
            v[i] = x[i] * inverse;
            q[i] = iq4_values[0];
        }
        for (int k = 1; k < 16; ++k) {
            const float middle = 0.5f * (iq4_values[k - 1] + iq4_values[k]), step = iq4_values[k] - iq4_values[k - 1];
            for (int i = 0; i < G; ++i) q[i] += v[i] > middle ? step : 0.0f;
        }
    }
};

// Where to look for a scale: the value of largest magnitude becomes lo times a factor from `least` to `most`.
struct Range {
    float least, most;
    int steps;
    bool both_signs;
};

struct Scaled {
    float scale = 0;   // d
    float weight = 0;  // Σ w q²
    float gain = 0;    // how far Σ w (x - d q)² lies below Σ w x²
};

// d and q of the least Σ w (x - d q)² for q rounded by x · inverse.
template <int G, class Grid>
Scaled score(const Grid& grid, const float* x, const float* w, float inverse, float* q) {
    grid.template round<G>(x, inverse, q);
    const float xq = total<G>([&](int i) { return w[i] * x[i] * q[i]; });
    const float qq = total<G>([&](int i) { return w[i] * q[i] * q[i]; });
    return qq > 0 ? Scaled{xq / qq, qq, xq * (xq / qq)} : Scaled{};
}

// The best d of x ≈ d · q with q on the grid; q gets the values.
template <int G, class Grid>
Scaled symmetric(const Grid& grid, const float* x, const float* w, const Range& range, float* q) {
    float peak = 0;
    for (int i = 0; i < G; ++i) peak = std::fabs(x[i]) > std::fabs(peak) ? x[i] : peak;
    Scaled best;
    std::fill(q, q + G, 0.0f);
    if (std::fabs(peak) < 1e-30f) return best;
    float trial[G];
    const auto consider = [&](float inverse) {
        const Scaled found = score<G>(grid, x, w, inverse, trial);
        if (found.gain <= best.gain) return false;
        best = found;
        std::copy(trial, trial + G, q);
        return true;
    };
    for (int sign = 0; sign < (range.both_signs ? 2 : 1); ++sign)
        for (int k = 0; k < range.steps; ++k) {
            const float share = static_cast<float>(k) / static_cast<float>(std::max(range.steps - 1, 1));
            const float factor = range.least + (range.most - range.least) * share;
            consider((sign ? -grid.lo : grid.lo) * factor / peak);
        }
    for (int again = 0; again < 4 && best.scale != 0 && consider(1 / best.scale); ++again) {
    }
    return best;
}

struct Shifted {
    float scale = 0, minimum = 0;  // x ≈ scale · q - minimum, both at least 0
    float error = 0;               // Σ w (x - scale · q + minimum)² less Σ w x²
    float weight = 0;              // Σ w q²
};

// The best scale and minimum for given q.
template <int G>
Shifted solve(const float* x, const float* w, const float* q) {
    const double s = total<G>([&](int i) { return w[i]; });
    const double sx = total<G>([&](int i) { return w[i] * x[i]; });
    const double sq = total<G>([&](int i) { return w[i] * q[i]; });
    const double sqq = total<G>([&](int i) { return w[i] * q[i] * q[i]; });
    const double sxq = total<G>([&](int i) { return w[i] * x[i] * q[i]; });
    const double determinant = s * sqq - sq * sq;
    double d = 0, m = s > 0 ? -sx / s : 0;
    if (determinant > 1e-9 * s * sqq) {
        d = (s * sxq - sx * sq) / determinant;
        m = (sq * sxq - sqq * sx) / determinant;
    }
    if (m < 0) {
        m = 0;
        d = sqq > 0 ? sxq / sqq : 0;
    }
    if (d < 0) return {0, 0, 0, static_cast<float>(sqq)};
    const double error = d * d * sqq + m * m * s - 2 * d * sxq + 2 * m * sx - 2 * d * m * sq;
    return {static_cast<float>(d), static_cast<float>(m), static_cast<float>(error), static_cast<float>(sqq)};
}

// The best scale and minimum of x ≈ scale · q - minimum, q in 0 … most.
template <int G>
Shifted affine(const float* x, const float* w, float most, const Range& range) {
    float low = 0, high = x[0];
    for (int i = 0; i < G; ++i) {
        low = std::min(low, x[i]);
        high = std::max(high, x[i]);
    }
    if (!(high - low > 1e-30f)) return {0, -low, 0, 0};
    float q[G];
    Shifted best;
    bool any = false;
    const auto consider = [&](float inverse, float minimum) {
        for (int i = 0; i < G; ++i) q[i] = nearest(std::min(std::max((x[i] + minimum) * inverse, 0.0f), most));
        const Shifted found = solve<G>(x, w, q);
        if (any && found.error >= best.error) return false;
        best = found;
        any = true;
        return true;
    };
    for (int k = 0; k < range.steps; ++k) {
        const float share = static_cast<float>(k) / static_cast<float>(std::max(range.steps - 1, 1));
        const float factor = range.least + (range.most - range.least) * share;
        Shifted before = best;
        if (!consider(most * factor / (high - low), -low)) continue;
        for (int again = 0; again < 3 && best.scale > 0; ++again) {
            before = best;
            if (!consider(1 / before.scale, before.minimum)) break;
        }
    }
    return best;
}

}  // namespace fit
}  // namespace penstock::PENSTOCK_ISA
