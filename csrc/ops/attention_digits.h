// The products of attention over 8-bit integers, as exact sums of integers: queries, and weights times the values'
// scales, become whole numbers of 15 bits, two signed bytes each, or one number of 16 bits where bytes are not
// multiplied four at a time. Codes are taken plus 128, which makes them unsigned; what that adds is known from the sum
// of the other factor.
#pragma once

#include <algorithm>

#include "ops/attention_blocks.h"
#include "vec/bytes.h"

namespace penstock::PENSTOCK_ISA {

constexpr std::int64_t digit_bytes = 2 * kv_tile;  // of 16 numbers, which are whole, or the upper bytes, then the lower

// The greatest number of which `count` products with a code fit into 32 bits.
inline float most_digits(std::int64_t count) {
    return static_cast<float>(std::min<std::int64_t>(127 * 256 + 127, (1 << 24) / count - 256));
}

// Numbers and what brings them back: value ≈ step · number.
struct Digits {
    // `odd` is zero, or NaN where a value is not finite, which makes the step NaN.
    Digits(float greatest, float odd, float most)
        : step(greatest / most + odd),
          inverse(vec::splat16(greatest > 0.0f ? most / greatest : 0.0f)),
          low(vec::splat16(-most)),
          high(vec::splat16(most)) {}
    void store(std::int8_t* to, vec::F32x16 value) {
        // NaN becomes low
        const vec::F32x16 number = vec::min(vec::max(vec::round(value * inverse), low), high);
        sums = sums + number;
#ifdef PENSTOCK_WHOLE_NUMBERS
        vec::store16_i16(to, number);
#else
        const vec::F32x16 upper = vec::round(vec::fma(number, vec::splat16(0x1p-8f), vec::splat16(0x1p-10f)));
        vec::store16_i8(to, upper);
        vec::store16_i8(to + kv_tile, vec::fma(upper, vec::splat16(-256.0f), number));
#endif
    }
    std::int32_t sum() const { return static_cast<std::int32_t>(vec::sum(sums)); }
    float step;
    vec::F32x16 inverse, low, high, sums = vec::splat16(0.0f);
};

// Rows of numbers `stride` bytes apart, their steps and sums.
struct DigitBlock {
    const std::int8_t* at;
    std::int64_t stride, count;
    const float* step;
    const std::int32_t* sum;
};

// Products with groups [from, to) of 16 codes each: line(group, j, x) are the fours that vector x meets the group's
// four numbers j with; ask(group) is called once a group, done(query, x, sum) at last.
#ifdef PENSTOCK_WHOLE_NUMBERS
// Two queries and one vector at a time, whose sums fit into registers.
template <int queries, int vectors, class Line, class Ask, class Done>
inline void products_block(const DigitBlock& q, std::int64_t from, std::int64_t to, Line&& line, Ask&& ask,
                           Done&& done) {
    for (int x = 0; x < vectors; ++x)
        for (int first = 0; first < queries; first += 2) {
            constexpr int most = queries < 2 ? 1 : 2;
            const int begin = first + most > queries ? queries - most : first;  // one of three has a second turn
            vec::NumberSum sum[most];
            for (std::int64_t g = from; g < to; ++g) {
                if (x == 0 && first == 0) ask(g);
#pragma GCC unroll 4
                for (int j = 0; j < 4; ++j) {
                    const vec::WideCodes codes(line(g, j, x));
#pragma GCC unroll 2
                    for (int i = 0; i < most; ++i)
                        sum[i].add(codes, q.at + (begin + i) * q.stride + g * digit_bytes + 8 * j);
                }
            }
            for (int i = begin == first ? 0 : 1; i < most; ++i)
                done(begin + i, x, sum[i].total(-128 * q.sum[begin + i]));
        }
}
#else
template <int queries, int vectors, class Line, class Ask, class Done>
inline void products_block(const DigitBlock& q, std::int64_t from, std::int64_t to, Line&& line, Ask&& ask,
                           Done&& done) {
    vec::I32x16 sum[queries][vectors];
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x) sum[i][x] = vec::splat_i32(0);
    for (int lower = 0; lower < 2; ++lower) {
        if (lower)
#pragma GCC unroll 8
            for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
                for (int x = 0; x < vectors; ++x) sum[i][x] = vec::shift_add(sum[i][x], -128 * q.sum[i]);
        for (std::int64_t g = from; g < to; ++g) {
            if (!lower) ask(g);
            const std::int8_t* const digits = q.at + g * digit_bytes + lower * kv_tile;
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                vec::Bytes64 codes[vectors];
#pragma GCC unroll 8
                for (int x = 0; x < vectors; ++x) codes[x] = vec::load64(line(g, j, x));
#pragma GCC unroll 8
                for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
                    for (int x = 0; x < vectors; ++x)
                        sum[i][x] = vec::dot4(sum[i][x], codes[x], digits + i * q.stride + 4 * j);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < queries; ++i)
#pragma GCC unroll 8
        for (int x = 0; x < vectors; ++x) done(i, x, vec::to_float(sum[i][x]));
}
#endif

// As score_tiles(), of `groups` times 16 elements; of each tile ahead as many bytes are asked for as are told.
inline void score_digits(const DigitBlock& q, std::int64_t groups, const std::uint8_t* const* keys,
                         const std::byte* const* ahead, std::int64_t ahead_bytes, std::int64_t tiles, float* out,
                         std::int64_t out_stride) {
    in_tile_runs(q.count, tiles, [&](auto queries, auto each, std::int64_t t) {
        const auto line = [&](std::int64_t g, int j, int x) { return keys[t + x] + (4 * g + j) * 64; };
        const auto ask = [&](std::int64_t g) {
            if (!ahead) return;
            for (int x = 0; x < each.value; ++x) prefetch_part(ahead[t + x], ahead_bytes, g, groups);
        };
        products_block<queries.value, each.value>(q, 0, groups, line, ask, [&](int i, int x, vec::F32x16 sum) {
            vec::store(out + i * out_stride + (t + x) * kv_tile, sum * vec::splat16(q.step[i]));
        });
    });
}

// As sum_values(), of tiles [from, to), rows of `columns` values.
inline void sum_digits(const DigitBlock& weights, std::int64_t from, std::int64_t to, const std::uint8_t* const* values,
                       std::int64_t columns, const Ahead& ahead, std::int64_t column, std::int64_t vectors, float* out,
                       std::int64_t out_stride, const Merging& merging) {
    in_vector_runs(weights.count, vectors, [&](auto queries, auto each, std::int64_t first) {
        const auto line = [&](std::int64_t t, int j, int x) {
            return values[t] + (j * columns + column + (first + x) * 16) * 4;
        };
        const auto ask = [&](std::int64_t t) { ahead.ask(t, first, first + each.value, vectors); };
        products_block<queries.value, each.value>(weights, from, to, line, ask, [&](int i, int x, vec::F32x16 sum) {
            merge_sum(sum * vec::splat16(weights.step[i]), vec::splat16(merging.before[i]),
                      vec::splat16(merging.now[i]), out + i * out_stride + (first + x) * 16);
        });
    });
}

}  // namespace penstock::PENSTOCK_ISA
