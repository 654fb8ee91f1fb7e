// out = x · Wᵀ over packed weights, with bias, residual and gated activation in the same pass.
#include <algorithm>

#include "ops/activation.h"
#include "ops/multiply.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Consecutive rows of one matrix: rows first … first + rows - 1, the first a multiple of 16.
struct Segment {
    const PackedMatrix* matrix;
    std::int64_t first, rows;
    std::int64_t column;  // of the output row
    std::int64_t tasks;   // groups of 64 columns
    Inputs inputs[2];     // of each set of rows
};

constexpr int most_segments = 16;

struct Job {
    const LinearArgs& args;
    Segment segments[most_segments];
    int count;           // of segments; of the gates where there is an activation: up i is segments[count + i]
    std::int64_t width;  // of an output row
    std::int64_t tasks;
    RowSet sets[2];
    int num_sets;
    std::int64_t task_rows[2], blocks[2];  // of each set
};

// Bias, residual and activation for one task's sums.
void finish(const Job& job, const Segment& segment, std::int64_t column, std::int64_t columns, const RowSet& set,
            std::int64_t first, std::int64_t rows, float* gate, float* up) {
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
        const std::int64_t place = set.row(first + r) * job.width + at;
        float* const out = args.out + place;
        const float* const sums = gate + r * task_columns;
        if (args.residual) {
            const float* const residual = args.residual + place;
            for (std::int64_t i = 0; i < columns; ++i) out[i] = sums[i] + residual[i];
        } else {
            std::copy_n(sums, columns, out);
        }
    }
}

void run_task(const Job& job, std::int64_t task, int set_index, std::int64_t first) {
    int s = 0;
    while (task >= job.segments[s].tasks) task -= job.segments[s++].tasks;
    const Segment& segment = job.segments[s];
    const RowSet& set = job.sets[set_index];
    const std::int64_t rows = std::min(job.task_rows[set_index], set.count - first), column = task * task_columns;
    const std::int64_t columns = std::min(task_columns, segment.rows - column);
    const int panels = static_cast<int>((columns + panel_rows - 1) / panel_rows);
    const bool gated = job.args.activation != Activation::none;
    const std::int64_t floats = rows * task_columns;
    auto* const sums = reinterpret_cast<float*>(thread_memory(1, static_cast<std::size_t>(floats) * (gated ? 8 : 4)));
    const RowList list{set.list ? set.list + first : nullptr, first};
    const auto product = [&](const Segment& of, float* out) {
        multiply(*of.matrix, 0, (of.first + column) / panel_rows, panels, of.inputs[set_index], list, rows, out);
    };
    product(segment, sums);
    if (gated) product(job.segments[job.count + s], sums + floats);
    finish(job, segment, column, columns, set, first, rows, sums, gated ? sums + floats : nullptr);
}

// Brings a segment's inputs into the form of each set. `shared`: where inputs of kinds like its own lie without an
// order, once they are there.
void prepare_segment(const Job& job, Segment& segment, std::byte*& shared, std::byte*& scratch, Worker& worker) {
    const PackedMatrix& matrix = *segment.matrix;
    const LinearArgs& args = job.args;
    std::byte* const known = matrix.order() ? nullptr : shared;
    bool used = false;
    for (int i = 0; i < job.num_sets; ++i) {
        const InputForm form = input_form(matrix, job.sets[i].generated);
        segment.inputs[i] = {form, args.tokens, matrix.cols(), args.x, known};
        if (form == InputForm::floats || known) continue;
        segment.inputs[i] =
            prepare_inputs(form, args.x, args.tokens, matrix.cols(), job.sets[i], matrix.order(), scratch, worker);
        used = true;
    }
    if (!used) return;
    if (!matrix.order()) shared = scratch;
    scratch += inputs_bytes(args.tokens, matrix.cols());
}

// Cuts the parts into segments and prepares the inputs once for each form and order among them.
void prepare(Job& job, Worker& worker) {
    const LinearArgs& args = job.args;
    std::byte* scratch = args.scratch;
    std::byte* shared[2] = {};  // of float kinds, of integer kinds
    int count = 0;
    const auto add = [&](const PackedMatrix& matrix, std::int64_t first, std::int64_t rows) {
        Segment& segment = job.segments[count++];
        segment = {&matrix, first, rows, 0, (rows + task_columns - 1) / task_columns, {}};
        prepare_segment(job, segment, shared[matrix.integer()], scratch, worker);
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
    Job job{args, {}, 0, 0, 0, {}, 0, {}, {}};
    job.num_sets = row_sets(args.kinds, args.tokens, job.sets);
    prepare(job, worker);
    std::int64_t tasks = 0;
    for (int i = 0; i < job.num_sets; ++i) {
        const std::int64_t rows = job.sets[i].count, blocks = (rows + task_rows - 1) / task_rows;
        job.blocks[i] = blocks;
        job.task_rows[i] = blocks ? ((rows + blocks - 1) / blocks + row_step - 1) / row_step * row_step : 0;
        tasks += job.tasks * blocks;
    }
    const auto run = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t block = i / job.tasks;
            const int set = block >= job.blocks[0];
            run_task(job, i % job.tasks, set, (block - (set ? job.blocks[0] : 0)) * job.task_rows[set]);
        }
    };
    // Few rows are bound by memory: neighbouring tasks one after the other, whose panels lie so too, read it best.
    if (args.tokens <= 64)
        worker.share_neighbours(tasks, std::max<std::int64_t>(1, job.tasks / (8 * worker.count())), run);
    else
        worker.share(tasks, 1, run);
}

}  // namespace penstock::PENSTOCK_ISA
