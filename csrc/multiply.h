// Rows of activations times up to four panels of one matrix: what linear() and experts() are made of.
#pragma once

#include "packed.h"

namespace penstock::PENSTOCK_ISA {

struct ActivationSpan;

inline constexpr std::int64_t task_columns = 64;
// Most rows of a task: their sums and activations stay in a core's second-level cache. A multiple of the rows of a tile.
inline constexpr std::int64_t task_rows = 144;

// T rows of inputs: as they are for float kinds, quantised for integer kinds.
struct Inputs {
    const float* x;               // [T, K]
    const ActivationSpan* spans;  // [spans of K][T], or null if there are only float kinds
    std::int64_t tokens, cols;
};

std::int64_t inputs_bytes(std::int64_t tokens, std::int64_t cols);

// Quantises rows of x into `scratch`, in the order of `order` if not null. All members of the team call it.
Inputs quantise_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const std::int32_t* order,
                       std::byte* scratch, Worker& worker);

// sums[i][64] = inputs of row rows[i] (or first + i if rows is null) · panels first_panel … + panels - 1 of an expert
void multiply(const PackedMatrix& matrix, std::int64_t expert, std::int64_t first_panel, int panels, const Inputs& inputs,
              const std::int32_t* rows, std::int64_t first, std::int64_t count, float* sums);

}  // namespace penstock::PENSTOCK_ISA
