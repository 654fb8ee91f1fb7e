// What sampling takes and gives, shared by every instruction set: plain structs of pointers and numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packing/canonical.h"

namespace penstock {

enum class RowError : std::uint8_t {
    none = 0,
    not_finite = 1,       // a logit is NaN or +infinity, or all are -infinity
    nothing_allowed = 2,  // every token is banned by the row's masks
};

struct ChainView;  // chain.h

// One row to sample: its logits and what was asked of it. All token ids are below the vocabulary size.
struct RowView {
    const float* logits;
    const std::int32_t* bias_ids;
    const double* bias_values;
    std::int64_t num_biases;
    const std::uint32_t* allowed;  // bit t % 32 of word t / 32; null allows all
    const std::uint32_t* grammar;  // the same, of this step alone
    const std::int32_t* banned;
    std::int64_t num_banned;
    const std::int32_t* stop_ids;  // banned too, while the row is below its min_tokens
    std::int64_t num_stop_ids;
    const std::int32_t* seen_ids;     // distinct tokens of prompt and output
    const std::int64_t* seen_counts;  // how often each was generated
    std::int64_t num_seen;
    double repetition_penalty, presence_penalty, frequency_penalty;
    double temperature, typical_p, top_p, min_p;
    std::int64_t top_k;
    std::uint64_t seed, position;  // whose noise, with the sequence's number
    std::uint32_t sequence;
    const ChainView* chain;  // instead of penalties, temperature and filters; null for none
};

// Work space of one thread for a vocabulary of V tokens.
struct Scratch {
    float* logits;         // [V]
    float* values;         // [V]
    double* weights;       // [V]
    double* chained;       // [V]
    std::uint64_t* keys;   // [V]
    std::uint32_t* ids;    // [V]
    std::uint32_t* index;  // [V]
};

struct Logprobs {
    double logprob;
    std::int64_t rank;      // 1 is the most probable; equal logits rank by token id
    std::int32_t* top_ids;  // [top]
    double* top_logprobs;   // [top]
};

struct SampledRow {
    std::int64_t token;
    RowError error;
    double state[2] = {};  // what the last sampler of a chain has learned
};

}  // namespace penstock
