// Which experts a token goes to, and with what weights. Of equal logits the lower expert comes first.
#include "model_ops.h"
#include "row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

inline float exp_of(float x) {
    float lane[16];
    vec::store(lane, vec::exp(vec::splat16(x)));
    return lane[0];
}

// The top_k largest logits, descending, and their experts, by insertion.
void choose_experts(const float* logits, std::int64_t experts, std::int64_t top_k, float* best, std::int64_t* ids) {
    std::int64_t found = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
        if (found == top_k && !(logits[e] > best[found - 1])) continue;
        std::int64_t place = found < top_k ? found++ : found - 1;
        for (; place > 0 && logits[e] > best[place - 1]; --place) {
            best[place] = best[place - 1];
            ids[place] = ids[place - 1];
        }
        best[place] = logits[e];
        ids[place] = e;
    }
}

float sum_of_exponentials(const float* logits, std::int64_t experts, float highest) {
    const vec::F32x16 top = vec::splat16(highest);
    vec::F32x16 sums = vec::splat16(0.0f);
    std::int64_t e = 0;
    for (; e + 16 <= experts; e += 16) sums = sums + vec::exp(vec::load16(logits + e) - top);
    float total = vec::sum(sums);
    for (; e < experts; ++e) total += exp_of(logits[e] - highest);
    return total;
}

void route_token(const RouteArgs& args, std::int64_t token) {
    const float* const logits = args.logits + token * args.experts;
    float* const weights = args.weights + token * args.top_k;
    choose_experts(logits, args.experts, args.top_k, weights, args.ids + token * args.top_k);
    const float highest = weights[0];
    const bool over_all = args.routing == Routing::softmax_topk;
    const float total = over_all ? sum_of_exponentials(logits, args.experts, highest) : 1.0f;
    float chosen = 0.0f;
    for (std::int64_t k = 0; k < args.top_k; ++k) chosen += weights[k] = exp_of(weights[k] - highest) / total;
    if (over_all && !args.renormalize) return;
    for (std::int64_t k = 0; k < args.top_k; ++k) weights[k] /= chosen;
}

}  // namespace

void route_experts(const RouteArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(4 * args.experts), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t token = begin; token < end; ++token) route_token(args, token);
    });
}

}  // namespace penstock::PENSTOCK_ISA
