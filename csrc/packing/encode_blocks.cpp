// Encoders of the ggml formats with two levels of scales (K formats, IQ4). First every group of 16 or 32 values finds
// its own scale by weighted least squares; then the groups' scales are put on the grid the block can store, each group
// tries the neighbouring steps, and the block's common scale is solved for again, as long as the error falls.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ops/ops.h"
#include "packing/encode.h"
#include "packing/encode_fit.h"

namespace penstock::PENSTOCK_ISA {
namespace {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;

constexpr int block_values = 256;
constexpr int rounds = 3;  // of choosing the groups' steps and solving for the common scale

// The nearest IEEE half, ties to even; what is too large becomes the largest half.
u16 to_half(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7bffu);
    if (magnitude < 0x38800000u) {  // subnormal: the addition rounds at its last bit
        float low;
        std::memcpy(&low, &magnitude, 4);
        low += 0.5f;
        u32 rounded;
        std::memcpy(&rounded, &low, 4);
        return static_cast<u16>(sign | (rounded - 0x3f000000u));
    }
    const u32 odd = magnitude >> 13 & 1u;
    return static_cast<u16>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}

float from_half(u16 half) {
    const u32 sign = static_cast<u32>(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3ffu;
    float out;
    if (exponent == 0) {
        out = static_cast<float>(fraction) * 0x1p-24f;
        return sign ? -out : out;
    }
    const u32 bits = sign | (exponent + 112u) << 23 | fraction << 13;
    std::memcpy(&out, &bits, 4);
    return out;
}

void store_half(u8* at, float value) {
    const u16 half = to_half(value);
    at[0] = static_cast<u8>(half);
    at[1] = static_cast<u8>(half >> 8);
}

float halved(float value) { return from_half(to_half(value)); }

float reciprocal(float value) { return value != 0 ? 1 / value : 0; }

// ---- x ≈ common · step[group] · q --------------------------------------------------------------------------------

template <int Groups>
struct SymmetricBlock {
    float common = 0;
    float step[Groups];
    float q[block_values];
    float error = 0;  // less Σ w x²
};

// Error of one group at a scale, with q rounded for it.
template <int G, class Grid>
float group_error(const Grid& grid, const float* x, const float* w, float scale, float* q) {
    grid.template round<G>(x, reciprocal(scale), q);
    const float xq = fit::total<G>([&](int i) { return w[i] * x[i] * q[i]; });
    const float qq = fit::total<G>([&](int i) { return w[i] * q[i] * q[i]; });
    return scale * (scale * qq - 2 * xq);
}

template <int G, class Grid, int Groups>
void choose_steps(const Grid& grid, const fit::Integers& steps, const float* x, const float* w, const float* ideal,
                  SymmetricBlock<Groups>& block) {
    const float inverse = reciprocal(block.common);
    block.error = 0;
    for (int g = 0; g < Groups; ++g) {
        const float nearest = fit::nearest(std::min(std::max(ideal[g] * inverse, steps.lo), steps.hi));
        float best = 0, trial[G];
        block.step[g] = 0;
        grid.template round<G>(x + g * G, 0, block.q + g * G);
        for (float step = std::max(nearest - 1, steps.lo); step <= std::min(nearest + 1, steps.hi); ++step) {
            const float error = group_error<G>(grid, x + g * G, w + g * G, block.common * step, trial);
            if (error >= best) continue;
            best = error;
            block.step[g] = step;
            std::copy(trial, trial + G, block.q + g * G);
        }
        block.error += best;
    }
}

template <int G, class Grid>
SymmetricBlock<block_values / G> symmetric_block(const Grid& grid, const fit::Integers& steps, const fit::Range& range,
                                                 const float* x, const float* w) {
    constexpr int groups = block_values / G;
    float ideal[groups], weight[groups], unused[groups];
    SymmetricBlock<groups> best{}, trial{};
    for (int g = 0; g < groups; ++g) {
        const fit::Scaled found = fit::symmetric<G>(grid, x + g * G, w + g * G, range, best.q + g * G);
        ideal[g] = found.scale;
        weight[g] = found.weight;
    }
    best.common = halved(fit::symmetric<groups>(steps, ideal, weight, {0.85f, 1.1f, 26, true}, unused).scale);
    choose_steps<G>(grid, steps, x, w, ideal, best);
    for (int round = 1; round < rounds; ++round) {
        float xq = 0, qq = 0;
        for (int g = 0; g < groups; ++g) {
            const float s = best.step[g];
            const float *xs = x + g * G, *ws = w + g * G, *qs = best.q + g * G;
            xq += s * fit::total<G>([&](int i) { return ws[i] * xs[i] * qs[i]; });
            qq += s * s * fit::total<G>([&](int i) { return ws[i] * qs[i] * qs[i]; });
        }
        trial.common = qq > 0 ? halved(xq / qq) : 0;
        if (trial.common == best.common) break;
        for (int g = 0; g < groups; ++g) ideal[g] = best.step[g] * best.common;
        choose_steps<G>(grid, steps, x, w, ideal, trial);
        if (trial.error >= best.error) break;
        best = trial;
    }
    return best;
}

// ---- x ≈ common · step[group] · q - common_minimum · minimum_step[group] ------------------------------------------

template <int Groups>
struct AffineBlock {
    float common = 0, common_minimum = 0;
    float step[Groups], minimum_step[Groups];
    float q[block_values];
    float error = 0;  // less Σ w x²
};

template <int G>
float shifted_error(const float* x, const float* w, float scale, float minimum, float most, float* q) {
    const float inverse = reciprocal(scale);
    for (int i = 0; i < G; ++i) q[i] = fit::nearest(std::min(std::max((x[i] + minimum) * inverse, 0.0f), most));
    return fit::total<G>([&](int i) {
        const float off = x[i] - (scale * q[i] - minimum);
        return w[i] * off * off;
    });
}

template <int G, int Groups>
void choose_steps(float most, float most_step, const float* x, const float* w, const float* scale, const float* minimum,
                  AffineBlock<Groups>& block) {
    const float inverse = reciprocal(block.common), inverse_minimum = reciprocal(block.common_minimum);
    block.error = 0;
    for (int g = 0; g < Groups; ++g) {
        const float s = fit::nearest(std::min(std::max(scale[g] * inverse, 0.0f), most_step));
        const float m = fit::nearest(std::min(std::max(minimum[g] * inverse_minimum, 0.0f), most_step));
        float best = 0, trial[G];
        bool any = false;
        for (float ds = -1; ds <= 1; ++ds)
            for (float dm = -1; dm <= 1; ++dm) {
                if (s + ds < 0 || s + ds > most_step || m + dm < 0 || m + dm > most_step) continue;
                const float error = shifted_error<G>(x + g * G, w + g * G, block.common * (s + ds),
                                                     block.common_minimum * (m + dm), most, trial);
                if (any && error >= best) continue;
                any = true;
                best = error;
                block.step[g] = s + ds;
                block.minimum_step[g] = m + dm;
                std::copy(trial, trial + G, block.q + g * G);
            }
        block.error += best;
    }
}

// Solves for the common scale and minimum, all steps and q given; false if there is nothing to gain.
template <int G, int Groups>
bool solve_common(const float* x, const float* w, const AffineBlock<Groups>& from, AffineBlock<Groups>& to) {
    double aa = 0, ab = 0, bb = 0, xa = 0, xb = 0;
    for (int g = 0; g < Groups; ++g) {
        const double s = from.step[g], m = from.minimum_step[g];
        const float *xs = x + g * G, *ws = w + g * G, *qs = from.q + g * G;
        aa += s * s * fit::total<G>([&](int i) { return ws[i] * qs[i] * qs[i]; });
        ab += s * m * fit::total<G>([&](int i) { return ws[i] * qs[i]; });
        bb += m * m * fit::total<G>([&](int i) { return ws[i]; });
        xa += s * fit::total<G>([&](int i) { return ws[i] * xs[i] * qs[i]; });
        xb += m * fit::total<G>([&](int i) { return ws[i] * xs[i]; });
    }
    const double determinant = aa * bb - ab * ab;
    if (determinant > 1e-9 * aa * bb) {
        to.common = halved(static_cast<float>((xa * bb - xb * ab) / determinant));
        to.common_minimum = halved(static_cast<float>((xa * ab - xb * aa) / determinant));
    } else {
        to.common = aa > 0 ? halved(static_cast<float>(xa / aa)) : 0;
        to.common_minimum = from.common_minimum;
    }
    return to.common > 0 && to.common_minimum >= 0 &&
           (to.common != from.common || to.common_minimum != from.common_minimum);
}

template <int G>
AffineBlock<block_values / G> affine_block(float most, float most_step, const fit::Range& range, const float* x,
                                           const float* w) {
    constexpr int groups = block_values / G;
    float scale[groups], minimum[groups], weight[groups], weight_sum[groups], unused[groups];
    for (int g = 0; g < groups; ++g) {
        const fit::Shifted found = fit::affine<G>(x + g * G, w + g * G, most, range);
        scale[g] = found.scale;
        minimum[g] = found.minimum;
        weight[g] = found.weight;
        weight_sum[g] = fit::total<G>([&](int i) { return w[g * G + i]; });
    }
    const fit::Integers steps{0, most_step};
    AffineBlock<groups> best{}, trial{};
    const auto common = [&](const float* values, const float* weights) {
        const float peak = *std::max_element(values, values + groups);
        if (!(peak > 0)) return 0.0f;
        fit::Scaled found;
        for (int k = 0; k <= 24; ++k) {
            const float factor = most_step * (0.8f + 0.0125f * static_cast<float>(k));
            const fit::Scaled tried = fit::score<groups>(steps, values, weights, factor / peak, unused);
            if (tried.gain > found.gain) found = tried;
        }
        return halved(found.scale);
    };
    best.common = common(scale, weight);
    best.common_minimum = common(minimum, weight_sum);
    choose_steps<G>(most, most_step, x, w, scale, minimum, best);
    for (int round = 1; round < rounds; ++round) {
        if (!solve_common<G>(x, w, best, trial)) break;
        for (int g = 0; g < groups; ++g) {
            scale[g] = best.step[g] * best.common;
            minimum[g] = best.minimum_step[g] * best.common_minimum;
        }
        choose_steps<G>(most, most_step, x, w, scale, minimum, trial);
        if (trial.error >= best.error) break;
        best = trial;
    }
    return best;
}

// ---- the formats --------------------------------------------------------------------------------------------------

int whole(float value) { return static_cast<int>(value); }

void encode_q2_k(const float* x, const float* w, u8* out) {
    const auto block = affine_block<16>(3, 15, {0.6f, 1.3f, 16, false}, x, w);
    for (int g = 0; g < 16; ++g) out[g] = static_cast<u8>(whole(block.step[g]) | whole(block.minimum_step[g]) << 4);
    for (int run = 0; run < 2; ++run)
        for (int i = 0; i < 32; ++i) {
            int packed = 0;
            for (int part = 0; part < 4; ++part) packed |= whole(block.q[run * 128 + part * 32 + i]) << 2 * part;
            out[16 + run * 32 + i] = static_cast<u8>(packed);
        }
    store_half(out + 80, block.common);
    store_half(out + 82, block.common_minimum);
}

void encode_q3_k(const float* x, const float* w, u8* out) {
    const auto block = symmetric_block<16>(fit::Integers{-4, 3}, {-32, 31}, {0.6f, 1.3f, 22, true}, x, w);
    std::memset(out, 0, 110);
    for (int i = 0; i < block_values; ++i) {
        const int q = whole(block.q[i]) + 4;
        out[i % 32] = static_cast<u8>(out[i % 32] | (q >> 2) << (i / 32));
        u8& low = out[32 + i / 128 * 32 + i % 32];
        low = static_cast<u8>(low | (q & 3) << (i % 128 / 32 * 2));
    }
    for (int g = 0; g < 16; ++g) {
        const int step = whole(block.step[g]) + 32;
        u8 &low = out[96 + g % 8], &high = out[104 + g % 4];
        low = static_cast<u8>(low | (step & 15) << (g / 8 * 4));
        high = static_cast<u8>(high | (step >> 4) << (g / 4 * 2));
    }
    store_half(out + 108, block.common);
}

// Common scale and minimum, then eight steps of each in six bits.
void store_pairs(const AffineBlock<8>& block, u8* out) {
    store_half(out, block.common);
    store_half(out + 2, block.common_minimum);
    for (int g = 0; g < 4; ++g) {
        const int s = whole(block.step[g]), m = whole(block.minimum_step[g]);
        const int high_s = whole(block.step[g + 4]), high_m = whole(block.minimum_step[g + 4]);
        out[4 + g] = static_cast<u8>(s | (high_s >> 4) << 6);
        out[8 + g] = static_cast<u8>(m | (high_m >> 4) << 6);
        out[12 + g] = static_cast<u8>((high_s & 15) | (high_m & 15) << 4);
    }
}

void encode_q4_k(const float* x, const float* w, u8* out) {
    const auto block = affine_block<32>(15, 63, {0.8f, 1.1f, 16, false}, x, w);
    store_pairs(block, out);
    for (int i = 0; i < 128; ++i) {
        const float* q = block.q + i / 32 * 64 + i % 32;
        out[16 + i] = static_cast<u8>(whole(q[0]) | whole(q[32]) << 4);
    }
}

void encode_q5_k(const float* x, const float* w, u8* out) {
    const auto block = affine_block<32>(31, 63, {0.85f, 1.05f, 16, false}, x, w);
    store_pairs(block, out);
    std::memset(out + 16, 0, 32);
    for (int i = 0; i < block_values; ++i)
        out[16 + i % 32] = static_cast<u8>(out[16 + i % 32] | (whole(block.q[i]) >> 4) << (i / 32));
    for (int i = 0; i < 128; ++i) {
        const float* q = block.q + i / 32 * 64 + i % 32;
        out[48 + i] = static_cast<u8>((whole(q[0]) & 15) | (whole(q[32]) & 15) << 4);
    }
}

void encode_q6_k(const float* x, const float* w, u8* out) {
    const auto block = symmetric_block<16>(fit::Integers{-32, 31}, {-128, 127}, {0.9f, 1.06f, 20, false}, x, w);
    std::memset(out, 0, 192);
    for (int i = 0; i < block_values; ++i) {
        const int q = whole(block.q[i]) + 32;
        u8 &low = out[i / 128 * 64 + i % 64], &high = out[128 + i / 128 * 32 + i % 32];
        low = static_cast<u8>(low | (q & 15) << (i % 128 / 64 * 4));
        high = static_cast<u8>(high | (q >> 4) << (i % 128 / 32 * 2));
    }
    for (int g = 0; g < 16; ++g) out[192 + g] = static_cast<u8>(static_cast<std::int8_t>(whole(block.step[g])));
    store_half(out + 208, block.common);
}

int iq4_index(float value) {
    return static_cast<int>(std::lower_bound(fit::iq4_values, fit::iq4_values + 15, value) - fit::iq4_values);
}

void store_iq4(const float* q, u8* out) {
    for (int i = 0; i < 16; ++i) out[i] = static_cast<u8>(iq4_index(q[i]) | iq4_index(q[i + 16]) << 4);
}

constexpr fit::Range iq4_range{0.7f, 1.15f, 20, true};

void encode_iq4_nl(const float* x, const float* w, u8* out) {
    float q[32];
    const fit::Iq4 grid;
    const float scale = halved(fit::symmetric<32>(grid, x, w, iq4_range, q).scale);
    store_half(out, scale);
    grid.round<32>(x, reciprocal(scale), q);
    store_iq4(q, out + 2);
}

void encode_iq4_xs(const float* x, const float* w, u8* out) {
    const auto block = symmetric_block<32>(fit::Iq4{}, {-32, 31}, iq4_range, x, w);
    store_half(out, block.common);
    std::memset(out + 2, 0, 6);
    for (int g = 0; g < 8; ++g) {
        const int step = whole(block.step[g]) + 32;
        out[2 + g / 4] = static_cast<u8>(out[2 + g / 4] | (step >> 4) << (g % 4 * 2));
        out[4 + g / 2] = static_cast<u8>(out[4 + g / 2] | (step & 15) << (g % 2 * 4));
        store_iq4(block.q + g * 32, out + 8 + g * 16);
    }
}

using Encoder = void (*)(const float* x, const float* w, u8* out);

Encoder encoder_of(BlockFormat format) {
    switch (format) {
        case BlockFormat::q2_k:
            return encode_q2_k;
        case BlockFormat::q3_k:
            return encode_q3_k;
        case BlockFormat::q4_k:
            return encode_q4_k;
        case BlockFormat::q5_k:
            return encode_q5_k;
        case BlockFormat::q6_k:
            return encode_q6_k;
        case BlockFormat::iq4_nl:
            return encode_iq4_nl;
        case BlockFormat::iq4_xs:
            return encode_iq4_xs;
        default:
            return nullptr;
    }
}

// What each squared error of a block weighs. Least squares alone leaves weights too small on average, which adds up
// over layers; errors of large weights therefore count for more, by the root of x² + its mean.
void weigh(const float* x, const float* importance, std::int64_t count, float* w) {
    float mean = 0;
    for (std::int64_t i = 0; i < count; ++i) mean += x[i] * x[i];
    mean /= static_cast<float>(count);
    for (std::int64_t i = 0; i < count; ++i) w[i] = (importance ? importance[i] : 1.0f) * std::sqrt(mean + x[i] * x[i]);
}

}  // namespace

void encode(BlockFormat format, const float* values, const float* importance, std::int64_t num_blocks, u8* out) {
    const Encoder encoder = encoder_of(format);
    const BlockLayout& layout = block_layout(format);
    float w[block_values];
    for (std::int64_t b = 0; encoder && b < num_blocks; ++b) {
        const float* x = values + b * layout.elements;
        weigh(x, importance ? importance + b * layout.elements : nullptr, layout.elements, w);
        encoder(x, w, out + b * layout.bytes);
    }
}

}  // namespace penstock::PENSTOCK_ISA
