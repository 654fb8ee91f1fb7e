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

constexpr int digit_bits = 11;
constexpr std::uint32_t buckets = 1u << digit_bits;

// Where a running sum over buckets meets the target, and what it is before.
struct Met {
    std::uint32_t bucket;
    double before;
};

template <class Bucket, class Weight>
inline Met meet(std::int64_t count, double before, double target, Bucket bucket, Weight weight) {
    double mass[buckets] = {};
    for (std::int64_t i = 0; i < count; ++i) mass[bucket(i)] += weight(i);
    Met met{buckets, before};
    double reached = before;
    for (std::uint32_t b = 0; b < buckets; ++b) {
        if (mass[b] == 0.0) continue;
        met = {b, reached};
        reached += mass[b];
        if (reached >= target) break;
    }
    return met;
}

// Sums the mass of 2048 buckets, then looks only into the bucket where the target is met: first of buckets by place,
// which have the order of the keys and spread as well as the caller knows how to; then of digits of keys of so many
// bits.
template <class Bucket, class Weight>
inline Cut cut_by_mass(const std::uint64_t* keys, int bits, Weight weight, std::int64_t count, double target,
                       std::uint32_t* index, Bucket first) {
    const Met coarse = meet(count, 0.0, target, [&](std::int64_t i) { return index[i] = first(i); }, weight);
    std::int64_t inside = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const bool there = index[i] == coarse.bucket;
        index[inside] = static_cast<std::uint32_t>(i);
        inside += there;
    }
    double before = coarse.before;
    for (int shift = bits; shift > 0;) {
        shift = shift > digit_bits ? shift - digit_bits : 0;
        const auto digit = [&](std::int64_t i) {
            return static_cast<std::uint32_t>(keys[index[i]] >> shift & (buckets - 1));
        };
        const Met met = meet(inside, before, target, digit, [&](std::int64_t i) { return weight(index[i]); });
        before = met.before;
        std::int64_t left = 0;
        for (std::int64_t i = 0; i < inside; ++i) {
            const bool there = digit(i) == met.bucket;
            index[left] = index[i];
            left += there;
        }
        inside = left;
    }
    Cut cut{keys[index[0]], 0};
    for (; cut.ties < inside && before < target; ++cut.ties) before += weight(index[cut.ties]);
    return cut;
}

// Buckets of numbers from 0 up to a largest, of equal width.
struct EqualSteps {
    double scale;

    explicit EqualSteps(double largest) : scale(largest > 0.0 ? (buckets - 1) / largest : 0.0) {}
    std::uint32_t operator()(double distance) const {
        const double step = distance * scale;  // not a number where the largest is too small to divide by
        return step < buckets - 1 ? static_cast<std::uint32_t>(step) : buckets - 1;
    }
};

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

constexpr double least_mass = 1e-300;

// Keeps what is before a cut.
template <class List>
void keep_before(List& list, const std::uint64_t* keys, Cut cut) {
    std::int64_t ties = cut.ties;
    filter(list, [&](std::int64_t i) { return keys[i] < cut.key || (keys[i] == cut.key && ties-- > 0); });
}

// Keeps the smallest prefix by (key, place) that has this mass of the list's weights; `first` as of `cut_by_mass`.
template <class List, class Bucket>
void keep_by_mass(List& list, const std::uint64_t* keys, int bits, double target, std::uint32_t* index, Bucket first) {
    const auto weight = [&](std::int64_t i) { return list.weights[i]; };
    keep_before(list, keys,
                cut_by_mass(keys, bits, weight, list.count, target > least_mass ? target : least_mass, index, first));
}

// The same, whose first buckets are the first digit of the keys.
template <class List>
void keep_by_mass(List& list, const std::uint64_t* keys, int bits, double target, std::uint32_t* index) {
    const auto digit = [&](std::int64_t i) {
        return static_cast<std::uint32_t>(keys[i] >> (bits - digit_bits) & (buckets - 1));
    };
    keep_by_mass(list, keys, bits - digit_bits, target, index, digit);
}

}  // namespace penstock
