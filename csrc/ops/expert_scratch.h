// How experts() divides its scratch; all sizes in bytes, multiples of 64.
#pragma once

#include "packing/packed.h"

namespace penstock {

struct ExpertScratch {
    std::int64_t inputs;         // tokens quantised
    std::int64_t second_inputs;  // for `up`, 0 where it takes those of `gate`
    std::int64_t hidden_inputs;  // slots quantised; a slot is one token at one expert
    std::int64_t hidden, outputs;
    std::int64_t list;  // a number a slot
    std::int64_t starts, blocks;
    std::int64_t products, low;  // of slots with adapters: gates and ups, and what adapters shrink them to; else 0
    std::int64_t total;
};

ExpertScratch expert_scratch(const PackedMatrix& gate, const PackedMatrix& up, const PackedMatrix& down,
                             std::int64_t tokens, std::int64_t top_k, std::int64_t most_rank);

}  // namespace penstock
