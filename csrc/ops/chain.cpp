#include "ops/chain.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "ops/mass_cut.h"
#include "ops/philox.h"

namespace penstock {

// Beside the list: the row, its history, and the size of the vocabulary.
struct ChainRow {
    const ChainView& chain;
    const RowView& view;
    std::int64_t vocab;
};

namespace {

constexpr double bound = 1e90;  // of logits, up and down: their cubes stay finite
constexpr double least_temperature = 1e-30;
constexpr std::uint32_t xtc_token = 0xffffffffu, no_place = 0xffffffffu;
constexpr std::int64_t mirostat_tokens = 100;
constexpr double largest_exponent = 88.7228391;  // of e, of a float: what DRY's penalty is held to

double bounded(double value) { return std::clamp(value, -bound, bound); }

std::uint32_t random_word(std::uint64_t seed, std::uint32_t sequence, std::uint64_t position, std::uint32_t token) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    return philox4x32({low(position), high(position), sequence, token >> 2}, {low(seed), high(seed)})[token & 3];
}

// Keys that ascend as values descend.
void keys_by_value(ChainList& list) {
    for (std::int64_t i = 0; i < list.count; ++i) {
        const auto bits = std::bit_cast<std::uint64_t>(list.values[i] + 0.0);  // -0 becomes +0, which it equals
        list.keys[i] = bits >> 63 ? bits : ~bits & (~std::uint64_t{0} >> 1);
    }
}

// The value that `better` prefers to all others: by lanes that do not wait for each other.
template <class Better>
double extreme(const ChainList& list, Better better) {
    constexpr std::int64_t lanes = 16;
    std::array<double, lanes> found;
    found.fill(list.values[0]);
    std::int64_t i = 0;
    for (; i + lanes <= list.count; i += lanes)
        for (std::int64_t lane = 0; lane < lanes; ++lane)
            found[static_cast<std::size_t>(lane)] =
                better(list.values[i + lane], found[static_cast<std::size_t>(lane)]);
    for (; i < list.count; ++i) found[0] = better(list.values[i], found[0]);
    for (const double one : found) found[0] = better(one, found[0]);
    return found[0];
}

// Buckets of places by falling value.
auto falling(const ChainList& list) {
    const double most = list.largest();
    const double least = extreme(list, [](double value, double low) { return value < low ? value : low; });
    return [&list, most, steps = EqualSteps(most - least)](std::int64_t i) { return steps(most - list.values[i]); };
}

// Where the first k tokens by falling value end, whose keys are filled.
Cut cut_largest(ChainList& list, std::int64_t k) {
    keys_by_value(list);
    const auto one = [](std::int64_t) { return 1.0; };
    return cut_by_mass(list.keys, 64, one, list.count, static_cast<double>(k), list.index, falling(list));
}

void keep_largest(ChainList& list, std::int64_t k) {
    if (k < list.count) keep_before(list, list.keys, cut_largest(list, k));
}

// Of the tokens' distribution, in nats; beside it the sum of the weights, which are filled, and the largest value.
struct Entropy {
    double value, total, max;
};

Entropy entropy(ChainList& list) {
    const double max = list.largest();
    list.weigh(list.values, list.count, max, list.weights);
    double total = 0.0, mean = 0.0;
    for (std::int64_t i = 0; i < list.count; ++i) {
        total += list.weights[i];
        mean += list.weights[i] * (list.values[i] - max);
    }
    return {std::log(total) - mean / total, total, max};
}

// Places of the first tokens by falling value; of equal ones the lower id comes first.
void sort_first(ChainList& list, std::int64_t first) {
    Cut cut = cut_largest(list, first);
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < list.count; ++i)
        if (list.keys[i] < cut.key || (list.keys[i] == cut.key && cut.ties-- > 0))
            list.index[kept++] = static_cast<std::uint32_t>(i);
    std::sort(list.index, list.index + kept, [&](std::uint32_t a, std::uint32_t b) {
        return list.keys[a] != list.keys[b] ? list.keys[a] < list.keys[b] : a < b;
    });
}

// The same of all tokens whose values are floats, as logits are: a radix sort of keys of 32 bits beside their places,
// in three digits that are counted together.
void sort_floats(ChainList& list) {
    constexpr int width = 11, passes = 3;
    constexpr std::uint32_t mask = (1u << width) - 1;
    const auto count = static_cast<std::size_t>(list.count);
    std::array<std::array<std::uint32_t, mask + 1>, passes> next{};
    for (std::size_t i = 0; i < count; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(list.values[i] + 0.0));
        const std::uint32_t key = bits >> 31 ? bits : ~bits & (~0u >> 1);
        list.keys[i] = static_cast<std::uint64_t>(key) << 32 | i;
        for (int pass = 0; pass < passes; ++pass) ++next[pass][key >> pass * width & mask];
    }
    const auto other = std::make_unique_for_overwrite<std::uint64_t[]>(count);
    std::uint64_t *from = list.keys, *to = other.get();
    for (int pass = 0; pass < passes; ++pass) {
        auto& ranks = next[pass];
        std::exclusive_scan(ranks.begin(), ranks.end(), ranks.begin(), 0u);
        for (std::size_t i = 0; i < count; ++i) to[ranks[from[i] >> (32 + pass * width) & mask]++] = from[i];
        std::swap(from, to);
    }
    for (std::size_t i = 0; i < count; ++i) list.index[i] = static_cast<std::uint32_t>(from[i]);
}

bool all_floats(const ChainList& list) {
    bool same = true;
    for (std::int64_t i = 0; i < list.count; ++i)
        same &= static_cast<double>(static_cast<float>(list.values[i])) == list.values[i];
    return same;
}

// The same of any values, by the bits in which their keys differ, from the lowest, in digits that a first-level cache
// has lines for. Keys are lost.
void sort_all(ChainList& list) {
    if (all_floats(list)) return sort_floats(list);
    constexpr int most_bits = 9;
    keys_by_value(list);
    const auto count = static_cast<std::size_t>(list.count);
    std::uint64_t differing = 0;
    for (std::size_t i = 0; i < count; ++i) differing |= list.keys[i] ^ list.keys[0];
    std::iota(list.index, list.index + list.count, 0u);
    const int lowest = differing ? std::countr_zero(differing) : 0;
    const int bits = std::bit_width(differing) - lowest, passes = (bits + most_bits - 1) / most_bits;
    const int width = passes > 0 ? (bits + passes - 1) / passes : 0;
    const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
    const auto keys = std::make_unique_for_overwrite<std::uint64_t[]>(count);
    const auto places = std::make_unique_for_overwrite<std::uint32_t[]>(count);
    std::uint64_t *from_keys = list.keys, *to_keys = keys.get();
    std::uint32_t *from = list.index, *to = places.get();
    for (int pass = 0; pass < passes; ++pass) {
        const int shift = lowest + pass * width;
        std::array<std::uint32_t, std::size_t{1} << most_bits> next{};
        for (std::size_t i = 0; i < count; ++i) ++next[from_keys[i] >> shift & mask];
        std::exclusive_scan(next.begin(), next.end(), next.begin(), 0u);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint32_t rank = next[from_keys[i] >> shift & mask]++;
            to_keys[rank] = from_keys[i];
            to[rank] = from[i];
        }
        std::swap(from_keys, to_keys);
        std::swap(from, to);
    }
    if (from != list.index) std::copy_n(from, count, list.index);
}

struct Penalty {
    std::int32_t token;
    double strength, times, said;
};

void penalties(const double* v, const ChainRow& row, ChainList& list, ChainMemory&) {
    const auto& history = row.chain.history;
    const double repetition = v[0], presence = v[1], frequency = v[2], decay = v[4];
    const auto size = static_cast<std::int64_t>(history.size());
    const std::int64_t sustain = v[3] < 0.0 ? size : std::min(size, static_cast<std::int64_t>(v[3]));
    std::vector<Penalty> found;
    std::fill_n(list.index, row.vocab, no_place);
    for (std::int64_t back = 0; back < size; ++back) {
        const double fade = back < sustain ? 0.0 : decay > 0.0 ? static_cast<double>(back - sustain) / decay : 1.0;
        if (fade >= 1.0) break;
        const std::int32_t token = history[static_cast<std::size_t>(size - 1 - back)];
        std::uint32_t& at = list.index[token];
        if (at == no_place) {
            at = static_cast<std::uint32_t>(found.size());
            found.push_back({token, 1.0 - fade, 0.0, 0.0});
        }
        if (size - 1 - back < row.chain.prompt_size) continue;
        found[at].times += 1.0 - fade;
        found[at].said = std::max(found[at].said, 1.0 - fade);
    }
    for (const Penalty& one : found) {
        const std::int64_t at = list.place(one.token);
        if (at < 0) continue;
        const double factor = 1.0 + (repetition - 1.0) * one.strength;
        const double value = list.values[at] > 0.0 ? list.values[at] / factor : list.values[at] * factor;
        list.values[at] = bounded(value - frequency * one.times - presence * one.said);
    }
}

// [n], by k: how many tokens before the last k are those at the end of the last n, at most `longest` (Z-algorithm).
std::vector<std::int32_t> repeats(const std::vector<std::int32_t>& history, std::int64_t n, std::int64_t longest) {
    const std::int32_t* last = history.data() + history.size() - 1;
    std::vector<std::int32_t> found(static_cast<std::size_t>(n), 0);
    std::int64_t left = 0, right = 0;
    for (std::int64_t k = 1; k < n; ++k) {
        std::int64_t length =
            k < right ? std::min<std::int64_t>(found[static_cast<std::size_t>(k - left)], right - k) : 0;
        if (k + length >= right) {
            while (k + length < n && last[-length] == last[-(k + length)]) ++length;
            left = k;
            right = k + length;
        }
        found[static_cast<std::size_t>(k)] = static_cast<std::int32_t>(length);
    }
    for (std::int32_t& length : found) length = static_cast<std::int32_t>(std::min<std::int64_t>(length, longest));
    return found;
}

void no_repeat_ngram(const double* v, const ChainRow& row, ChainList& list, ChainMemory&) {
    const auto& history = row.chain.history;
    const auto size = static_cast<std::int64_t>(history.size()), wanted = static_cast<std::int64_t>(v[0]) - 1;
    if (size == 0) return;
    std::fill_n(list.index, row.vocab, 0u);
    std::int64_t there = 0;
    const auto ban = [&](std::int32_t token) {
        if (std::exchange(list.index[token], 1u) == 0u) there += list.place(token) >= 0;
    };
    if (wanted == 0)
        for (const std::int32_t token : history) ban(token);
    const auto found = repeats(history, size, wanted);
    for (std::int64_t k = 1; k < size && wanted > 0; ++k)
        if (found[static_cast<std::size_t>(k)] >= wanted) ban(history[static_cast<std::size_t>(size - k)]);
    if (there == list.count) return;  // what nothing else is left of stays, so that an answer can end
    filter(list, [&](std::int64_t i) { return list.index[list.ids[i]] == 0u; });
}

void dry(const double* v, const ChainRow& row, ChainList& list, ChainMemory&) {
    const auto& history = row.chain.history;
    const double multiplier = v[0], base = v[1], allowed = v[2];
    const auto size = static_cast<std::int64_t>(history.size());
    const std::int64_t n = v[3] < 0.0 ? size : std::min(size, static_cast<std::int64_t>(v[3]));
    const std::int64_t limit = row.chain.breakers.unbroken(size, n);
    if (static_cast<double>(n) <= allowed || static_cast<double>(limit) < allowed) return;
    const auto found = repeats(history, n, limit);
    std::vector<std::int32_t> tokens;
    std::fill_n(list.index, row.vocab, no_place);
    for (std::int64_t k = 1; k < n; ++k) {
        const std::int32_t length = found[static_cast<std::size_t>(k)];
        if (static_cast<double>(length) < allowed) continue;
        const std::int32_t token = history[static_cast<std::size_t>(size - k)];
        std::uint32_t& longest = list.index[token];
        if (longest == no_place) tokens.push_back(token);
        longest = longest == no_place ? static_cast<std::uint32_t>(length)
                                      : std::max(longest, static_cast<std::uint32_t>(length));
    }
    const double most = base > 1.000001 ? std::floor(largest_exponent / std::log(base)) : 1e300;
    for (const std::int32_t token : tokens) {
        const std::int64_t at = row.chain.breakers.single(token) ? -1 : list.place(token);
        const double beyond = std::min(static_cast<double>(list.index[token]) - allowed, most);
        if (at >= 0) list.values[at] = bounded(list.values[at] - multiplier * std::pow(base, beyond));
    }
}

void watermark(const double* v, const ChainRow& row, ChainList& list, ChainMemory&) {
    const auto before = static_cast<std::uint32_t>(row.chain.history.empty() ? 0 : row.chain.history.back());
    const auto key = static_cast<std::uint64_t>(v[2]), limit = static_cast<std::uint64_t>(v[0] * 4294967296.0);
    const std::array<std::uint32_t, 2> halves{static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
    std::array<std::uint32_t, 4> words{};
    std::uint32_t held = no_place;  // whose words these are: four neighbours share them
    for (std::int64_t i = 0; i < list.count; ++i) {
        if (list.ids[i] >> 2 != held) {
            held = list.ids[i] >> 2;
            words = philox4x32({0u, 0x80000000u, before, held}, halves);
        }
        if (words[list.ids[i] & 3] < limit) list.values[i] = bounded(list.values[i] + v[1]);
    }
}

void top_n_sigma(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    double sum = 0.0, squares = 0.0;
    for (std::int64_t i = 0; i < list.count; ++i) sum += list.values[i];
    const double mean = sum / static_cast<double>(list.count);
    for (std::int64_t i = 0; i < list.count; ++i) squares += (list.values[i] - mean) * (list.values[i] - mean);
    const double least = list.largest() - v[0] * std::sqrt(squares / static_cast<double>(list.count));
    filter(list, [&](std::int64_t i) { return list.values[i] >= least; });
}

void temperature(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    double middle = v[0];
    if (v[1] > 0.0 && list.count > 1) {
        const double low = std::max(0.0, middle - v[1]), high = middle + v[1];
        const double share = std::clamp(entropy(list).value / std::log(static_cast<double>(list.count)), 0.0, 1.0);
        middle = low + (high - low) * std::pow(share, v[2]);
    }
    if (middle == 0.0) {
        const double most = list.largest();
        bool met = false;
        filter(list, [&](std::int64_t i) { return list.values[i] == most && !std::exchange(met, true); });
        return;
    }
    const double scale = 1.0 / std::max(middle, least_temperature);
    for (std::int64_t i = 0; i < list.count; ++i) list.values[i] = bounded(list.values[i] * scale);
}

void smoothing(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const double max = list.largest(), square = v[0] * (3.0 - v[1]) / 2.0, cube = v[0] * (v[1] - 1.0) / 2.0;
    for (std::int64_t i = 0; i < list.count; ++i) {
        const double distance = list.values[i] - max;
        list.values[i] = bounded(max + (cube * distance - square) * distance * distance);
    }
}

void top_k(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    keep_largest(list, static_cast<std::int64_t>(v[0]));
}

// Tokens of at least this probability; the largest weight is 1.
void keep_probable(ChainList& list, double total, double least) {
    const double weight = std::min(least * total, 1.0);
    filter(list, [&](std::int64_t i) { return list.weights[i] >= weight; });
}

void top_a(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const double total = list.fill_weights();
    keep_probable(list, total, v[0] / (total * total));
}

void typical_p(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const auto [mean, total, max] = entropy(list);
    const double log_total = std::log(total);
    std::uint64_t furthest = 0;  // positive numbers have the order of their bits
    for (std::int64_t i = 0; i < list.count; ++i) {
        list.keys[i] = std::bit_cast<std::uint64_t>(std::fabs((log_total - (list.values[i] - max)) - mean));
        furthest = list.keys[i] > furthest ? list.keys[i] : furthest;
    }
    const auto nearest = [&, steps = EqualSteps(std::bit_cast<double>(furthest))](std::int64_t i) {
        return steps(std::bit_cast<double>(list.keys[i]));
    };
    keep_by_mass(list, list.keys, 64, (v[0] - mass_slack) * total, list.index, nearest);
}

void tfs(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    if (list.count < 3) return;
    const double total = list.fill_weights();
    sort_all(list);
    const std::int64_t bends = list.count - 2;
    const auto p = std::make_unique_for_overwrite<double[]>(static_cast<std::size_t>(list.count));
    for (std::int64_t rank = 0; rank < list.count; ++rank) p[rank] = list.weights[list.index[rank]] / total;
    const auto bent = [&](std::int64_t rank) {
        return std::fabs((p[rank + 2] - p[rank + 1]) - (p[rank + 1] - p[rank]));
    };
    constexpr std::int64_t lanes = 8;  // sums that do not wait for each other
    std::array<double, lanes> sums{};
    std::int64_t first = 0;
    for (; first + lanes <= bends; first += lanes)
        for (std::int64_t lane = 0; lane < lanes; ++lane) sums[static_cast<std::size_t>(lane)] += bent(first + lane);
    for (; first < bends; ++first) sums[0] += bent(first);
    const double all = std::accumulate(sums.begin(), sums.end(), 0.0);
    double reached = 0.0;
    std::int64_t kept = 1;
    for (std::int64_t rank = 0; rank < bends; ++rank) {
        reached += all > 1e-6 ? bent(rank) / all : 1.0 / static_cast<double>(bends);
        if (reached > v[0] + mass_slack) break;
        ++kept;
    }
    const double least = list.values[list.index[kept - 1]];
    std::int64_t ties = 0;  // of those that are kept
    for (std::int64_t rank = kept; rank > 0 && list.values[list.index[rank - 1]] == least; --rank) ++ties;
    filter(list, [&](std::int64_t i) { return list.values[i] > least || (list.values[i] == least && ties-- > 0); });
}

void top_p(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const double total = list.fill_weights();
    keys_by_value(list);
    keep_by_mass(list, list.keys, 64, (v[0] - mass_slack) * total, list.index, falling(list));
}

void epsilon_cutoff(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const double total = list.fill_weights();
    keep_probable(list, total, v[0] * 1e-4);
}

void eta_cutoff(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const Entropy told = entropy(list);
    const double epsilon = v[0] * 1e-4, limit = std::sqrt(epsilon) * std::exp(-told.value);
    keep_probable(list, told.total, std::min(epsilon, limit));
}

void min_p(const double* v, const ChainRow&, ChainList& list, ChainMemory&) {
    const double least = std::log(v[0]), max = list.largest();
    filter(list, [&](std::int64_t i) { return list.values[i] - max >= least; });
}

void xtc(const double* v, const ChainRow& row, ChainList& list, ChainMemory&) {
    const RowView& view = row.view;
    const std::uint64_t chance = random_word(view.seed, view.sequence, view.position, xtc_token);
    if (chance >= static_cast<std::uint64_t>(v[0] * 4294967296.0)) return;
    const double total = list.fill_weights(), weight = v[1] * total;
    std::int64_t least = -1, count = 0;  // the last by falling value of those that have the threshold
    for (std::int64_t i = 0; i < list.count; ++i) {
        if (list.weights[i] < weight) continue;
        ++count;
        if (least < 0 || list.values[i] <= list.values[least]) least = i;
    }
    if (count < 2) return;
    const double value = list.values[least];
    const auto dropped = [&](std::int64_t i) {
        return list.values[i] > value || (list.values[i] == value && i < least);
    };
    const auto& kept = row.chain.protected_ids;
    for (const std::int32_t token : kept) {
        const std::int64_t at = list.place(token);
        if (at >= 0 && dropped(at)) return;
    }
    filter(list, [&](std::int64_t i) { return !dropped(i); });
}

void adaptive_p(const double* v, const ChainRow& row, ChainList& list, ChainMemory& memory) {
    if (row.chain.state.empty()) {
        memory.state[0] = v[0] / (1.0 - v[1]);
        memory.state[1] = 1.0 / (1.0 - v[1]);
    }
    const double wanted = std::clamp(2.0 * v[0] - memory.state[0] / memory.state[1], 0.0, 1.0);
    const double total = list.fill_weights();
    memory.before.resize(static_cast<std::size_t>(list.count));
    for (std::int64_t i = 0; i < list.count; ++i) {
        const double p = list.weights[i] / total, distance = std::fabs(p - wanted) / 0.3;
        memory.before[static_cast<std::size_t>(i)] = p;
        list.values[i] = bounded(5.0 - 10.0 * distance * distance / (1.0 + distance));
    }
}

// How many tokens Mirostat's first version keeps, from the exponent of Zipf's law that the first tokens follow.
std::int64_t mirostat_count(ChainList& list, double mu, std::int64_t vocab) {
    const std::int64_t first = std::min(mirostat_tokens, list.count);
    list.fill_weights();
    sort_first(list, first);
    double products = 0.0, squares = 0.0;
    for (std::int64_t i = 0; i + 1 < first; ++i) {
        const double here = list.weights[list.index[i]], next = list.weights[list.index[i + 1]];
        if (next <= 1e-300) break;
        const double t = std::log(static_cast<double>(i + 2) / static_cast<double>(i + 1));
        products += t * std::log(here / next);
        squares += t * t;
    }
    const double exponent = squares > 0.0 ? products / squares : 0.0, epsilon = exponent - 1.0;
    if (exponent <= 0.0) return squares == 0.0 ? 1 : list.count;
    const double size = static_cast<double>(vocab);
    const double part =
        std::fabs(epsilon) > 1e-9 ? epsilon / (1.0 - std::pow(size, -epsilon)) : 1.0 / std::log(std::max(size, 2.0));
    const double power = (std::log(part) + mu * std::log(2.0)) / exponent;
    if (power >= std::log(static_cast<double>(list.count))) return list.count;
    return static_cast<std::int64_t>(std::exp(power));
}

double surprise(double value, double max, double log_total) { return (log_total - (value - max)) / std::log(2.0); }

void mirostat(const double* v, const ChainRow& row, ChainList& list, ChainMemory& memory) {
    if (row.chain.state.empty()) memory.state[0] = 2.0 * v[1];
    if (v[0] == 1.0) {
        keep_largest(list, std::max<std::int64_t>(mirostat_count(list, memory.state[0], row.vocab), 1));
        return;
    }
    const double log_total = std::log(list.fill_weights()), max = list.largest();
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < list.count; ++i) count += surprise(list.values[i], max, log_total) <= memory.state[0];
    keep_largest(list, std::max<std::int64_t>(count, 1));
}

struct Kind {
    const char* name;
    ChainStep::Apply apply;
    std::size_t values;
};

constexpr Kind kinds[] = {{"penalties", penalties, 5},
                          {"no_repeat_ngram", no_repeat_ngram, 1},
                          {"dry", dry, 4},
                          {"watermark", watermark, 3},
                          {"top_n_sigma", top_n_sigma, 1},
                          {"temperature", temperature, 3},
                          {"smoothing", smoothing, 2},
                          {"top_k", top_k, 1},
                          {"top_a", top_a, 1},
                          {"typical_p", typical_p, 1},
                          {"tfs", tfs, 1},
                          {"top_p", top_p, 1},
                          {"epsilon_cutoff", epsilon_cutoff, 1},
                          {"eta_cutoff", eta_cutoff, 1},
                          {"min_p", min_p, 1},
                          {"xtc", xtc, 2},
                          {"adaptive_p", adaptive_p, 2},
                          {"mirostat", mirostat, 3}};

}  // namespace

namespace {

constexpr std::uint64_t hash_base = 0x9E3779B97F4A7C15u;

std::uint64_t power(std::int64_t exponent) {
    std::uint64_t out = 1;
    for (; exponent > 0; --exponent) out *= hash_base;
    return out;
}

std::uint64_t with_token(std::uint64_t hash, std::int32_t token) {
    return hash * hash_base + static_cast<std::uint64_t>(token) + 1;
}

}  // namespace

void Breakers::add(const std::vector<std::int32_t>& sequence) {
    if (sequence.size() == 1) {
        const auto at = static_cast<std::size_t>(sequence[0]) / 8;
        if (at >= single_.size()) single_.resize(at + 1);
        single_[at] = static_cast<char>(static_cast<unsigned char>(single_[at]) | 1u << sequence[0] % 8);
        return;
    }
    const auto length = static_cast<std::int64_t>(sequence.size());
    std::uint64_t hash = 0;
    for (const std::int32_t token : sequence) hash = with_token(hash, token);
    if (std::find(lengths_.begin(), lengths_.end(), length) == lengths_.end()) lengths_.push_back(length);
    auto& same = sequences_[hash];
    if (std::find(same.begin(), same.end(), sequence) == same.end()) same.push_back(sequence);
}

void Breakers::take(const std::vector<std::int32_t>& history) {
    if (single_.empty() && lengths_.empty()) return;
    hashes_.push_back(with_token(hashes_.back(), history.back()));
    const auto size = static_cast<std::int64_t>(history.size());
    const auto note = [&](std::int64_t length) {
        const std::int64_t begin = size - length;
        if (begin < begin_ || (begin == begin_ && length < length_)) return;
        begin_ = begin;
        length_ = length;
    };
    if (single(history.back())) note(1);
    for (const std::int64_t length : lengths_) {
        if (length > size) continue;
        const auto begin = static_cast<std::size_t>(size - length);
        const auto found = sequences_.find(hashes_.back() - hashes_[begin] * power(length));
        if (found == sequences_.end()) continue;
        for (const auto& sequence : found->second)
            if (static_cast<std::int64_t>(sequence.size()) == length &&
                std::equal(sequence.begin(), sequence.end(), history.end() - length))
                note(length);
    }
}

std::int64_t Breakers::unbroken(std::int64_t size, std::int64_t n) const {
    return begin_ < size - n || begin_ < 0 ? n : size - begin_ - length_;
}

double ChainList::largest() const {
    return extreme(*this, [](double value, double most) { return value > most ? value : most; });
}

double ChainList::fill_weights() {
    weigh(values, count, largest(), weights);
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) sum += weights[i];
    return sum;
}

std::int64_t ChainList::place(std::int32_t token) const {
    const auto wanted = static_cast<std::uint32_t>(token);
    if (wanted < static_cast<std::uint64_t>(count) && ids[wanted] == wanted) return token;
    const std::uint32_t* found = std::lower_bound(ids, ids + count, wanted);
    return found != ids + count && *found == wanted ? found - ids : -1;
}

ChainStep chain_step(const std::string& name, const std::vector<double>& values) {
    for (const Kind& kind : kinds) {
        if (name != kind.name || values.size() != kind.values) continue;
        ChainStep step{kind.apply, {}};
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (!std::isfinite(values[i])) throw std::invalid_argument(name + " has a parameter that is not finite.");
            step.values[i] = values[i];
        }
        return step;
    }
    throw std::invalid_argument("no sampler is called " + name + " and has " + std::to_string(values.size()) +
                                " parameters.");
}

ChainMemory run_chain(const ChainView& chain, const RowView& view, std::int64_t vocab, ChainList& list) {
    ChainMemory memory{};
    for (std::size_t i = 0; i < chain.state.size() && i < 2; ++i) memory.state[i] = chain.state[i];
    const ChainRow row{chain, view, vocab};
    for (const ChainStep& step : chain.steps) step.apply(step.values, row, list, memory);
    return memory;
}

void learn(const ChainView& chain, ChainList& list, std::int64_t token, ChainMemory& memory) {
    const ChainStep& last = chain.steps.back();
    const auto at = static_cast<std::size_t>(list.place(static_cast<std::int32_t>(token)));
    if (last.apply == mirostat) {
        const double log_total = std::log(list.fill_weights());
        memory.state[0] -= last.values[2] * (surprise(list.values[at], list.largest(), log_total) - last.values[1]);
    }
    if (last.apply == adaptive_p) {
        memory.state[0] = memory.before[at] + last.values[1] * memory.state[0];
        memory.state[1] = 1.0 + last.values[1] * memory.state[1];
    }
}

}  // namespace penstock
