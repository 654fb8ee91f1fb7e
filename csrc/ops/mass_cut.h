// Radix selection: where a list in order of keys has a wanted mass, without sorting it.
#pragma once

#include <cstdint>

namespace penstock {

// A set reaches a wanted mass when it is this close below it, so that ties do not depend on the order of summation.
constexpr double mass_slack = 1e-12;

// Keys below `key` and the first `ties` keys equal to it are the smallest prefix, in order of (key, index), that
// reaches a mass.
struct Cut {
    std::uint64_t key;
    std::int64_t ties;
};

// Sums the mass of 2048 buckets of keys of so many bits, then looks only into the bucket where the target is met.
static inline Cut cut_by_mass(const std::uint64_t* keys, int bits, const double* weights, std::int64_t count,
                              double target, std::uint32_t* index) {
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

// A list of tokens has by place `ids`, `values` and `weights`, and a `count`: keeps what `keep(place)` is true of.
template <class List, class Keep>
void filter(List& list, Keep keep) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < list.count; ++i) {
        if (!keep(i)) continue;
        list.ids[kept] = list.ids[i];
        list.values[kept] = list.values[i];
        list.weights[kept++] = list.weights[i];
    }
    list.count = kept;
}

// Keeps the smallest prefix by (key, place) that has this mass of the list's weights.
template <class List>
void keep_by_mass(List& list, const std::uint64_t* keys, int bits, double target, std::uint32_t* index) {
    constexpr double least = 1e-300;
    const Cut cut = cut_by_mass(keys, bits, list.weights, list.count, target > least ? target : least, index);
    std::int64_t ties = cut.ties;
    filter(list, [&](std::int64_t i) { return keys[i] < cut.key || (keys[i] == cut.key && ties-- > 0); });
}

}  // namespace penstock
