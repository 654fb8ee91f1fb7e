// One product a head, as the absorbed form of latent attention needs before and after attending (DeepSeek-V2,
// arXiv:2405.04434, section 2.1.3).
#include <algorithm>
#include <array>

#include "ops/multiply.h"
#include "ops/rotate.h"
#include "ops/row_chunk.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows t · H + h of the inputs and of the output.
struct Heads {
    const HeadLinearArgs& args;
    std::int64_t heads, inputs, outputs;  // elements of a row of x and of out

    explicit Heads(const HeadLinearArgs& a)
        : args(a),
          heads(a.weight->experts()),
          inputs(a.weight->cols() + a.rotation.size),
          outputs(a.weight->rows() + a.rotation.size) {}
};

// Rotates the rest of every row and brings the products' inputs together.
const float* split_rows(const Heads& h, Worker& worker) {
    const HeadLinearArgs& args = h.args;
    if (args.rotation.size == 0) return args.x;
    const std::int64_t cols = args.weight->cols(), rows = args.weight->rows();
    auto* const gathered = reinterpret_cast<float*>(args.scratch);
    worker.share(args.tokens * h.heads, row_chunk(h.inputs), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const float* const x = args.x + i * h.inputs;
            std::copy_n(x, cols, gathered + i * cols);
            take_rotated(x + cols, args.rotation, i / h.heads, args.out + i * h.outputs + rows);
        }
    });
    return gathered;
}

void run_task(const Heads& h, const Inputs& inputs, std::int64_t head, std::int64_t column, std::int64_t first,
              std::int64_t count) {
    const PackedMatrix& weight = *h.args.weight;
    std::array<std::int32_t, task_rows> rows;
    for (std::int64_t r = 0; r < count; ++r)
        rows[static_cast<std::size_t>(r)] = static_cast<std::int32_t>((first + r) * h.heads + head);
    const std::int64_t columns = std::min(task_columns, weight.rows() - column);
    const int panels = static_cast<int>((columns + panel_rows - 1) / panel_rows);
    auto* const sums = reinterpret_cast<float*>(thread_memory(1, static_cast<std::size_t>(count * task_columns) * 4));
    multiply(weight, head, column / panel_rows, panels, inputs, {rows.data(), 0}, count, sums);
    for (std::int64_t r = 0; r < count; ++r)
        std::copy_n(sums + r * task_columns, columns, h.args.out + ((first + r) * h.heads + head) * h.outputs + column);
}

}  // namespace

void head_linear(const HeadLinearArgs& args, Worker& worker) {
    if (args.tokens == 0) return;
    const Heads h(args);
    const PackedMatrix& weight = *args.weight;
    const std::int64_t rows = args.tokens * h.heads;
    const float* const x = split_rows(h, worker);
    std::byte* const scratch = args.scratch + (args.rotation.size ? (rows * weight.cols() * 4 + 63) / 64 * 64 : 0);
    const Inputs inputs = prepare_inputs(input_form(weight), x, rows, weight.cols(), {nullptr, rows, false},
                                         weight.order(), scratch, worker);
    const std::int64_t blocks = (args.tokens + task_rows - 1) / task_rows,
                       columns = (weight.rows() + task_columns - 1) / task_columns, tasks = h.heads * columns;
    const std::int64_t each = args.tokens <= 64 ? std::max<std::int64_t>(1, tasks / (8 * worker.count())) : 1;
    worker.share(tasks * blocks, each, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t task = i % tasks, first = i / tasks * task_rows;
            run_task(h, inputs, task / columns, task % columns * task_columns, first,
                     std::min(task_rows, args.tokens - first));
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
