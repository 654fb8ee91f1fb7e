// Which instruction set's ops are in use: chosen once, from features, or forced by name.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ops/op_table.h"
#include "vec/cpu_features.h"

namespace penstock {

// Names of all instruction sets that exist here or elsewhere, the worst for this machine first; and of those in this
// binary. What stands before "generic" is for tests and never chosen by itself.
std::vector<std::string_view> known_isas();
std::vector<std::string_view> built_isas();

enum class Refusal { none, unknown, not_built, cpu_lacks, wrong };

struct Verdict {
    Refusal refusal;
    std::string reason;  // a sentence; empty if there is no refusal
};

// Whether ops of `isa` can run on a processor with these features.
Verdict judge(std::string_view isa, std::span<const Feature> features);

// The same for this machine, on which the set's arithmetic is tried too, where it might be wrong.
Verdict usable(std::string_view isa);

// The ops in use; at first, the best set that judge() accepts on this machine.
const OpTable& ops();

// Uses `isa` from now on ("auto": the best) unless it is refused.
Verdict select_isa(std::string_view isa);

}  // namespace penstock
