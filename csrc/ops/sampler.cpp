// The sampling chain of one row: masks and penalties on the logits, then filters on a list of candidates, then a draw
// by noise. kernels/reference/sampling.py states the same in numpy.
#include "ops/chain.h"
#include "ops/draw.h"
#include "ops/mass_cut.h"
#include "ops/ops.h"
#include "ops/top_k.h"

namespace penstock::PENSTOCK_ISA {
namespace {

bool unchanged(const RowView& row) {
    return !row.num_biases && !row.allowed && !row.grammar && !row.num_banned && !row.num_stop_ids && !row.num_seen;
}

NoiseKey key_of(const RowView& row) { return {row.seed, row.position, row.sequence}; }

void keep_only(float* logits, std::int64_t vocab, const std::uint32_t* allowed) {
    for (std::int64_t at = 0; at < vocab; at += 32) {
        const std::uint32_t word = allowed[at / 32];
        if (word == 0xffffffffu) continue;
        const std::int64_t end = at + 32 < vocab ? at + 32 : vocab;
        for (std::int64_t id = at; id < end; ++id)
            if (!(word >> (id - at) & 1)) logits[id] = neg_inf;
    }
}

void penalise(float* logits, const RowView& row) {
    for (std::int64_t i = 0; i < row.num_seen; ++i) {
        double value = logits[row.seen_ids[i]];
        value = value > 0.0 ? value / row.repetition_penalty : value * row.repetition_penalty;
        if (const std::int64_t count = row.seen_counts[i]; count > 0)
            value = value - row.frequency_penalty * static_cast<double>(count) - row.presence_penalty;
        logits[row.seen_ids[i]] = to_logit(value);
    }
}

void apply_masks_and_penalties(const RowView& row, std::int64_t vocab, float* logits) {
    __builtin_memcpy(logits, row.logits, static_cast<std::size_t>(vocab) * sizeof(float));
    for (std::int64_t i = 0; i < row.num_biases; ++i)
        logits[row.bias_ids[i]] = to_logit(static_cast<double>(logits[row.bias_ids[i]]) + row.bias_values[i]);
    if (row.allowed) keep_only(logits, vocab, row.allowed);
    if (row.grammar) keep_only(logits, vocab, row.grammar);
    for (std::int64_t i = 0; i < row.num_banned; ++i) logits[row.banned[i]] = neg_inf;
    for (std::int64_t i = 0; i < row.num_stop_ids; ++i) logits[row.stop_ids[i]] = neg_inf;
    penalise(logits, row);
}

// Candidate tokens in order of id, with logits and weights (relative to the largest logit of the vocabulary).
struct Candidates {
    std::uint32_t* ids;
    float* values;
    double* weights;
    std::int64_t count;

    double total() const {
        double sum = 0.0;
        for (std::int64_t i = 0; i < count; ++i) sum += weights[i];
        return sum;
    }

    float largest() const {
        float most = neg_inf;
        for (std::int64_t i = 0; i < count; ++i) most = values[i] > most ? values[i] : most;
        return most;
    }
};

// Keys that ascend as finite logits descend.
void keys_by_logit(const Candidates& list, std::uint64_t* keys) {
    for (std::int64_t i = 0; i < list.count; ++i) {
        const float value = list.values[i] + 0.0f;  // -0 becomes +0, which it equals
        std::uint32_t bits;
        __builtin_memcpy(&bits, &value, 4);
        keys[i] = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    }
}

void keep_top_k(Candidates& list, std::int64_t k, const float* logits, std::int64_t vocab, const Scratch& scratch) {
    if (k <= heap_limit) {
        const TopHeap heap = top_heap(logits, vocab, k, list.ids, list.values);
        sort_by_id(heap);
        list.count = heap.size;
        filter(list, [&](std::int64_t i) { return list.values[i] > neg_inf; });
        return;
    }
    list.count = collect(logits, vocab, least_finite, list.ids, list.values);
    for (std::int64_t i = 0; i < list.count; ++i) list.weights[i] = 1.0;
    keys_by_logit(list, scratch.keys);
    keep_by_mass(list, scratch.keys, 32, static_cast<double>(k), scratch.index);
}

// Locally typical sampling: tokens whose surprise is nearest to the entropy come first.
void keep_typical(Candidates& list, double mass, double max, double scale, const Scratch& scratch) {
    const double total = list.total(), log_total = std::log(total);
    double mean = 0.0;
    for (std::int64_t i = 0; i < list.count; ++i)
        mean += list.weights[i] * ((static_cast<double>(list.values[i]) - max) * scale);
    const double entropy = log_total - mean / total;
    for (std::int64_t i = 0; i < list.count; ++i) {
        const double x = (static_cast<double>(list.values[i]) - max) * scale;
        const double distance = __builtin_fabs((log_total - x) - entropy);
        __builtin_memcpy(&scratch.keys[i], &distance, 8);
    }
    keep_by_mass(list, scratch.keys, 64, (mass - mass_slack) * total, scratch.index);
}

// Tokens below min_p times the largest probability of those left go.
void keep_min_p(Candidates& list, double min_p, double max, double scale) {
    const double top = (static_cast<double>(list.largest()) - max) * scale, least = std::log(min_p);
    filter(list, [&](std::int64_t i) { return (static_cast<double>(list.values[i]) - max) * scale - top >= least; });
}

std::int64_t draw_filtered(const RowView& row, const float* logits, std::int64_t vocab, float max, double scale,
                           const Scratch& scratch) {
    Candidates list{scratch.ids, scratch.values, scratch.weights, 0};
    const double top = max;
    double total = 0.0;  // of the distribution top_p sees, if the list holds only a part of it
    if (row.top_k > 0 && row.top_k < vocab) {
        keep_top_k(list, row.top_k, logits, vocab, scratch);
    } else {
        float threshold = least_finite;
        if (row.typical_p >= 1.0 && row.top_p < 1.0) {
            // Tokens lighter than this weigh less than 1 - top_p together: the nucleus never needs them.
            total = total_weight(logits, vocab, max, scale);
            threshold = below_exponent(std::log((1.0 - row.top_p) * total / static_cast<double>(vocab)), top, scale);
        } else if (row.typical_p >= 1.0) {
            threshold = below_exponent(std::log(row.min_p), top, scale);
        }
        list.count = collect(logits, vocab, threshold < max ? threshold : max, list.ids, list.values);
    }
    store_weights(list.values, list.count, max, scale, list.weights);
    if (row.typical_p < 1.0) keep_typical(list, row.typical_p, top, scale, scratch);
    if (row.top_p < 1.0) {
        keys_by_logit(list, scratch.keys);
        keep_by_mass(list, scratch.keys, 32, (row.top_p - mass_slack) * (total > 0.0 ? total : list.total()),
                     scratch.index);
    }
    if (row.min_p > 0.0) keep_min_p(list, row.min_p, top, scale);
    Draw drawn(key_of(row), max, scale, list.largest());
    drawn.take_list(list.ids, list.values, list.count);
    return drawn.token();
}

vec::F64 load_doubles(const double* from) {
    vec::F64 out;
    __builtin_memcpy(&out, from, 8 * sizeof(double));
    return out;
}

// Of the list [n] e^(value - max).
void weigh_list(const double* values, std::int64_t count, double max, double* weights) {
    const vec::F64 top = vec::splat(max);
    std::int64_t at = 0;
    for (; at + 8 <= count; at += 8) vec::store(weights + at, exp_nonpositive(load_doubles(values + at) - top));
    if (at == count) return;
    double tail[8];
    for (std::int64_t i = 0; i < 8; ++i) tail[i] = at + i < count ? values[at + i] : max;
    vec::store(tail, exp_nonpositive(load_doubles(tail) - top));
    for (std::int64_t i = at; i < count; ++i) weights[i] = tail[i - at];
}

// The chain of samplers that a row asks for, instead of the usual one.
SampledRow draw_from_chain(const RowView& row, const float* logits, std::int64_t vocab, const Scratch& scratch) {
    ChainList list{scratch.ids, scratch.chained, scratch.weights, scratch.keys, scratch.index, 0, weigh_list};
    list.count = collect(logits, vocab, least_finite, list.ids, scratch.values);
    for (std::int64_t i = 0; i < list.count; ++i) list.values[i] = static_cast<double>(scratch.values[i]);
    ChainMemory memory = run_chain(*row.chain, row, vocab, list);
    const double max = list.largest();
    for (std::int64_t i = 0; i < list.count; ++i) list.values[i] -= max;
    Draw drawn(key_of(row), 0.0f, 1.0, 0.0f);
    drawn.take_list(list.ids, list.values, list.count);
    learn(*row.chain, list, drawn.token(), memory);
    return {drawn.token(), RowError::none, {memory.state[0], memory.state[1]}};
}

}  // namespace

SampledRow sample_row(const RowView& row, std::int64_t vocab, const Scratch& scratch) {
    MaxScan found = scan_max(row.logits, vocab);
    if (found.invalid || found.max == neg_inf) return {-1, RowError::not_finite};
    const float* logits = row.logits;
    if (!unchanged(row)) {
        apply_masks_and_penalties(row, vocab, scratch.logits);
        logits = scratch.logits;
        found = scan_max(logits, vocab);
        if (found.max == neg_inf) return {-1, RowError::nothing_allowed};
    }
    if (row.chain) return draw_from_chain(row, logits, vocab, scratch);
    if (row.temperature == 0.0) return {first_equal(logits, vocab, found.max), RowError::none};
    const double scale = 1.0 / (row.temperature > 1e-30 ? row.temperature : 1e-30);
    const bool filtered =
        (row.top_k > 0 && row.top_k < vocab) || row.typical_p < 1.0 || row.top_p < 1.0 || row.min_p > 0.0;
    if (filtered) return {draw_filtered(row, logits, vocab, found.max, scale, scratch), RowError::none};
    Draw drawn(key_of(row), found.max, scale, found.max);
    drawn.take_all(logits, vocab);
    return {drawn.token(), RowError::none};
}

}  // namespace penstock::PENSTOCK_ISA
