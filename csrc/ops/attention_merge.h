// States of attention, sums over values with the greatest score and the sum of weights, taken together (Milakov &
// Gimelshein 2018, arXiv:1805.02867) and finished.
#pragma once

#include "ops/attention_plan.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// e^a and e^b
struct TwoExponentials {
    TwoExponentials(float a, float b) {
        float lane[16] = {a, b};
        vec::store(lane, vec::exp(vec::load16(lane)));
        first = lane[0];
        second = lane[1];
    }
    float first, second;
};

// The running greatest score and sum of weights take in another's; the sums over values become
// before · sums + now · other.
struct Taking {
    Taking(float& greatest, float& total, float other_greatest, float other_total) {
        const float most = greatest > other_greatest ? greatest : other_greatest;
        const TwoExponentials factor(greatest - most, other_greatest - most);
        before = factor.first;
        now = factor.second;
        total = total * before + other_total * now;
        greatest = most;
    }
    float before, now;
};

inline void finish(const AttentionArgs& args, std::int64_t token, std::int64_t head, const float* sums, float greatest,
                   float total) {
    float factor = 1.0f;
    if (args.sinks) factor = Taking(greatest, total, args.sinks[head], 1.0f).before;
    const vec::F32x16 scale = vec::splat16(total == 0.0f ? 0.0f : factor / total);  // zeros where nothing is seen
    const std::int64_t dim = args.layout.value_dim;
    float* const out = args.out + (token * args.heads + head) * dim;
    for (std::int64_t i = 0; i < dim; i += 16)
        vec::store_some(out + i, vec::load16(sums + i) * scale, std::min<std::int64_t>(16, dim - i));
}

// The state of one query and head at `first` takes in another's, its partitions being behind those so far.
inline void take_state(float* first, const float* other, std::int64_t columns) {
    const Taking taking(first[columns], first[columns + 1], other[columns], other[columns + 1]);
    const vec::F32x16 before = vec::splat16(taking.before), now = vec::splat16(taking.now);
    for (std::int64_t i = 0; i < columns; i += 16)
        vec::store(first + i, vec::fma(vec::load16(first + i), before, vec::load16(other + i) * now));
}

// One query and head whose partitions were treated by several items.
inline void merge(const AttentionArgs& args, const SplitQuery& split, std::int64_t head) {
    const AttentionPlan& plan = *args.plan;
    const std::int64_t columns = padded_value_dim(args.layout);
    float* const first = plan.states.get() + (split.state * args.heads + head) * plan.state_floats;
    for (std::int64_t s = 1; s < split.states; ++s)
        take_state(first, first + s * args.heads * plan.state_floats, columns);
    finish(args, split.token, head, first, first[columns], first[columns + 1]);
}

}  // namespace penstock::PENSTOCK_ISA
