#include "ops/sampler_row.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/noise.h"
#include "ops/philox.h"

namespace penstock {
namespace {

constexpr double least_positive = std::numeric_limits<double>::denorm_min();

void check_range(const char* name, double value, double low, double high) {
    if (!(value >= low && value <= high))
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                    "; allowed: " + std::to_string(low) + " to " + std::to_string(high) + ".");
}

}  // namespace

std::int64_t token_noise(std::uint64_t seed, std::uint32_t sequence, std::uint64_t position, std::uint32_t token) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    const auto words = philox4x32({low(position), high(position), sequence, token >> 2}, {low(seed), high(seed)});
    return gumbel(words[token & 3]);
}

SamplerRow::SamplerRow(const RowSettings& s)
    : vocab_(s.vocab_size), seed_(s.seed), sequence_(s.sequence), min_tokens_(s.min_tokens) {
    if (vocab_ < 1 || vocab_ > INT32_MAX) throw std::invalid_argument("vocab_size must be from 1 to 2147483647.");
    check_range("temperature", s.temperature, 0.0, 1e6);
    check_range("top_p", s.top_p, least_positive, 1.0);
    check_range("typical_p", s.typical_p, least_positive, 1.0);
    check_range("min_p", s.min_p, 0.0, 1.0);
    check_range("repetition_penalty", s.repetition_penalty, least_positive, 1e6);
    check_range("presence_penalty", s.presence_penalty, -1e6, 1e6);
    check_range("frequency_penalty", s.frequency_penalty, -1e6, 1e6);
    fixed_.temperature = s.temperature;
    fixed_.top_k = s.top_k;
    fixed_.top_p = s.top_p;
    fixed_.min_p = s.min_p;
    fixed_.typical_p = s.typical_p;
    fixed_.repetition_penalty = s.repetition_penalty;
    fixed_.presence_penalty = s.presence_penalty;
    fixed_.frequency_penalty = s.frequency_penalty;
    for (const auto& [token, bias] : s.logit_bias) {
        check_range("logit_bias", bias, -1e6, 1e6);
        bias_ids_.push_back(checked(token));
        bias_values_.push_back(bias);
    }
    if (s.restrict_to_allowed) {
        allowed_.resize(static_cast<std::size_t>((vocab_ + 31) / 32));
        for (const auto token : s.allowed_ids)
            allowed_[static_cast<std::size_t>(checked(token) / 32)] |= 1u << token % 32;
    }
    for (const auto token : s.stop_ids) stop_ids_.push_back(checked(token));
    for (const auto& word : s.bad_words) {
        if (word.empty()) throw std::invalid_argument("a bad word has no tokens.");
        std::vector<std::int32_t> ids;
        for (const auto token : word) ids.push_back(checked(token));
        if (ids.size() == 1) {
            always_banned_.push_back(ids[0]);
        } else {
            tail_size_ = std::max(tail_size_, ids.size() - 1);
            bad_words_.push_back(std::move(ids));
        }
    }
    counts_prompt_ = s.repetition_penalty != 1.0;
    counts_output_ = counts_prompt_ || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0;
    if (counts_prompt_)
        for (const auto token : s.prompt_ids) count(checked(token), 0);
    make_chain(s);
    for (const auto token : s.generated_ids) extend(token);
}

void SamplerRow::make_chain(const RowSettings& s) {
    for (const auto& [name, values] : s.chain) {
        chain_.steps.push_back(chain_step(name, values));
        state_size_ = name == "mirostat" ? 1 : name == "adaptive_p" ? 2 : 0;
    }
    if (chain_.steps.empty()) return;
    if (!s.state.empty() && s.state.size() != state_size_)
        throw std::invalid_argument("the chain's last sampler has learned something else than state says.");
    chain_.state = s.state;
    chain_.breakers.add_singles(s.breaker_mask);
    for (const auto token : s.protected_ids) chain_.protected_ids.insert(checked(token));
    for (const auto& sequence : s.breaker_sequences) {
        if (sequence.empty()) throw std::invalid_argument("a sequence breaker has no tokens.");
        std::vector<std::int32_t> ids;
        for (const auto token : sequence) ids.push_back(checked(token));
        chain_.breakers.add(ids);
    }
    for (const auto token : s.prompt_ids) chain_.take(checked(token));
    chain_.prompt_size = static_cast<std::int64_t>(s.prompt_ids.size());
}

std::int32_t SamplerRow::checked(std::int64_t token) const {
    if (token < 0 || token >= vocab_)
        throw std::invalid_argument("token id " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(vocab_) + ".");
    return static_cast<std::int32_t>(token);
}

void SamplerRow::count(std::int32_t token, std::int64_t times) {
    const auto [at, is_new] = seen_at_.try_emplace(token, seen_ids_.size());
    if (is_new) {
        seen_ids_.push_back(token);
        seen_counts_.push_back(0);
    }
    seen_counts_[at->second] += times;
}

void SamplerRow::extend(std::int64_t token) {
    const std::int32_t id = checked(token);
    ++num_generated_;
    if (counts_output_) count(id, 1);
    if (!chain_.steps.empty()) chain_.take(id);
    if (tail_size_ == 0) return;
    if (tail_.size() == tail_size_) tail_.erase(tail_.begin());
    tail_.push_back(id);
}

void SamplerRow::take(const SampledRow& sampled) {
    extend(sampled.token);
    chain_.state.assign(sampled.state, sampled.state + state_size_);
}

RowView SamplerRow::view(const float* logits, const std::uint32_t* grammar, std::uint64_t position) {
    banned_ = always_banned_;
    for (const auto& word : bad_words_)
        if (word.size() - 1 <= tail_.size() && std::equal(word.rbegin() + 1, word.rend(), tail_.rbegin()))
            banned_.push_back(word.back());
    const bool may_stop = num_generated_ >= min_tokens_;
    RowView out = fixed_;
    out.logits = logits;
    out.bias_ids = bias_ids_.data();
    out.bias_values = bias_values_.data();
    out.num_biases = static_cast<std::int64_t>(bias_ids_.size());
    out.allowed = allowed_.empty() ? nullptr : allowed_.data();
    out.grammar = grammar;
    out.banned = banned_.data();
    out.num_banned = static_cast<std::int64_t>(banned_.size());
    out.stop_ids = stop_ids_.data();
    out.num_stop_ids = may_stop ? 0 : static_cast<std::int64_t>(stop_ids_.size());
    out.seen_ids = seen_ids_.data();
    out.seen_counts = seen_counts_.data();
    out.num_seen = static_cast<std::int64_t>(seen_ids_.size());
    out.seed = seed_;
    out.sequence = sequence_;
    out.position = position;
    out.chain = chain_.steps.empty() ? nullptr : &chain_;
    return out;
}

}  // namespace penstock
