// Log-softmax of one row at one token, the token's rank, and the most probable tokens.
#include "ops/ops.h"
#include "ops/top_k.h"

namespace penstock::PENSTOCK_ISA {

static std::int64_t rank_of(const float* logits, std::int64_t vocab, std::int64_t target) {
    const vec::F32 own = vec::splat(logits[target]);
    std::int64_t rank = 1;
    for (std::int64_t at = 0; at < vocab; at += 8) {
        const vec::F32 x = load_padded(logits, at, vocab);
        unsigned ahead = vec::less(own, x);
        if (at <= target) {
            const std::int64_t left = target - at;
            ahead |= vec::equal(x, own) & (left >= 8 ? 0xffu : (1u << left) - 1u);
        }
        rank += __builtin_popcount(ahead);
    }
    return rank;
}

RowError logprobs_row(const float* logits, std::int64_t vocab, std::int64_t target, std::int64_t top,
                      const Scratch& scratch, Logprobs& out) {
    const MaxScan found = scan_max(logits, vocab);
    if (found.invalid || found.max == neg_inf) return RowError::not_finite;
    const double max = found.max;
    const double log_total = std::log(total_weight(logits, vocab, found.max, 1.0));
    out.logprob = (static_cast<double>(logits[target]) - max) - log_total;
    out.rank = rank_of(logits, vocab, target);
    const TopHeap heap = top_heap(logits, vocab, top, scratch.ids, scratch.values);
    sort_by_rank(heap);
    for (std::int64_t i = 0; i < heap.size; ++i) {
        out.top_ids[i] = static_cast<std::int32_t>(heap.ids[i]);
        out.top_logprobs[i] = (static_cast<double>(heap.values[i]) - max) - log_total;
    }
    return RowError::none;
}

}  // namespace penstock::PENSTOCK_ISA
