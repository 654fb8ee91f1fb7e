// What this machine can do at most: for benchmarks, which state what share of it an op reaches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum class Limit : int { int8, bf16, fp32, read };

// Per second and all threads of the team, best of several tries: operations (two a multiply-add) in registers, or bytes
// of `bytes` of memory in huge pages. 0 where the instruction set, or the processor, has no such instruction.
double measure_limit(Limit limit, std::int64_t bytes);

}  // namespace penstock
