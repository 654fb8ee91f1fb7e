// How many rows a thread takes at a time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace penstock {

// Rows of `size` elements that make up some microseconds of work: less is not worth another thread.
inline std::int64_t row_chunk(std::int64_t size) {
    return std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, size));
}

}  // namespace penstock
