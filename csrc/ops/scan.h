// Passes over the logits of one row. Sums run in eight fixed lanes, block by block, so that every instruction set
// gives the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include PENSTOCK_VEC_HEADER

namespace penstock::PENSTOCK_ISA {

constexpr float neg_inf = -std::numeric_limits<float>::infinity();
constexpr float least_finite = std::numeric_limits<float>::lowest();
constexpr std::int64_t mass_block = 1024;

// The eight logits at `at`, with -infinity past the end.
static inline vec::F32 load_padded(const float* logits, std::int64_t at, std::int64_t size) {
    if (at + 8 <= size) return vec::load(logits + at);
    float tail[8];
    for (std::int64_t i = 0; i < 8; ++i) tail[i] = at + i < size ? logits[at + i] : neg_inf;
    return vec::load(tail);
}

// Rounds to float; what overflows stays finite.
static inline float to_logit(double value) {
    if (value == static_cast<double>(neg_inf)) return neg_inf;
    if (value > -static_cast<double>(least_finite)) return -least_finite;
    return value < static_cast<double>(least_finite) ? least_finite : static_cast<float>(value);
}

// A logit surely below every x with (x - max) * scale >= exponent.
static inline float below_exponent(double exponent, double max, double scale) {
    const double distance = exponent / scale;
    const double margin = 1e-6 * (__builtin_fabs(max) + __builtin_fabs(distance)) + 1e-30;
    return to_logit(max + distance - margin);
}

struct MaxScan {
    float max;
    bool invalid;  // a NaN or +infinity was met
};

static inline MaxScan scan_max(const float* logits, std::int64_t size) {
    vec::F32 most = vec::splat(neg_inf);
    const vec::F32 inf = vec::splat(-neg_inf);
    unsigned valid = 0xff;
    for (std::int64_t at = 0; at < size; at += 8) {
        const vec::F32 x = load_padded(logits, at, size);
        valid &= vec::less(x, inf);
        most = vec::max(x, most);
    }
    float lanes[8];
    vec::store(lanes, most);
    float out = lanes[0];
    for (int i = 1; i < 8; ++i) out = lanes[i] > out ? lanes[i] : out;
    return {out, valid != 0xff};
}

// Index of the first logit equal to value, which is present.
static inline std::int64_t first_equal(const float* logits, std::int64_t size, float value) {
    const vec::F32 wanted = vec::splat(value);
    for (std::int64_t at = 0; at < size; at += 8) {
        const unsigned hits = vec::equal(load_padded(logits, at, size), wanted);
        if (hits) return at + __builtin_ctz(hits);
    }
    return 0;
}

// e^x for x <= 0, error below 1e-15 relative, 0 below -708: Taylor polynomial on [-ln 2 / 2, ln 2 / 2].
static inline vec::F64 exp_nonpositive(vec::F64 x) {
    constexpr double low = -708.0;
    const vec::F64 shift = vec::splat(0x1.8p52);
    const vec::F64 clamped = vec::max(x, vec::splat(low));
    const vec::F64 shifted = clamped * vec::splat(1.4426950408889634) + shift;
    const vec::F64 n = shifted - shift;
    const vec::F64 r = (clamped - n * vec::splat(0x1.62e42feep-1)) - n * vec::splat(0x1.a39ef35793c76p-33);
    vec::F64 sum = vec::splat(1.0 / 6227020800.0);
    constexpr double coefficients[] = {1.0 / 479001600.0,
                                       1.0 / 39916800.0,
                                       1.0 / 3628800.0,
                                       1.0 / 362880.0,
                                       1.0 / 40320.0,
                                       1.0 / 5040.0,
                                       1.0 / 720.0,
                                       1.0 / 120.0,
                                       1.0 / 24.0,
                                       1.0 / 6.0,
                                       0.5,
                                       1.0,
                                       1.0};
    for (const double c : coefficients) sum = sum * r + vec::splat(c);
    return vec::zero_below(sum * vec::exp2_of_shifted(shifted), x, low);
}

// Weight of each token is e^((logit - max) * scale): 1 for the largest.
static inline vec::F64 weight_at(const float* logits, std::int64_t at, std::int64_t size, float max, double scale) {
    const vec::F64 x = (vec::widen(load_padded(logits, at, size)) - vec::splat(static_cast<double>(max)));
    return exp_nonpositive(x * vec::splat(scale));
}

static inline double sum_lanes(vec::F64 sum) {
    double s[8];
    vec::store(s, sum);
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

// Sum of all weights, block by block.
static inline double total_weight(const float* logits, std::int64_t size, float max, double scale) {
    double total = 0.0;
    for (std::int64_t begin = 0; begin < size; begin += mass_block) {
        const std::int64_t end = begin + mass_block < size ? begin + mass_block : size;
        vec::F64 sum = vec::splat(0.0);
        for (std::int64_t at = begin; at < end; at += 8) sum = sum + weight_at(logits, at, end, max, scale);
        total += sum_lanes(sum);
    }
    return total;
}

static inline void store_weights(const float* logits, std::int64_t size, float max, double scale, double* weights) {
    std::int64_t at = 0;
    for (; at + 8 <= size; at += 8) vec::store(weights + at, weight_at(logits, at, size, max, scale));
    if (at < size) {
        double tail[8];
        vec::store(tail, weight_at(logits, at, size, max, scale));
        for (std::int64_t i = at; i < size; ++i) weights[i] = tail[i - at];
    }
}

// Writes ids and logits of the tokens with logit >= threshold, in order of id; returns how many. -infinity never
// counts.
static inline std::int64_t collect(const float* logits, std::int64_t size, float threshold, std::uint32_t* ids,
                                   float* values) {
    const vec::F32 at_least = vec::splat(threshold > least_finite ? threshold : least_finite);
    std::int64_t count = 0;
    for (std::int64_t at = 0; at < size; at += 8) {
        unsigned hits = ~vec::less(load_padded(logits, at, size), at_least) & 0xff;
        for (; hits; hits &= hits - 1) {
            const std::int64_t id = at + __builtin_ctz(hits);
            ids[count] = static_cast<std::uint32_t>(id);
            values[count++] = logits[id];
        }
    }
    return count;
}

}  // namespace penstock::PENSTOCK_ISA
