// Selective state spaces, token by token: lanes are channels of a head, so that no sum crosses them.
#include "ops/state_lanes.h"

namespace penstock::PENSTOCK_ISA {
namespace {

template <bool per_channel, int vectors>
void scan(const SelectiveScanArgs& args, std::int64_t row, std::int64_t head, std::int64_t first, std::int64_t n) {
    using vec::F32x16, vec::splat16;
    const std::int64_t size = args.size, states = args.states, channel = head * size + first;
    const std::int64_t group = head / (args.heads / args.groups) * states;
    const std::int64_t lanes = vectors > 1 ? 16 * vectors : n, slot_size = args.heads * states * size;
    float* const pool = args.state + head * states * size + first;
    float* state = pool + args.rows.slot[row] * slot_size;
    if (args.rows.fresh(row)) clear_lanes(state, states, size, lanes);
    const auto given = [&](const float* of, int v) {  // a head's value, or its channels'
        return per_channel ? load_lanes<vectors>(of + channel + 16 * v, n) : splat16(of[head]);
    };
    for (std::int64_t t = args.rows.query_start[row]; t < args.rows.query_start[row + 1]; ++t) {
        state = lanes_at(args.rows, t, pool, states, size, lanes, slot_size, state);
        const float* const b = args.b.at(t) + group;
        const float* const c = args.c.at(t) + group;
        F32x16 x[vectors], step[vectors], input[vectors], out[vectors], decay = splat16(0.0f);
        for (int v = 0; v < vectors; ++v) {
            if (per_channel || v == 0) {
                F32x16 dt = given(args.dt.at(t), v);
                if (args.dt_bias) dt = dt + given(args.dt_bias, v);
                step[v] = vec::min(splat16(args.most), vec::max(splat16(args.least), softplus(dt)));
                if (!per_channel) decay = vec::exp(step[v] * splat16(args.a[head]));
            } else {
                step[v] = step[0];
            }
            x[v] = load_lanes<vectors>(args.x.at(t) + channel + 16 * v, n);
            input[v] = step[v] * x[v];
            out[v] = splat16(0.0f);
        }
        for (std::int64_t i = 0; i < states; ++i) {
            const F32x16 in = splat16(b[i]), read = splat16(c[i]);
            float* const line = state + i * size;
            for (int v = 0; v < vectors; ++v) {
                if (per_channel)
                    decay =
                        vec::exp(step[v] * load_lanes<vectors>(args.a + i * args.heads * size + channel + 16 * v, n));
                const F32x16 now = vec::fma(load_lanes<vectors>(line + 16 * v, n), decay, input[v] * in);
                store_lanes<vectors>(line + 16 * v, now, n);
                out[v] = vec::fma(read, now, out[v]);
            }
        }
        for (int v = 0; v < vectors; ++v) {
            if (args.skip) out[v] = vec::fma(given(args.skip, v), x[v], out[v]);
            if (args.gate.data) {
                const F32x16 gate = load_lanes<vectors>(args.gate.at(t) + channel + 16 * v, n);
                out[v] = out[v] * (gate * vec::sigmoid(gate));
            }
            store_lanes<vectors>(args.out + t * args.heads * size + channel + 16 * v, out[v], n);
        }
    }
}

template <bool per_channel>
void scan_rows(const SelectiveScanArgs& args, Worker& worker) {
    share_lanes(
        args.rows, args.heads, args.size, args.states * 16 * wide_block, worker,
        [&](std::int64_t row, std::int64_t head, std::int64_t first) {
            scan<per_channel, wide_block>(args, row, head, first, 16);
        },
        [&](std::int64_t row, std::int64_t head, std::int64_t first, std::int64_t n) {
            scan<per_channel, 1>(args, row, head, first, n);
        });
}

}  // namespace

void selective_scan(const SelectiveScanArgs& args, Worker& worker) {
    args.per_channel ? scan_rows<true>(args, worker) : scan_rows<false>(args, worker);
}

}  // namespace penstock::PENSTOCK_ISA
