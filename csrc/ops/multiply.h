// Rows of activations times up to four panels of one matrix: what linear() and experts() are made of.
#pragma once

#include "ops/inputs.h"

namespace penstock::PENSTOCK_ISA {

inline constexpr std::int64_t task_columns = 64;
// Most rows of a task: their sums and activations stay in a core's second-level cache. A multiple of row_step.
#ifdef PENSTOCK_TILE_HEADER
inline constexpr std::int64_t task_rows = 256, row_step = 32;
#else
inline constexpr std::int64_t task_rows = 144, row_step = 6;
#endif

// What the products of a matrix take on this instruction set: the arithmetic of all rows of that matrix, or of those of
// kind prompt and of the `generated` ones.
InputForm input_form(const PackedMatrix& matrix, bool generated = false);

// Cuts T rows into those that are multiplied alike; returns how many sets there are, at most two.
int row_sets(const RowKinds* kinds, std::int64_t tokens, RowSet (&out)[2]);

// Brings rows of x [T, K] into a form, in `scratch` of inputs_bytes(). All members of the team call it.
Inputs prepare_inputs(InputForm form, const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set,
                      const std::int32_t* order, std::byte* scratch, Worker& worker);

// sums[i][64] = inputs of row rows[i] (or first + i if rows is null) · panels first_panel … + panels - 1 of an expert
void multiply(const PackedMatrix& matrix, std::int64_t expert, std::int64_t first_panel, int panels,
              const Inputs& inputs, RowList rows, std::int64_t count, SumsOut sums);

}  // namespace penstock::PENSTOCK_ISA

// The products of each form, four panels of which the first `panels` are wanted: sums[i][64] += row rows[i] · panels.
namespace penstock::PENSTOCK_BASE_ISA {

Inputs quantise_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set,
                       const std::int32_t* order, std::byte* scratch, Worker& worker);
void code_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums);
// As code_products() for so few rows that weights need not be unpacked into memory; false where there are more.
bool stream_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                     RowList rows, std::int64_t count, SumsOut sums);
void float_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                    RowList rows, std::int64_t count, SumsOut sums);

}  // namespace penstock::PENSTOCK_BASE_ISA

// Defined where the instruction set multiplies pairs of bfloat16.
namespace penstock::PENSTOCK_ISA {

bool takes_pairs(const PackedHeader& header);
Inputs round_inputs(const float* x, std::int64_t tokens, std::int64_t cols, std::byte* scratch, Worker& worker);
void pair_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums);

}  // namespace penstock::PENSTOCK_ISA

// Defined where there are matrix units.
namespace penstock::PENSTOCK_ISA {

Inputs tile_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set, const std::int32_t* order,
                   std::byte* scratch, Worker& worker);
void tile_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums);

}  // namespace penstock::PENSTOCK_ISA
