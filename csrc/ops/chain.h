// Chains of samplers, as a row asks for them: each changes the logits of the tokens still possible, or takes some away.
// kernels/reference/chain.py states the same in numpy, and where each comes from.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ops/ops.h"

namespace penstock {

struct ChainList;
struct ChainMemory;
struct ChainRow;

struct ChainStep {
    // What it does: values, what is known beside them, the list, and what the row has learned.
    using Apply = void (*)(const double* values, const ChainRow& row, ChainList& list, ChainMemory& memory);

    Apply apply;
    double values[5];
};

// The step of a name in config/samplers.py; throws std::invalid_argument for another name or number of values.
ChainStep chain_step(const std::string& name, const std::vector<double>& values);

// DRY's sequence breakers: tokens that are one by themselves, and several together. Looks at each token once, whatever
// breakers there are: sequences are found by a hash of so many last tokens for each length there is.
class Breakers {
public:
    // Tokens that are one by themselves: t where bit t % 8 of byte t / 8 is set. Before any `add`.
    void add_singles(std::string mask) { single_ = std::move(mask); }
    void add(const std::vector<std::int32_t>& sequence);
    // Takes the last token of the history, which is new.
    void take(const std::vector<std::int32_t>& history);
    // How many tokens at the end of the history's last n are behind the breaker that begins last.
    std::int64_t unbroken(std::int64_t size, std::int64_t n) const;
    bool single(std::int32_t token) const {
        const auto at = static_cast<std::size_t>(token) / 8;
        return at < single_.size() && (static_cast<unsigned char>(single_[at]) >> token % 8 & 1);
    }

private:
    std::string single_;
    std::vector<std::int64_t> lengths_;
    std::unordered_map<std::uint64_t, std::vector<std::vector<std::int32_t>>> sequences_;  // by hash and length
    std::vector<std::uint64_t> hashes_{0};                                                 // of the first tokens
    std::int64_t begin_ = -1, length_ = 0;  // of the breaker that begins last, and of those the longest
};

// What a row keeps for its chain.
struct ChainView {
    std::vector<ChainStep> steps;
    std::vector<std::int32_t> history;  // prompt and generated tokens
    std::int64_t prompt_size = 0;
    Breakers breakers;
    std::unordered_set<std::int32_t> protected_ids;
    std::vector<double> state;  // of Mirostat mu, of adaptive-p sum and weight; empty before the first draw

    void take(std::int32_t token) {
        history.push_back(token);
        breakers.take(history);
    }
};

// The tokens still possible, by rising ids.
struct ChainList {
    std::uint32_t* ids;
    double* values;  // logits, finite
    double* weights;
    std::uint64_t* keys;
    std::uint32_t* index;
    std::int64_t count;
    void (*weigh)(const double* values, std::int64_t count, double max, double* weights);

    double largest() const;
    // Fills `weights` with e^(value - largest); their sum.
    double fill_weights();
    // The place of a token, -1 if it is not there.
    std::int64_t place(std::int32_t token) const;
};

// What the last sampler of a chain knows and learns.
struct ChainMemory {
    double state[2];
    std::vector<double> before;  // by place, the probabilities that adaptive-p learns from
};

// Applies all steps; at least one token is left.
ChainMemory run_chain(const ChainView& chain, const RowView& row, std::int64_t vocab, ChainList& list);

// Takes the token that was drawn from the list, whose values may be shifted by one number.
void learn(const ChainView& chain, ChainList& list, std::int64_t token, ChainMemory& memory);

}  // namespace penstock
