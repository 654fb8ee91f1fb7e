// What this processor can do and the operating system lets programs use.
#pragma once

#include <span>
#include <string_view>

namespace penstock {

struct Feature {
    std::string_view name;
    bool usable;  // the processor has it and the operating system saves its registers
};

// Every feature this library knows of for this architecture; detected once.
std::span<const Feature> cpu_features();

}  // namespace penstock
