// Threads that share work in chunks taken from one counter, so that a busy core delays only its own chunk.
#pragma once

#include <cstdint>
#include <functional>

#include "ops.h"

namespace penstock {

// Threads used by parallel_for, the caller included; at first, the processors this process may run on.
int num_threads();
void set_num_threads(int threads);

// Calls work(begin, end) on disjoint ranges of at most `chunk` items that cover [0, count); returns when all are done.
// An exception of work() ends the loop and is thrown here. Runs in the calling thread alone if there is one chunk, one
// thread, or another call is using the team.
void parallel_for(std::int64_t count, std::int64_t chunk, const std::function<void(std::int64_t, std::int64_t)>& work);

// The calling thread's work space for a vocabulary of this size; valid until its next call.
Scratch thread_scratch(std::int64_t vocab);

}  // namespace penstock
