// The sampling chain of one row: masks and penalties on the logits, then filters on a list of candidates, then a draw
// by noise. kernels/reference/sampling.py states the same in numpy.
#include "ops/draw.h"
#include "ops/ops.h"
#include "ops/top_k.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A set reaches a wanted mass when it is this close below it, so that ties do not depend on the order of summation.
constexpr double mass_slack = 1e-12;

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

    template <class Keep>
    void filter(Keep keep) {
        std::int64_t kept = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            if (!keep(i)) continue;
            ids[kept] = ids[i];
            values[kept] = values[i];
            weights[kept++] = weights[i];
        }
        count = kept;
    }
};

// Keys below `key` and the first `ties` keys equal to it are the smallest prefix, in order of (key, index), that
// reaches a mass.
struct Cut {
    std::uint64_t key;
    std::int64_t ties;
};

// Radix selection: sums the mass of 2048 buckets of keys, then looks only into the bucket where the target is met.
Cut cut_by_mass(const std::uint64_t* keys, int bits, const double* weights, std::int64_t count, double target,
                std::uint32_t* index) {
    constexpr int digit = 11, buckets = 1 << digit;
    for (std::int64_t i = 0; i < count; ++i) index[i] = static_cast<std::uint32_t>(i);
    double before = 0.0;
    for (int shift = bits; shift > 0;) {
        shift = shift > digit ? shift - digit : 0;
        double mass[buckets] = {};
        for (std::int64_t i = 0; i < count; ++i) mass[keys[index[i]] >> shift & (buckets - 1)] += weights[index[i]];
        std::uint64_t met = buckets;
        double reached = before, before_last = before;
        for (std::uint64_t b = 0; b < buckets; ++b) {
            if (mass[b] == 0.0) continue;
            before_last = reached;
            reached += mass[b];
            met = b;
            if (reached >= target) break;
        }
        before = before_last;
        std::int64_t inside = 0;
        for (std::int64_t i = 0; i < count; ++i)
            if ((keys[index[i]] >> shift & (buckets - 1)) == met) index[inside++] = index[i];
        count = inside;
    }
    Cut cut{keys[index[0]], 0};
    for (; cut.ties < count && before < target; ++cut.ties) before += weights[index[cut.ties]];
    return cut;
}

void keep_by_mass(Candidates& list, int bits, double target, const Scratch& scratch) {
    const double least = 1e-300;
    const Cut cut =
        cut_by_mass(scratch.keys, bits, list.weights, list.count, target > least ? target : least, scratch.index);
    std::int64_t ties = cut.ties;
    list.filter(
        [&](std::int64_t i) { return scratch.keys[i] < cut.key || (scratch.keys[i] == cut.key && ties-- > 0); });
}

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
        list.filter([&](std::int64_t i) { return list.values[i] > neg_inf; });
        return;
    }
    list.count = collect(logits, vocab, least_finite, list.ids, list.values);
    for (std::int64_t i = 0; i < list.count; ++i) list.weights[i] = 1.0;
    keys_by_logit(list, scratch.keys);
    keep_by_mass(list, 32, static_cast<double>(k), scratch);
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
    keep_by_mass(list, 64, (mass - mass_slack) * total, scratch);
}

// Tokens below min_p times the largest probability of those left go.
void keep_min_p(Candidates& list, double min_p, double max, double scale) {
    const double top = (static_cast<double>(list.largest()) - max) * scale, least = std::log(min_p);
    list.filter([&](std::int64_t i) { return (static_cast<double>(list.values[i]) - max) * scale - top >= least; });
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
        keep_by_mass(list, 32, (row.top_p - mass_slack) * (total > 0.0 ? total : list.total()), scratch);
    }
    if (row.min_p > 0.0) keep_min_p(list, row.min_p, top, scale);
    Draw drawn(key_of(row), max, scale, list.largest());
    drawn.take_list(list.ids, list.values, list.count);
    return drawn.token();
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
