// Causal depthwise convolution over a few tokens. A channel of a row is one chain of tokens in absolute order.
#include <algorithm>

#include "ops/model_ops.h"
#include "ops/row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::int64_t block = 64;  // channels of an item

// All tokens of a row, for `n` channels from `channel` on.
template <int taps>
void convolve(const ShortConvArgs& args, std::int64_t row, std::int64_t channel, std::int64_t n) {
    const auto at = [&](std::int64_t slot) { return args.state + slot * (taps - 1) * args.channels + channel; };
    const std::int64_t own = args.rows.slot[row], end = args.rows.query_start[row + 1];
    const float* const state = at(own);
    const bool fresh = args.rows.fresh(row);
    vec::F32x16 past[taps - 1], weight[taps];
    for (int j = 0; j < taps; ++j) weight[j] = vec::load_some(args.weight + j * args.channels + channel, n);
    for (int j = 0; j < taps - 1; ++j)
        past[j] = fresh ? vec::splat16(0.0f) : vec::load_some(state + j * args.channels, n);
    const vec::F32x16 bias = args.bias ? vec::load_some(args.bias + channel, n) : vec::splat16(0.0f);
    const auto keep = [&](float* to) {
        for (int j = 0; j < taps - 1; ++j) vec::store_some(to + j * args.channels, past[j], n);
    };
    for (std::int64_t t = args.rows.query_start[row]; t < end; ++t) {
        vec::F32x16 now = vec::load_some(args.x.at(t) + channel, n);
        if (args.before.data) now = now * vec::load_some(args.before.at(t) + channel, n);
        vec::F32x16 sum = bias;
        for (int j = 0; j < taps - 1; ++j) sum = vec::fma(weight[j], past[j], sum);
        sum = vec::fma(weight[taps - 1], now, sum);
        if (args.silu) sum = sum * vec::sigmoid(sum);
        if (args.after.data) sum = sum * vec::load_some(args.after.at(t) + channel, n);
        vec::store_some(args.out + t * args.channels + channel, sum, n);
        for (int j = 0; j + 2 < taps; ++j) past[j] = past[j + 1];
        past[taps - 2] = now;
        if (args.rows.after && (t + 1 == end || args.rows.after[t] != args.rows.after[t + 1]))
            keep(at(args.rows.after[t]));
    }
    if (!args.rows.after) keep(at(own));
}

template <int taps>
void convolve_rows(const ShortConvArgs& args, Worker& worker) {
    const std::int64_t blocks = (args.channels + block - 1) / block, rows = args.rows.rows;
    const std::int64_t tokens = rows > 0 ? args.rows.query_start[rows] / rows + 1 : 1;
    worker.share(rows * blocks, row_chunk(tokens * block), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t first = item % blocks * block, last = std::min(first + block, args.channels);
            for (std::int64_t c = first; c < last; c += 16)
                convolve<taps>(args, item / blocks, c, std::min<std::int64_t>(16, last - c));
        }
    });
}

}  // namespace

void short_conv(const ShortConvArgs& args, Worker& worker) {
    switch (args.taps) {
        case 2:
            return convolve_rows<2>(args, worker);
        case 3:
            return convolve_rows<3>(args, worker);
        case 4:
            return convolve_rows<4>(args, worker);
    }
}

}  // namespace penstock::PENSTOCK_ISA
