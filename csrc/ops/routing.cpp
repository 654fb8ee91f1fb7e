// Which experts a token goes to, and with what weights. Of equal logits the lower expert comes first.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/model_ops.h"
#include "ops/row_chunk.h"
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

float sigmoid_of(float x) {
    float lane[16];
    vec::store(lane, vec::sigmoid(vec::splat16(x)));
    return lane[0];
}

// A group counts for its best expert, or, of sigmoids, for the sum of its best two.
float group_score(const RouteArgs& args, const float* scores) {
    const std::int64_t size = args.experts / args.groups;
    float best[2];
    std::int64_t ids[2];
    const std::int64_t counted = args.routing == Routing::sigmoid_topk ? std::min<std::int64_t>(2, size) : 1;
    choose_experts(scores, size, counted, best, ids);
    return counted == 2 ? best[0] + best[1] : best[0];
}

// What experts are chosen by: the logits, or scores made of them with those of other groups at -infinity.
const float* choice_scores(const RouteArgs& args, const float* logits) {
    const bool sigmoid = args.routing == Routing::sigmoid_topk, softmax = args.bias != nullptr && !sigmoid;
    if (!sigmoid && !softmax && args.groups == 1) return logits;
    const std::int64_t experts = args.experts, groups = args.groups, size = experts / groups;
    const std::size_t bytes = static_cast<std::size_t>(experts + 2 * groups) * 4 + static_cast<std::size_t>(groups) * 8;
    std::byte* const memory = thread_memory(3, bytes);
    auto* const chosen = reinterpret_cast<std::int64_t*>(memory);
    auto* const scores = reinterpret_cast<float*>(memory + groups * 8);
    float *const of_group = scores + experts, *const best = of_group + groups;
    const float highest = softmax ? *std::max_element(logits, logits + experts) : 0.0f;
    const float total = softmax ? sum_of_exponentials(logits, experts, highest) : 1.0f;
    for (std::int64_t e = 0; e < experts; ++e) {
        const float score = sigmoid ? sigmoid_of(logits[e]) : softmax ? exp_of(logits[e] - highest) / total : logits[e];
        scores[e] = score + (args.bias ? args.bias[e] : 0.0f);
    }
    if (groups == 1) return scores;
    for (std::int64_t g = 0; g < groups; ++g) of_group[g] = group_score(args, scores + g * size);
    choose_experts(of_group, groups, args.top_groups, best, chosen);
    for (std::int64_t g = 0; g < groups; ++g)
        if (std::find(chosen, chosen + args.top_groups, g) == chosen + args.top_groups)
            std::fill_n(scores + g * size, size, -std::numeric_limits<float>::infinity());
    return scores;
}

void scale_weights(const RouteArgs& args, float* weights, float by) {
    for (std::int64_t k = 0; k < args.top_k; ++k) weights[k] *= by;
}

// The weight of an expert among those not taken before it whose logits are near enough to its own.
void mix_sparsely(const RouteArgs& args, const float* logits, float* weights, const std::int64_t* ids) {
    for (std::int64_t k = 0; k < args.top_k; ++k) {
        const float highest = logits[ids[k]];
        float total = 0.0f;
        for (std::int64_t e = 0; e < args.experts; ++e) {
            if (std::find(ids, ids + k, e) != ids + k) continue;
            const float distance = (highest - logits[e]) / std::max(std::abs(logits[e]), highest);
            if (!(distance > 2.0f * args.jitter)) total += exp_of(logits[e] - highest);
        }
        weights[k] = args.scale / total;
    }
}

void choose_and_weigh(const RouteArgs& args, std::int64_t token) {
    const float* const logits = args.logits + token * args.experts;
    float* const weights = args.weights + token * args.top_k;
    std::int64_t* const ids = args.ids + token * args.top_k;
    choose_experts(choice_scores(args, logits), args.experts, args.top_k, weights, ids);
    if (args.routing == Routing::sparsemixer) return mix_sparsely(args, logits, weights, ids);
    if (args.routing == Routing::sigmoid_topk) {
        float sum = 0.0f;
        for (std::int64_t k = 0; k < args.top_k; ++k) sum += weights[k] = sigmoid_of(logits[ids[k]]);
        return scale_weights(args, weights, args.renormalize ? args.scale / (sum + 1e-20f) : args.scale);
    }
    float highest = weights[0];
    if (args.bias) {
        highest = *std::max_element(logits, logits + args.experts);
        for (std::int64_t k = 0; k < args.top_k; ++k) weights[k] = logits[ids[k]];
    }
    const bool over_all = args.routing == Routing::softmax_topk;
    const float total = over_all ? sum_of_exponentials(logits, args.experts, highest) : 1.0f;
    float chosen = 0.0f;
    for (std::int64_t k = 0; k < args.top_k; ++k) chosen += weights[k] = exp_of(weights[k] - highest) / total;
    if (!over_all || args.renormalize)
        for (std::int64_t k = 0; k < args.top_k; ++k) weights[k] /= chosen + 1e-20f;
    if (args.scale != 1.0f) scale_weights(args, weights, args.scale);
}

void route_token(const RouteArgs& args, std::int64_t token) {
    choose_and_weigh(args, token);
    if (!args.factors) return;
    for (std::int64_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot)
        args.weights[slot] *= args.factors[args.ids[slot]];
}

}  // namespace

void route_experts(const RouteArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(4 * args.experts), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t token = begin; token < end; ++token) route_token(args, token);
    });
}

}  // namespace penstock::PENSTOCK_ISA
