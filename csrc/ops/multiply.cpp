#include "ops/multiply.h"

#include <algorithm>
#include <cstring>

#include "vec/bytes.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

namespace base = PENSTOCK_BASE_ISA;

InputForm input_form(const PackedMatrix& matrix, [[maybe_unused]] bool generated) {
#ifdef PENSTOCK_TILE_HEADER
    if (matrix.header().kind == PackedKind::f32) return InputForm::floats;
    if (!matrix.integer() || !generated) return InputForm::tiles;
#endif
    if (matrix.integer()) return InputForm::codes;
#ifdef PENSTOCK_BF16_DOTS
    if (takes_pairs(matrix.header())) return InputForm::pairs;
#endif
    return InputForm::floats;
}

int row_sets([[maybe_unused]] const RowKinds* kinds, std::int64_t tokens, RowSet (&out)[2]) {
#ifdef PENSTOCK_TILE_HEADER
    if (kinds) {
        int count = 0;
        const std::int64_t prompt = kinds->prompt;
        if (prompt > 0) out[count++] = {kinds->rows, prompt, false};
        if (prompt < tokens) out[count++] = {prompt ? kinds->rows + prompt : kinds->rows, tokens - prompt, true};
        return count;
    }
#endif
    out[0] = {nullptr, tokens, false};
    return 1;
}

Inputs prepare_inputs(InputForm form, const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set,
                      const std::int32_t* order, std::byte* scratch, Worker& worker) {
    if (form == InputForm::codes) return base::quantise_inputs(x, tokens, cols, set, order, scratch, worker);
#ifdef PENSTOCK_TILE_HEADER
    if (form == InputForm::tiles) return tile_inputs(x, tokens, cols, set, order, scratch, worker);
#endif
#ifdef PENSTOCK_BF16_DOTS
    if (form == InputForm::pairs) return round_inputs(x, tokens, cols, scratch, worker);
#endif
    return {InputForm::floats, tokens, cols, x, nullptr};
}

void multiply(const PackedMatrix& matrix, std::int64_t expert, std::int64_t first_panel, int panels,
              const Inputs& inputs, RowList rows, std::int64_t count, SumsOut sums) {
    // What the missing panels of the last columns yield is not used.
    const std::byte* panel[4];
    const std::int64_t last = matrix.panels() - 1;
    for (int p = 0; p < 4; ++p) panel[p] = matrix.panel(expert, std::min(first_panel + p, last));
#ifdef PENSTOCK_TILE_HEADER
    if (inputs.form == InputForm::tiles) return tile_products(matrix, panel, panels, inputs, rows, count, sums);
#endif
    std::memset(sums.at, 0, static_cast<std::size_t>(count * task_columns) * sizeof(float));
    const int step = vec::tile_panels(1), computed = (panels + step - 1) / step * step;
#ifdef PENSTOCK_BF16_DOTS
    if (inputs.form == InputForm::pairs) return pair_products(matrix, panel, computed, inputs, rows, count, sums);
#endif
    (inputs.form == InputForm::codes ? base::code_products : base::float_products)(matrix, panel, computed, inputs,
                                                                                   rows, count, sums);
}

}  // namespace penstock::PENSTOCK_ISA
