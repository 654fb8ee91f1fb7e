// The gated activations on sixteen lanes, as every op applies them.
#pragma once

#include "ops/model_ops.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// 1 - erf(x) for x >= 0, relative error below 2e-6: the Chebyshev fit of Press et al., Numerical Recipes, section 6.2.
static inline vec::F32x16 erfc_positive(vec::F32x16 x) {
    using vec::splat16;
    const vec::F32x16 t = splat16(1.0f) / vec::fma(splat16(0.5f), x, splat16(1.0f));
    constexpr float series[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    vec::F32x16 p = splat16(series[0]);
    for (int i = 1; i < 10; ++i) p = vec::fma(p, t, splat16(series[i]));
    return t * vec::exp(vec::fma(splat16(0.0f) - x, x, p));
}

// x · Phi(x), Phi the normal distribution's cumulative function
static inline vec::F32x16 gelu(vec::F32x16 x) {
    using vec::splat16;
    const vec::F32x16 tail = erfc_positive(vec::abs(x) * splat16(0.70710678118654752f)) * splat16(0.5f);
    const vec::F32x16 upper = vec::zero_below(splat16(1.0f) - tail, x, splat16(0.0f));
    const vec::F32x16 lower = tail - vec::zero_below(tail, x, splat16(0.0f));
    return x * (upper + lower);
}

// The tanh approximation of gelu: (1 + tanh y) / 2 is sigmoid(2 y).
static inline vec::F32x16 gelu_tanh(vec::F32x16 x) {
    using vec::splat16;
    const vec::F32x16 cubic = vec::fma(x * x, splat16(0.044715f), splat16(1.0f));
    return x * vec::sigmoid(splat16(1.5957691216057308f) * x * cubic);
}

// An activation of one value.
template <Activation activation>
static inline vec::F32x16 activated(vec::F32x16 x, [[maybe_unused]] float limit) {
    using vec::splat16;
    // max and min keep NaN in their second value
    if constexpr (activation == Activation::silu) return x * vec::sigmoid(x);
    if constexpr (activation == Activation::gelu) return gelu(x);
    if constexpr (activation == Activation::gelu_tanh) return gelu_tanh(x);
    if constexpr (activation == Activation::relu) return vec::max(splat16(0.0f), x);
    if constexpr (activation == Activation::relu2) {
        const vec::F32x16 positive = vec::max(splat16(0.0f), x);
        return positive * positive;
    }
    if constexpr (activation == Activation::clip) return vec::max(splat16(-limit), vec::min(splat16(limit), x));
    return x;
}

// out[i] = activation(x[i]) for i < count; out may be x.
template <Activation activation>
static inline void activated_row(const float* x, std::int64_t count, float limit, float* out) {
    for (std::int64_t i = 0; i < count; i += 16) {
        const std::int64_t n = count - i < 16 ? count - i : 16;
        vec::store_some(out + i, activated<activation>(vec::load_some(x + i, n), limit), n);
    }
}

static inline void activated_row(Activation activation, const float* x, std::int64_t count, float limit, float* out) {
    switch (activation) {
        case Activation::silu:
            return activated_row<Activation::silu>(x, count, limit, out);
        case Activation::gelu:
            return activated_row<Activation::gelu>(x, count, limit, out);
        case Activation::gelu_tanh:
            return activated_row<Activation::gelu_tanh>(x, count, limit, out);
        case Activation::relu:
            return activated_row<Activation::relu>(x, count, limit, out);
        case Activation::relu2:
            return activated_row<Activation::relu2>(x, count, limit, out);
        case Activation::clip:
            return activated_row<Activation::clip>(x, count, limit, out);
        case Activation::none:
        case Activation::swigluoai:
            break;  // nothing of one value
    }
}

// activation(gate) · up; for swigluoai g · sigmoid(alpha · g) · (u + 1) with g = min(gate, limit),
// u = clamp(up, ±limit).
template <Activation activation>
static inline vec::F32x16 gated(vec::F32x16 gate, vec::F32x16 up, float alpha, float limit) {
    using vec::splat16;
    if constexpr (activation == Activation::swigluoai) {
        const vec::F32x16 most = splat16(limit);
        // the value comes second: these keep NaN there
        const vec::F32x16 g = vec::min(most, gate), u = vec::max(splat16(-limit), vec::min(most, up));
        return g * vec::sigmoid(splat16(alpha) * g) * (u + splat16(1.0f));
    }
    return activated<activation>(gate, limit) * up;
}

// out[i] = activation(gate[i]) · up[i] for i < count; out may be gate or up.
template <Activation activation>
static inline void gated_row(const float* gate, const float* up, std::int64_t count, float alpha, float limit,
                             float* out) {
    std::int64_t at = 0;
    for (; at + 16 <= count; at += 16)
        vec::store(out + at, gated<activation>(vec::load16(gate + at), vec::load16(up + at), alpha, limit));
    if (const std::int64_t left = count - at; left > 0)
        vec::store(out + at, gated<activation>(vec::load16(gate + at, left), vec::load16(up + at, left), alpha, limit),
                   left);
}

static inline void gated_row(Activation activation, const float* gate, const float* up, std::int64_t count, float alpha,
                             float limit, float* out) {
    switch (activation) {
        case Activation::none:
            break;
        case Activation::silu:
            return gated_row<Activation::silu>(gate, up, count, alpha, limit, out);
        case Activation::gelu:
            return gated_row<Activation::gelu>(gate, up, count, alpha, limit, out);
        case Activation::gelu_tanh:
            return gated_row<Activation::gelu_tanh>(gate, up, count, alpha, limit, out);
        case Activation::swigluoai:
            return gated_row<Activation::swigluoai>(gate, up, count, alpha, limit, out);
        case Activation::relu:
            return gated_row<Activation::relu>(gate, up, count, alpha, limit, out);
        case Activation::relu2:
            return gated_row<Activation::relu2>(gate, up, count, alpha, limit, out);
        case Activation::clip:
            break;  // has no gated form
    }
}

}  // namespace penstock::PENSTOCK_ISA
