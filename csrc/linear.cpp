// out = x · Wᵀ over packed weights, with bias, residual and gated activation in the same pass.
#include <algorithm>

#include "activation.h"
#include "multiply.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Consecutive rows of one matrix: rows first … first + rows - 1, the first a multiple of 16.
struct Segment {
    const PackedMatrix* matrix;
    std::int64_t first, rows;
    std::int64_t column;   // of the output row
    std::int64_t tasks;    // groups of 64 columns
    Inputs inputs;
};

constexpr int most_segments = 16;

struct Job {
    const LinearArgs& args;
    Segment segments[most_segments];
    int count;           // of segments; of the gates where there is an activation: up i is segments[count + i]
    std::int64_t width;  // of an output row
    std::int64_t tasks, task_rows;
};

// Bias, residual and activation for one task's sums.
void finish(const Job& job, const Segment& segment, std::int64_t column, std::int64_t columns, std::int64_t first,
            std::int64_t rows, float* gate, float* up) {
    const LinearArgs& args = job.args;
    const auto add_bias = [&](float* sums, std::int64_t at) {
        if (!args.bias) return;
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t i = 0; i < columns; ++i) sums[r * task_columns + i] += args.bias[at + i];
    };
    const std::int64_t at = segment.column + column;
    add_bias(gate, at);
    if (up) {
        add_bias(up, job.width + at);
        for (std::int64_t r = 0; r < rows; ++r)
            gated_row(args.activation, gate + r * task_columns, up + r * task_columns, columns, args.alpha, args.limit,
                      gate + r * task_columns);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        float* const out = args.out + (first + r) * job.width + at;
        const float* const sums = gate + r * task_columns;
        if (args.residual) {
            const float* const residual = args.residual + (first + r) * job.width + at;
            for (std::int64_t i = 0; i < columns; ++i) out[i] = sums[i] + residual[i];
        } else {
            std::copy_n(sums, columns, out);
        }
    }
}

void run_task(const Job& job, std::int64_t task, std::int64_t first) {
    int s = 0;
    while (task >= job.segments[s].tasks) task -= job.segments[s++].tasks;
    const Segment& segment = job.segments[s];
    const std::int64_t rows = std::min(job.task_rows, job.args.tokens - first), column = task * task_columns;
    const std::int64_t columns = std::min(task_columns, segment.rows - column);
    const int panels = static_cast<int>((columns + panel_rows - 1) / panel_rows);
    const bool gated = job.args.activation != Activation::none;
    const std::int64_t floats = rows * task_columns;
    auto* const sums = reinterpret_cast<float*>(thread_memory(1, static_cast<std::size_t>(floats) * (gated ? 8 : 4)));
    multiply(*segment.matrix, 0, (segment.first + column) / panel_rows, panels, segment.inputs, {nullptr, first}, rows, sums);
    if (gated) {
        const Segment& up = job.segments[job.count + s];
        multiply(*up.matrix, 0, (up.first + column) / panel_rows, panels, up.inputs, {nullptr, first}, rows, sums + floats);
    }
    finish(job, segment, column, columns, first, rows, sums, gated ? sums + floats : nullptr);
}

// Cuts the parts into segments and prepares the inputs once for each form and order among them.
void prepare(Job& job, Worker& worker) {
    const LinearArgs& args = job.args;
    const std::int64_t cols = args.parts[0]->cols();
    std::byte* scratch = args.scratch;
    Inputs usual[input_forms];
    bool made[input_forms] = {};
    int count = 0;
    const auto prepare = [&](const PackedMatrix& matrix, InputForm form) {
        const Inputs inputs = prepare_inputs(form, args.x, args.tokens, cols, matrix.order(), scratch, worker);
        if (form != InputForm::floats) scratch += inputs_bytes(args.tokens, cols);
        return inputs;
    };
    const auto add = [&](const PackedMatrix& matrix, std::int64_t first, std::int64_t rows) {
        const InputForm form = input_form(matrix);
        Inputs& shared = usual[static_cast<int>(form)];
        bool& done = made[static_cast<int>(form)];
        if (!matrix.order() && !done) shared = prepare(matrix, form), done = true;
        const Inputs inputs = matrix.order() ? prepare(matrix, form) : shared;
        job.segments[count++] = {&matrix, first, rows, 0, (rows + task_columns - 1) / task_columns, inputs};
    };
    const bool gated = args.activation != Activation::none;
    if (gated && args.num_parts == 1) {
        const std::int64_t half = args.parts[0]->rows() / 2;
        add(*args.parts[0], 0, half);
        job.segments[count] = job.segments[count - 1];
        job.segments[count++].first = half;
    } else {
        for (int i = 0; i < args.num_parts; ++i) add(*args.parts[i], 0, args.parts[i]->rows());
    }
    job.count = gated ? count / 2 : count;
    job.width = job.tasks = 0;
    for (int i = 0; i < job.count; ++i) {
        job.segments[i].column = job.width;
        job.width += job.segments[i].rows;
        job.tasks += job.segments[i].tasks;
    }
}

}  // namespace

void linear(const LinearArgs& args, Worker& worker) {
    Job job{args, {}, 0, 0, 0, 0};
    prepare(job, worker);
    const std::int64_t blocks = (args.tokens + task_rows - 1) / task_rows;
    job.task_rows = blocks ? ((args.tokens + blocks - 1) / blocks + 5) / 6 * 6 : 0;
    // Few rows are bound by memory: neighbouring tasks together, whose panels lie one after the other, read it best.
    const std::int64_t tasks_each = args.tokens <= 64 ? std::max<std::int64_t>(1, job.tasks / (8 * worker.count())) : 1;
    worker.share(job.tasks * blocks, tasks_each, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) run_task(job, i % job.tasks, i / job.tasks * job.task_rows);
    });
}

}  // namespace penstock::PENSTOCK_ISA
