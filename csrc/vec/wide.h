// Sixteen float lanes and their conversions, the same to the bit on every instruction set. A multiply-add written fma()
// rounds once everywhere.
#pragma once

#include PENSTOCK_WIDE_HEADER

namespace penstock::PENSTOCK_ISA::vec {

// The first `count` (1 to 16) values and zeros; the first `count` lanes.
static inline F32x16 load_some(const float* from, std::int64_t count) {
    return count == 16 ? load16(from) : load16(from, count);
}
static inline void store_some(float* to, F32x16 a, std::int64_t count) {
    count == 16 ? store(to, a) : store(to, a, count);
}

// One bfloat16 in all lanes.
static inline F32x16 splat16_bf16(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, 4);
    return splat16(value);
}

// e^x for x <= 88; 0 below -87.3 (no subnormal results). Cephes' expf: argument reduction by ln 2 in two parts, a
// polynomial of degree 5 (relative error below 2e-7).
static inline F32x16 exp(F32x16 x) {
    const F32x16 low = splat16(-87.33654f);
    const F32x16 inside = max(x, low);
    const F32x16 n = round(inside * splat16(1.44269504088896341f));
    F32x16 r = fma(n, splat16(-0.693359375f), inside);
    r = fma(n, splat16(2.12194440e-4f), r);
    F32x16 p = splat16(1.9875691500e-4f);
    p = fma(p, r, splat16(1.3981999507e-3f));
    p = fma(p, r, splat16(8.3334519073e-3f));
    p = fma(p, r, splat16(4.1665795894e-2f));
    p = fma(p, r, splat16(1.6666665459e-1f));
    p = fma(p, r, splat16(5.0000001201e-1f));
    p = fma(p * r, r, r) + splat16(1.0f);
    return zero_below(scale_by_power(p, n), x, low);
}

// 1 / (1 + e^-x)
static inline F32x16 sigmoid(F32x16 x) {
    const F32x16 one = splat16(1.0f);
    return one / (one + exp(min(splat16(0.0f) - x, splat16(88.0f))));
}

// Cephes' tanhf: a polynomial below 0.625, 1 - 2 / (e^2x + 1) above.
static inline F32x16 tanh(F32x16 x) {
    const F32x16 one = splat16(1.0f), square = x * x, size = abs(x), split = splat16(0.625f);
    const F32x16 large = one - splat16(2.0f) / (one + exp(min(x + x, splat16(88.0f))));
    F32x16 p = splat16(-5.70498872745e-3f);
    p = fma(p, square, splat16(2.06390887954e-2f));
    p = fma(p, square, splat16(-5.37397155531e-2f));
    p = fma(p, square, splat16(1.33314422036e-1f));
    p = fma(p, square, splat16(-3.33332819422e-1f));
    p = fma(p * square, x, x);
    return zero_below(large, size, split) + (p - zero_below(p, size, split));
}

// To the nearest e4m3 (ties to even) of magnitude 448 at most. A half of 2^-8 times the value has the same bits, seven
// further up.
static inline void store16_e4m3(std::uint8_t* to, F32x16 a) {
    const F32x16 end = splat16(448.0f), least = splat16(0x1p-6f);
    const F32x16 x = max(splat16(-448.0f), min(end, a)), size = abs(x);
    const F32x16 shifted = x * splat16(1048577.0f);
    const F32x16 normal = shifted - (shifted - x);  // the upper four bits
    const F32x16 tiny = round(x * splat16(512.0f)) * splat16(0x1p-9f);
    const F32x16 rounded = zero_below(normal, size, least) + (tiny - zero_below(tiny, size, least));
    std::uint16_t half[16];
    store16_f16(half, rounded * splat16(0x1p-8f));
    for (int i = 0; i < 16; ++i) to[i] = static_cast<std::uint8_t>((half[i] >> 8 & 0x80) | (half[i] >> 7 & 0x7f));
}

}  // namespace penstock::PENSTOCK_ISA::vec
