// A product whose inputs lie with several ranks. Each leaves the sums of its segments in its slots, and adds those of
// all, in their order.
#include <algorithm>

#include "ops/exchange.h"
#include "ops/multiply.h"
#include "ops/row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::uint32_t this_op = 1;

// A set's rows in blocks, each of them `tasks` times 64 columns.
struct Blocks {
    RowSet set;
    std::int64_t count, rows;  // rows of a block at most
    Inputs inputs;
};

struct Job {
    const SharedLinearArgs& args;
    Blocks blocks[2];
    int num_sets;
    std::int64_t columns, tasks;     // tasks of a block, and of all
    std::int64_t task_floats;        // of one segment
    std::int64_t chunk, chunks = 1;  // tasks of a chunk
    std::int64_t own;                // segments
};

struct Task {
    const Blocks* of;
    std::int64_t first, rows, column, columns;
};

// How many arrays of sums a rank leaves that has `own` segments from `first` on: the first segments are added by it.
std::int64_t parts_of(std::int64_t first, std::int64_t own) { return first ? own : std::min<std::int64_t>(own, 1); }

Task task_of(const Job& job, std::int64_t number) {
    const Blocks* of = job.blocks;
    std::int64_t block = number / job.columns;
    if (block >= of->count) block -= of++->count;
    const std::int64_t first = block * of->rows, column = number % job.columns * task_columns;
    return {of, first, std::min(of->rows, of->set.count - first), column,
            std::min(task_columns, job.args.width - column)};
}

// Where the sums of a task begin in a slot of so many parts.
float* place_of(const Job& job, std::byte* slot, std::int64_t number, std::int64_t parts) {
    return reinterpret_cast<float*>(slot) + number % job.chunk * parts * job.task_floats;
}

void fill(const Job& job, std::int64_t number) {
    const SharedLinearArgs& args = job.args;
    if (!job.own) return;
    const Task task = task_of(job, number);
    const int panels = static_cast<int>((task.columns + panel_rows - 1) / panel_rows);
    const RowList list{task.of->set.list ? task.of->set.list + task.first : nullptr, task.first};
    float* const to = place_of(job, args.group->slot(args.group->rank()), number, parts_of(args.first, job.own));
    multiply(*args.matrix, 0, task.column / panel_rows, panels, task.of->inputs, list, task.rows, {to, args.first > 0});
}

// What a rank has left in a slot: so many arrays of sums of every task.
struct Left {
    const float* slot;
    std::int64_t parts;
};

struct Ranks {
    Left left[RankGroup::most_ranks];
    int count;
};

void take(const Job& job, std::int64_t number, const Ranks& ranks) {
    const SharedLinearArgs& args = job.args;
    const Task task = task_of(job, number);
    const float* part[most_segments];
    int parts = 0;
    for (int r = 0; r < ranks.count; ++r) {
        const Left& left = ranks.left[r];
        for (std::int64_t p = 0; p < left.parts && parts < most_segments; ++p)
            part[parts++] =
                left.slot + number % job.chunk * left.parts * job.task_floats + p * task.rows * task_columns;
    }
    for (std::int64_t r = 0; r < task.rows; ++r) {
        const std::int64_t at = task.of->set.row(task.first + r) * args.width + task.column;
        for (std::int64_t i = 0; i < task.columns; i += 16) {
            const std::int64_t n = std::min<std::int64_t>(16, task.columns - i);
            const auto given = [&](const float* from) { return n == 16 ? vec::load16(from) : vec::load16(from, n); };
            vec::F32x16 sum = vec::load16(part[0] + r * task_columns + i);
            for (int p = 1; p < parts; ++p) sum = sum + vec::load16(part[p] + r * task_columns + i);
            if (args.bias) sum = sum + given(args.bias + task.column + i);
            if (args.residual) sum = sum + given(args.residual + at + i);
            n == 16 ? vec::store(args.out + at + i, sum) : vec::store(args.out + at + i, sum, n);
        }
    }
}

// What lies in slots of that age; none if segments are missing or there twice.
Ranks ranks_of(const Job& job, std::uint32_t age) {
    RankGroup& group = *job.args.group;
    Ranks out{{}, group.count()};
    std::int64_t found = 0;
    for (int r = 0; r < out.count; ++r) {
        const std::int64_t first = group.note(r, age) >> 8, own = group.note(r, age) & 0xff;
        if (own && first != found) break;
        out.left[r] = {reinterpret_cast<const float*>(group.slot(r, age)), parts_of(first, own)};
        found += own;
    }
    if (found == job.args.total) return out;
    group.part();
    return {{}, 0};
}

void cut_rows(Job& job) {
    const SharedLinearArgs& args = job.args;
    RowSet sets[2];
    job.num_sets = row_sets(args.kinds, args.tokens, sets);
    job.columns = (args.width + task_columns - 1) / task_columns;
    std::int64_t most_rows = 0;
    for (int i = 0; i < job.num_sets; ++i) {
        const std::int64_t blocks = (sets[i].count + task_rows - 1) / task_rows;
        const std::int64_t rows =
            blocks ? ((sets[i].count + blocks - 1) / blocks + row_step - 1) / row_step * row_step : 0;
        job.blocks[i] = {sets[i], blocks, rows, {}};
        job.tasks += blocks * job.columns;
        most_rows = std::max(most_rows, std::min(rows, sets[i].count));
    }
    job.task_floats = most_rows * task_columns;
    const std::int64_t most = args.group->slot_bytes() / (args.total * job.task_floats * 4);
    job.chunks = (job.tasks + most - 1) / most;
    job.chunk = (job.tasks + job.chunks - 1) / job.chunks;
    job.chunks = (job.tasks + job.chunk - 1) / job.chunk;
}

}  // namespace

void shared_linear(const SharedLinearArgs& args, Worker& worker) {
    if (args.tokens == 0 || args.width == 0) return;
    Job job{args, {}, 0, 0, 0, 0, 0, 0, args.matrix ? args.matrix->segments() : 0};
    cut_rows(job);
    for (int i = 0; i < job.num_sets && job.own; ++i)
        job.blocks[i].inputs =
            prepare_inputs(input_form(*args.matrix, job.blocks[i].set.generated), args.x, args.tokens,
                           args.matrix->cols(), job.blocks[i].set, args.matrix->order(), args.scratch, worker);
    const auto tasks_of = [&](std::int64_t chunk) { return std::min(job.chunk, job.tasks - chunk * job.chunk); };
    const std::uint32_t kind = exchange_kind(this_op, args.tokens, args.width, args.total << 32 | job.chunk);
    const auto note = static_cast<std::uint32_t>(args.first << 8 | job.own);
    exchange(
        *args.group, job.chunks, kind, note, worker,
        [&](std::int64_t chunk) {
            const auto run = [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) fill(job, chunk * job.chunk + i);
            };
            const std::int64_t tasks = tasks_of(chunk);
            if (args.tokens <= 64)  // as linear() does
                worker.share_neighbours(tasks, std::max<std::int64_t>(1, tasks / (8 * worker.count())), run);
            else
                worker.share(tasks, 1, run);
        },
        [&](std::int64_t chunk, std::uint32_t age) {
            worker.share(tasks_of(chunk), row_chunk(job.task_floats * args.total),
                         [&](std::int64_t begin, std::int64_t end) {
                             const Ranks ranks = ranks_of(job, age);
                             for (std::int64_t i = begin; ranks.count && i < end; ++i)
                                 take(job, chunk * job.chunk + i, ranks);
                         });
        });
}

}  // namespace penstock::PENSTOCK_ISA
