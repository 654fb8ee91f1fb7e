// Where a sum over elements that ranks may share is cut, as kernels/segments.py cuts the inputs of products: each
// segment is summed from zero and added behind those before it, so that processes which own whole segments can give the
// bits of one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace penstock {

// sum(begin, end) of each segment of `size` elements, added in order. All but the last are multiples of `unit`, what a
// rank has to have all of; 0 for one segment.
template <class F>
inline float segmented_sum(std::int64_t size, std::int64_t unit, F&& sum) {
    constexpr std::int64_t most = 8, span = 256;
    if (unit == 0 || size < 2 * unit) return sum(std::int64_t{0}, size);
    const std::int64_t whole = std::lcm(unit, span);
    if (size / whole >= most) unit = whole;
    const std::int64_t units = size / unit, count = std::min(most, units);
    std::int64_t begin = units / count * unit;
    float total = sum(std::int64_t{0}, begin);
    for (std::int64_t i = 1; i < count; ++i) {
        const std::int64_t end = i + 1 == count ? size : (i + 1) * units / count * unit;
        total += sum(begin, end);
        begin = end;
    }
    return total;
}

}  // namespace penstock
