// What the sampler keeps of one sequence: its parameters, and its tokens as far as a parameter needs them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ops/chain.h"
#include "ops/ops.h"

namespace penstock {

struct RowSettings {
    std::int64_t vocab_size = 0;
    std::uint64_t seed = 0;
    std::uint32_t sequence = 0;
    double temperature = 1.0, top_p = 1.0, min_p = 0.0, typical_p = 1.0;
    double repetition_penalty = 1.0, presence_penalty = 0.0, frequency_penalty = 0.0;
    std::int64_t top_k = 0, min_tokens = 0;
    std::vector<std::pair<std::int64_t, double>> logit_bias;
    std::vector<std::int64_t> allowed_ids;
    bool restrict_to_allowed = false;
    std::vector<std::vector<std::int64_t>> bad_words;
    std::vector<std::int64_t> stop_ids, prompt_ids, generated_ids;
    std::vector<std::pair<std::string, std::vector<double>>> chain;
    std::string breaker_mask;  // bit t % 8 of byte t / 8 says that token t breaks sequences by itself
    std::vector<std::int64_t> protected_ids;
    std::vector<std::vector<std::int64_t>> breaker_sequences;
    std::vector<double> state;
};

// The noise of one token's draw.
std::int64_t token_noise(std::uint64_t seed, std::uint32_t sequence, std::uint64_t position, std::uint32_t token);

class SamplerRow {
public:
    // Throws std::invalid_argument for a token id outside the vocabulary or a parameter outside its range.
    explicit SamplerRow(const RowSettings& settings);

    // Takes a token that was generated (or forced).
    void extend(std::int64_t token);

    // Takes the token that was sampled for this row.
    void take(const SampledRow& sampled);

    // Everything needed to sample the token at an absolute position; valid until the next extend().
    RowView view(const float* logits, const std::uint32_t* grammar, std::uint64_t position);

    std::int64_t vocab_size() const { return vocab_; }
    std::int64_t num_generated() const { return num_generated_; }
    const std::vector<double>& state() const { return chain_.state; }

private:
    std::int32_t checked(std::int64_t token) const;
    void make_chain(const RowSettings& settings);
    void count(std::int32_t token, std::int64_t times);

    std::int64_t vocab_;
    std::uint64_t seed_;
    std::uint32_t sequence_;
    RowView fixed_{};  // parameters; its pointers are filled in by view()
    std::int64_t min_tokens_, num_generated_ = 0;
    bool counts_prompt_, counts_output_;
    std::vector<std::int32_t> bias_ids_, stop_ids_, always_banned_, banned_, seen_ids_;
    std::vector<double> bias_values_;
    std::vector<std::uint32_t> allowed_;
    std::vector<std::int64_t> seen_counts_;
    std::unordered_map<std::int32_t, std::size_t> seen_at_;
    std::vector<std::vector<std::int32_t>> bad_words_;  // of two tokens or more
    std::vector<std::int32_t> tail_;                    // last generated tokens, as many as a bad word can look back
    std::size_t tail_size_ = 0;
    ChainView chain_;
    std::size_t state_size_ = 0;
};

}  // namespace penstock
