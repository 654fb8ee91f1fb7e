// Ops that treat every element, or every row, by itself.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/activation.h"
#include "ops/row_chunk.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// out[i] = function(i's values); the last lanes are loaded and stored as far as they exist.
template <class F>
inline void each(std::int64_t count, F&& function) {
    std::int64_t at = 0;
    for (; at + 16 <= count; at += 16) function(at, 16);
    if (at < count) function(at, count - at);
}

}  // namespace

void gate_up(const GateUpArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const float* const gate = args.gate_up + t * 2 * args.size;
            gated_row(args.activation, gate, gate + args.size, args.size, args.alpha, args.limit,
                      args.out + t * args.size);
        }
    });
}

void activate(const ActivateArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t from = begin * args.size;
        activated_row(args.activation, args.x + from, (end - begin) * args.size, args.limit, args.out + from);
    });
}

void add(const AddArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t from = begin * args.size;
        const auto sum = [&](std::int64_t at, std::int64_t other, std::int64_t n) {
            vec::store_some(args.out + at, vec::load_some(args.a + at, n) + vec::load_some(args.b + other, n), n);
        };
        if (!args.vector) return each((end - begin) * args.size, [&](auto i, auto n) { sum(from + i, from + i, n); });
        for (std::int64_t row = begin; row < end; ++row)
            each(args.size, [&](auto i, auto n) { sum(row * args.size + i, i, n); });
    });
}

void sigmoid_gate(const SigmoidGateArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t from = begin * args.size;
        each((end - begin) * args.size, [&](std::int64_t i, std::int64_t n) {
            const vec::F32x16 gate = vec::sigmoid(vec::load_some(args.gate + from + i, n));
            vec::store_some(args.out + from + i, vec::load_some(args.x + from + i, n) * gate, n);
        });
    });
}

void soft_cap(const SoftCapArgs& args, Worker& worker) {
    const vec::F32x16 cap = vec::splat16(args.cap);
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t from = begin * args.size;
        each((end - begin) * args.size, [&](std::int64_t i, std::int64_t n) {
            vec::store_some(args.out + from + i, cap * vec::tanh(vec::load_some(args.x + from + i, n) / cap), n);
        });
    });
}

void scale_rows(const ScaleRowsArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const vec::F32x16 factor = vec::splat16(args.factors[t]);
            const std::int64_t row = t * args.size;
            each(args.size, [&](std::int64_t i, std::int64_t n) {
                vec::store_some(args.out + row + i, vec::load_some(args.x + row + i, n) * factor, n);
            });
        }
    });
}

void multiply(const MultiplyArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const float* const y = args.y.at(t);
            const std::int64_t row = t * args.size;
            each(args.size, [&](std::int64_t i, std::int64_t n) {
                vec::store_some(args.out + row + i, vec::load_some(args.x + row + i, n) * vec::load_some(y + i, n), n);
            });
        }
    });
}

void weighted_sum(const WeightedSumArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const float* const weights = args.weights.at(t);
            const std::int64_t row = t * args.size;
            each(args.size, [&](std::int64_t i, std::int64_t n) {
                vec::F32x16 sum = vec::load_some(args.base + row + i, n);
                for (int k = 0; k < args.count; ++k)
                    sum = vec::fma(vec::splat16(weights[k]), vec::load_some(args.x[k] + row + i, n), sum);
                vec::store_some(args.out + row + i, sum, n);
            });
        }
    });
}

void position_scales(const PositionScalesArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(16), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            const float place = static_cast<float>(args.positions[t] + args.offset);
            args.out[t] = 1.0f + args.weight * std::log1p(std::floor(place / args.length));
        }
    });
}

void inject(const InjectArgs& args, Worker& worker) {
    if (args.count == 0) return;
    worker.share(args.count, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r) {
            float* const to = args.x + args.rows[r] * args.size;
            const float* const from = args.values + r * args.size;
            if (!args.adds)
                std::copy_n(from, args.size, to);
            else
                each(args.size, [&](std::int64_t i, std::int64_t n) {
                    vec::store_some(to + i, vec::load_some(to + i, n) + vec::load_some(from + i, n), n);
                });
        }
    });
}

void take_rows(const TakeRowsArgs& args, Worker& worker) {
    worker.share(args.rows, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r)
            std::memcpy(args.out + r * args.size, args.x + args.index[r] * args.size,
                        static_cast<std::size_t>(args.size) * sizeof(float));
    });
}

}  // namespace penstock::PENSTOCK_ISA
