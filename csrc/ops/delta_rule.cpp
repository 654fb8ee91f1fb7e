// The gated delta rule, token by token: lanes are value elements of a head, which never meet.
#include <cmath>

#include "ops/state_lanes.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// x divided by its length, times scale
void unit(const float* x, std::int64_t size, float eps, float scale, float* out) {
    vec::F32x16 squares = vec::splat16(0.0f);
    for (std::int64_t i = 0; i < size; i += 16) {
        const vec::F32x16 part = vec::load_some(x + i, std::min<std::int64_t>(16, size - i));
        squares = vec::fma(part, part, squares);
    }
    const vec::F32x16 factor = vec::splat16(scale / std::sqrt(vec::sum(squares) + eps));
    for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, size - i);
        vec::store_some(out + i, vec::load_some(x + i, n) * factor, n);
    }
}

template <int vectors>
void delta(const DeltaRuleArgs& args, std::int64_t row, std::int64_t head, std::int64_t first, std::int64_t n) {
    using vec::F32x16, vec::splat16;
    const std::int64_t dim = args.key_dim, width = args.value_dim, at = head * width + first;
    const std::int64_t key_head = args.tiled ? head % args.key_heads : head / (args.heads / args.key_heads);
    const std::int64_t key_at = key_head * dim;
    const std::int64_t lanes = vectors > 1 ? 16 * vectors : n, slot_size = args.heads * dim * width;
    float* const pool = args.state + head * dim * width + first;
    float* state = pool + args.rows.slot[row] * slot_size;
    if (args.rows.fresh(row)) clear_lanes(state, dim, width, lanes);
    float* const q = reinterpret_cast<float*>(thread_memory(3, static_cast<std::size_t>(2 * dim) * sizeof(float)));
    float* const k = q + dim;
    for (std::int64_t t = args.rows.query_start[row]; t < args.rows.query_start[row + 1]; ++t) {
        state = lanes_at(args.rows, t, pool, dim, width, lanes, slot_size, state);
        unit(args.q.at(t) + key_at, dim, args.eps, 1.0f / std::sqrt(static_cast<float>(dim)), q);
        unit(args.k.at(t) + key_at, dim, args.eps, 1.0f, k);
        const F32x16 step = splat16(args.step.at(t)[head] + (args.bias ? args.bias[head] : 0.0f));
        const F32x16 decay = vec::exp(splat16(args.a[head]) * softplus(step));
        const F32x16 beta = vec::sigmoid(splat16(args.beta.at(t)[head]));
        F32x16 sums[vectors], change[vectors];
        for (int v = 0; v < vectors; ++v) sums[v] = splat16(0.0f);
        for (std::int64_t i = 0; i < dim; ++i)
            for (int v = 0; v < vectors; ++v)
                sums[v] = vec::fma(splat16(k[i]), load_lanes<vectors>(state + i * width + 16 * v, n) * decay, sums[v]);
        for (int v = 0; v < vectors; ++v) {
            change[v] = (load_lanes<vectors>(args.v.at(t) + at + 16 * v, n) - sums[v]) * beta;
            sums[v] = splat16(0.0f);
        }
        for (std::int64_t i = 0; i < dim; ++i) {
            float* const line = state + i * width;
            for (int v = 0; v < vectors; ++v) {
                const F32x16 kept = load_lanes<vectors>(line + 16 * v, n) * decay;
                const F32x16 now = vec::fma(splat16(k[i]), change[v], kept);
                store_lanes<vectors>(line + 16 * v, now, n);
                sums[v] = vec::fma(splat16(q[i]), now, sums[v]);
            }
        }
        for (int v = 0; v < vectors; ++v)
            store_lanes<vectors>(args.out + t * args.heads * width + at + 16 * v, sums[v], n);
    }
}

}  // namespace

void delta_rule(const DeltaRuleArgs& args, Worker& worker) {
    share_lanes(
        args.rows, args.heads, args.value_dim, args.key_dim * 16 * wide_block * 2, worker,
        [&](std::int64_t row, std::int64_t head, std::int64_t first) { delta<wide_block>(args, row, head, first, 16); },
        [&](std::int64_t row, std::int64_t head, std::int64_t first, std::int64_t n) {
            delta<1>(args, row, head, first, n);
        });
}

}  // namespace penstock::PENSTOCK_ISA
