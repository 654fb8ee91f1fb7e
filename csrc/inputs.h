// Rows of activations as the products of a packed matrix take them.
#pragma once

#include "packed.h"

namespace penstock {

// A row's 256 inputs. Values of a short last span are zero.
struct alignas(64) ActivationSpan {
    std::int8_t value[256];      // -127 to 127
    float scale[8];              // of 32 inputs
    float total32[8];            // scale · sum of the 32 values
    float total16[16];           // the same of 16 values
    std::int32_t sum32[8], sum16[16];
};
static_assert(sizeof(ActivationSpan) == 512);

enum class InputForm : int { floats, codes, pairs };
inline constexpr int input_forms = 3;

// T rows of K inputs; of the three pointers the one of the form is set.
struct Inputs {
    InputForm form;
    std::int64_t tokens, cols;
    const float* floats;          // [T, K]
    const ActivationSpan* spans;  // [spans of K][T]
    const std::uint16_t* pairs;   // [T, K] rounded to bfloat16; K is even
};

// The rows of one call, in turn.
struct RowList {
    const std::int32_t* rows;
    std::int64_t first;
    std::int64_t operator[](std::int64_t i) const { return rows ? rows[i] : first + i; }
};

// Bytes that one form of T rows of K inputs takes, at most.
inline std::int64_t inputs_bytes(std::int64_t tokens, std::int64_t cols) {
    return tokens * ((cols + span_inputs - 1) / span_inputs) * static_cast<std::int64_t>(sizeof(ActivationSpan));
}

}  // namespace penstock
