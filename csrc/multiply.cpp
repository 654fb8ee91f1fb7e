#include "multiply.h"

#include <algorithm>
#include <cstring>

#include "vec/bytes.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

namespace base = PENSTOCK_BASE_ISA;

InputForm input_form(const PackedMatrix& matrix) {
    if (matrix.integer()) return InputForm::codes;
#ifdef PENSTOCK_BF16_DOTS
    if (takes_pairs(matrix.header())) return InputForm::pairs;
#endif
    return InputForm::floats;
}

Inputs prepare_inputs(InputForm form, const float* x, std::int64_t tokens, std::int64_t cols, const std::int32_t* order,
                      std::byte* scratch, Worker& worker) {
    if (form == InputForm::codes) return base::quantise_inputs(x, tokens, cols, order, scratch, worker);
#ifdef PENSTOCK_BF16_DOTS
    if (form == InputForm::pairs) return round_inputs(x, tokens, cols, scratch, worker);
#endif
    return {InputForm::floats, tokens, cols, x, nullptr, nullptr};
}

void multiply(const PackedMatrix& matrix, std::int64_t expert, std::int64_t first_panel, int panels, const Inputs& inputs,
              RowList rows, std::int64_t count, float* sums) {
    // What the missing panels of the last columns yield is not used.
    const std::byte* panel[4];
    const std::int64_t last = matrix.panels() - 1;
    for (int p = 0; p < 4; ++p) panel[p] = matrix.panel(expert, std::min(first_panel + p, last));
    std::memset(sums, 0, static_cast<std::size_t>(count * task_columns) * sizeof(float));
    const int step = vec::tile_panels(1), computed = (panels + step - 1) / step * step;
#ifdef PENSTOCK_BF16_DOTS
    if (inputs.form == InputForm::pairs) return pair_products(matrix, panel, computed, inputs, rows, count, sums);
#endif
    (inputs.form == InputForm::codes ? base::code_products : base::float_products)(matrix, panel, computed, inputs, rows,
                                                                                    count, sums);
}

}  // namespace penstock::PENSTOCK_ISA
