// Root-mean-square and layer normalisation. A row's sums run over its elements in one fixed order.
#include <algorithm>
#include <cmath>

#include "ops/model_ops.h"
#include "ops/row_chunk.h"
#include "ops/segments.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The sum of term(i) over the row's vectors, i being their first element; term(i, n) gives the last, n lanes wide.
template <class F>
inline float row_sum(std::int64_t size, F&& term) {
    vec::F32x16 sums[4] = {vec::splat16(0.0f), vec::splat16(0.0f), vec::splat16(0.0f), vec::splat16(0.0f)};
    std::int64_t at = 0;
    for (; at + 64 <= size; at += 64)
        for (int j = 0; j < 4; ++j) sums[j] = term(sums[j], at + 16 * j, 16);
    for (int j = 0; at < size; at += 16, ++j) sums[j] = term(sums[j], at, size - at < 16 ? size - at : 16);
    return vec::sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void rms_norm_row(const RmsNormArgs& args, std::int64_t row) {
    const std::int64_t from = row * args.size;
    const float* const x = args.x + from;
    const float* const residual = args.residual ? args.residual + from : nullptr;
    float* const kept = args.sum ? args.sum + from : nullptr;
    const auto total = [&](std::int64_t i, std::int64_t n) {
        return residual ? vec::load_some(x + i, n) + vec::load_some(residual + i, n) : vec::load_some(x + i, n);
    };
    const float squares = row_sum(args.size, [&](vec::F32x16 sum, std::int64_t i, std::int64_t n) {
        const vec::F32x16 value = total(i, n);
        if (kept) vec::store_some(kept + i, value, n);
        return vec::fma(value, value, sum);
    });
    const vec::F32x16 factor = vec::splat16(1.0f / std::sqrt(squares / static_cast<float>(args.size) + args.eps));
    for (std::int64_t i = 0; i < args.size; i += 16) {
        const std::int64_t n = args.size - i < 16 ? args.size - i : 16;
        const vec::F32x16 value = kept ? vec::load_some(kept + i, n) : total(i, n);
        vec::store_some(args.out + from + i, value * factor * vec::load_some(args.weight + i, n), n);
    }
}

float sum_of(const float* x, std::int64_t size) {
    return row_sum(size,
                   [&](vec::F32x16 sum, std::int64_t i, std::int64_t n) { return sum + vec::load_some(x + i, n); });
}

float sum_of_squares(const float* x, std::int64_t size) {
    return row_sum(size, [&](vec::F32x16 sum, std::int64_t i, std::int64_t n) {
        const vec::F32x16 value = vec::load_some(x + i, n);
        return vec::fma(value, value, sum);
    });
}

// The sum of squared distances from a row's mean.
float sum_of_deviations(const float* x, std::int64_t size, float mean) {
    return row_sum(size, [&](vec::F32x16 sum, std::int64_t i, std::int64_t n) {
        vec::F32x16 value = vec::load_some(x + i, n) - vec::splat16(mean);
        if (n < 16) {  // lanes beyond the row must stay out of the sum
            float lane[16];
            vec::store(lane, value);
            value = vec::load16(lane, n);
        }
        return vec::fma(value, value, sum);
    });
}

void match_rms_row(const MatchRmsArgs& args, std::int64_t row) {
    const std::int64_t from = row * args.size;
    const float* const x = args.x + from;
    const float size = static_cast<float>(args.size);
    const float wanted = std::sqrt(sum_of_squares(args.like + from, args.size) / size);
    const vec::F32x16 factor =
        vec::splat16(wanted / std::sqrt(std::max(args.least, sum_of_squares(x, args.size) / size)));
    for (std::int64_t i = 0; i < args.size; i += 16) {
        const std::int64_t n = args.size - i < 16 ? args.size - i : 16;
        vec::store_some(args.out + from + i, vec::load_some(x + i, n) * factor, n);
    }
}

void statistical_topk_row(const StatisticalTopkArgs& args, std::int64_t row) {
    const float* const x = args.x.at(row);
    float* const out = args.out + row * args.size;
    const auto segmented = [&](auto&& sum) {  // ranks share the columns
        return segmented_sum(args.size, 1,
                             [&](std::int64_t begin, std::int64_t end) { return sum(x + begin, end - begin); });
    };
    const float size = static_cast<float>(args.size), mean = segmented(sum_of) / size;
    const auto deviations = [mean](const float* from, std::int64_t count) {
        return sum_of_deviations(from, count, mean);
    };
    const float deviation = std::sqrt(segmented(deviations) / size);
    const vec::F32x16 least = vec::splat16(mean + deviation * args.deviations);
    for (std::int64_t i = 0; i < args.size; i += 16) {
        const std::int64_t n = args.size - i < 16 ? args.size - i : 16;
        vec::store_some(out + i, vec::max(vec::splat16(0.0f), vec::load_some(x + i, n) - least), n);
    }
}

void layer_norm_row(const LayerNormArgs& args, std::int64_t row) {
    const std::int64_t from = row * args.size;
    const float* const x = args.x + from;
    const float size = static_cast<float>(args.size);
    const float mean = sum_of(x, args.size) / size;
    const vec::F32x16 centre = vec::splat16(mean);
    const float squares = sum_of_deviations(x, args.size, mean);
    const vec::F32x16 factor = vec::splat16(1.0f / std::sqrt(squares / size + args.eps));
    for (std::int64_t i = 0; i < args.size; i += 16) {
        const std::int64_t n = args.size - i < 16 ? args.size - i : 16;
        const vec::F32x16 normal = (vec::load_some(x + i, n) - centre) * factor;
        const vec::F32x16 weight = vec::load_some(args.weight + i, n);
        const vec::F32x16 bias = args.bias ? vec::load_some(args.bias + i, n) : vec::splat16(0.0f);
        vec::store_some(args.out + from + i, vec::fma(normal, weight, bias), n);
    }
}

// One group of one token, from element `at` on.
void gated_norm_group(const GatedNormArgs& args, std::int64_t token, std::int64_t at) {
    const float* const x = args.x.at(token) + at;
    const float* const gates = args.gate.data ? args.gate.at(token) + at : nullptr;
    float* const out = args.out + token * args.size + at;
    const auto value = [&](std::int64_t i, std::int64_t n) { return vec::load_some(x + i, n); };
    const auto gate = [&](std::int64_t i, std::int64_t n) {
        const vec::F32x16 given = vec::load_some(gates + i, n);
        return given * vec::sigmoid(given);
    };
    const bool before = gates && args.gate_first, after = gates && !args.gate_first;
    const float squares = segmented_sum(args.group, args.segment, [&](std::int64_t begin, std::int64_t end) {
        return row_sum(end - begin, [&](vec::F32x16 sum, std::int64_t i, std::int64_t n) {
            const vec::F32x16 term = before ? value(begin + i, n) * gate(begin + i, n) : value(begin + i, n);
            return vec::fma(term, term, sum);
        });
    });
    const vec::F32x16 factor = vec::splat16(1.0f / std::sqrt(squares / static_cast<float>(args.group) + args.eps));
    for (std::int64_t i = 0; i < args.group; i += 16) {
        const std::int64_t n = args.group - i < 16 ? args.group - i : 16;
        const vec::F32x16 term = before ? value(i, n) * gate(i, n) : value(i, n);
        const vec::F32x16 normal = term * factor * vec::load_some(args.weight + at + i, n);
        vec::store_some(out + i, after ? normal * gate(i, n) : normal, n);
    }
}

}  // namespace

void gated_norm(const GatedNormArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t token = begin; token < end; ++token)
            for (std::int64_t at = 0; at < args.size; at += args.group) gated_norm_group(args, token, at);
    });
}

void rms_norm(const RmsNormArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) rms_norm_row(args, row);
    });
}

void match_rms(const MatchRmsArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) match_rms_row(args, row);
    });
}

void statistical_topk(const StatisticalTopkArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) statistical_topk_row(args, row);
    });
}

void layer_norm(const LayerNormArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(args.size), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) layer_norm_row(args, row);
    });
}

}  // namespace penstock::PENSTOCK_ISA
