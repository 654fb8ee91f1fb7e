// One gated MLP an expert: tokens are grouped by expert, so that each expert's weights are read once.
#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "ops/activation.h"
#include "ops/adapter_table.h"
#include "ops/exchange.h"
#include "ops/expert_scratch.h"
#include "ops/multiply.h"
#include "ops/row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_BASE_ISA {
void adapter(const AdapterArgs& args, Worker& worker);
}

namespace penstock::PENSTOCK_ISA {
namespace {

// Rows of one expert and one set that one task takes: places first … first + rows - 1 of the grouped slots.
struct Block {
    std::int32_t expert, first, rows, set;
};

// Slot t · top_k + k is token t at its k-th expert. Lists are in order of expert, of set, then of slot.
struct Groups {
    std::int32_t* slots;   // [T · top_k]
    std::int32_t* tokens;  // [T · top_k] of the slots
    Block* blocks;
    std::int32_t* num_blocks;
};

struct Buffers {
    std::byte *gate_inputs, *up_inputs, *down_inputs;
    float* hidden;    // [slots, I]
    float* outputs;   // [slots, N]
    float* products;  // [slots, 2 · I] before the activation, if slots have adapters
    float* low;
    Groups groups;
    std::int32_t* starts;  // [2 · E + 1], of the slots of each expert and set
};

bool adapts(const ExpertsArgs& args) {
    return args.adapters.slot && !(args.gate_up_adapters.empty() && args.down_adapters.empty());
}

std::int64_t most_rank(const ExpertsArgs& args) {
    std::int64_t most = 0;
    if (adapts(args))
        for (const auto& uses : {args.gate_up_adapters, args.down_adapters})
            for (const AdapterUse& use : uses) most = std::max(most, use.table->most_rank);
    return most;
}

Buffers take_buffers(const ExpertsArgs& args) {
    const ExpertScratch sizes =
        expert_scratch(*args.gate, *args.up, *args.down, args.tokens, args.top_k, most_rank(args));
    std::byte* at = args.scratch;
    const auto take = [&](std::int64_t bytes) { return std::exchange(at, at + bytes); };
    Buffers out;
    out.gate_inputs = take(sizes.inputs);
    out.up_inputs = sizes.second_inputs ? take(sizes.second_inputs) : out.gate_inputs;
    out.down_inputs = take(sizes.hidden_inputs);
    out.hidden = reinterpret_cast<float*>(take(sizes.hidden));
    out.outputs = reinterpret_cast<float*>(take(sizes.outputs));
    out.groups.slots = reinterpret_cast<std::int32_t*>(take(sizes.list));
    out.groups.tokens = reinterpret_cast<std::int32_t*>(take(sizes.list));
    out.starts = reinterpret_cast<std::int32_t*>(take(sizes.starts));
    out.groups.num_blocks = reinterpret_cast<std::int32_t*>(take(64));
    out.groups.blocks = reinterpret_cast<Block*>(take(sizes.blocks));
    out.products = reinterpret_cast<float*>(take(sizes.products));
    out.low = reinterpret_cast<float*>(take(sizes.low));
    return out;
}

constexpr std::uint32_t experts_op = 4;

// The number of a slot's expert among this rank's own; none of them if it is below 0 or not below their number.
std::int64_t own_expert(const ExpertsArgs& args, std::int64_t slot) {
    if (!args.places.table) return args.ids[slot] - args.first;
    const std::int32_t* const place = args.places.table + 3 * args.ids[slot];
    return place[1] == 1 || slot / args.top_k % place[1] == place[2] ? place[0] : -1;
}

bool is_own(const ExpertsArgs& args, std::int64_t slot) {
    return own_expert(args, slot) >= 0 && own_expert(args, slot) < args.gate->experts();
}

// The rows of a step that are multiplied alike.
struct Sets {
    RowSet set[2];
    int count;
};

void group_tokens(const ExpertsArgs& args, const Sets& sets, std::int32_t* starts, Groups& out) {
    const std::int64_t experts = args.gate->experts();
    if (args.places.counts)
        for (std::int64_t slot = 0; slot < args.tokens * args.top_k; ++slot) ++args.places.counts[args.ids[slot]];
    const auto each_slot = [&](auto&& use) {
        for (int i = 0; i < sets.count; ++i) {
            const RowSet slots = sets.set[i].repeated(args.top_k);
            for (std::int64_t s = 0; s < slots.count; ++s)
                if (const std::int64_t slot = slots.row(s); is_own(args, slot))
                    use(slot, own_expert(args, slot) * sets.count + i);
        }
    };
    const std::int64_t buckets = experts * sets.count;
    std::fill_n(starts, buckets + 1, 0);
    each_slot([&](std::int64_t, std::int64_t bucket) { ++starts[bucket + 1]; });
    for (std::int64_t b = 0; b < buckets; ++b) starts[b + 1] += starts[b];
    std::int32_t count = 0;
    for (std::int64_t b = 0; b < buckets; ++b)
        for (std::int32_t first = starts[b]; first < starts[b + 1]; first += static_cast<std::int32_t>(task_rows))
            out.blocks[count++] = {static_cast<std::int32_t>(b / sets.count), first,
                                   std::min(static_cast<std::int32_t>(task_rows), starts[b + 1] - first),
                                   static_cast<std::int32_t>(b % sets.count)};
    *out.num_blocks = count;
    each_slot([&](std::int64_t slot, std::int64_t bucket) {
        const std::int32_t at = starts[bucket]++;
        out.slots[at] = static_cast<std::int32_t>(slot);
        out.tokens[at] = static_cast<std::int32_t>(slot / args.top_k);
    });
}

void add_bias(float* sums, std::int64_t rows, std::int64_t columns, const float* bias) {
    if (!bias) return;
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < columns; ++i) sums[r * task_columns + i] += bias[i];
}

struct Columns {
    std::int64_t first, count;
    int panels;
};

Columns columns_of(std::int64_t task, std::int64_t width) {
    const std::int64_t first = task * task_columns, count = std::min(task_columns, width - first);
    return {first, count, static_cast<int>((count + panel_rows - 1) / panel_rows)};
}

// Adapters of products [slots, width] of rows of x, of which `shared` neighbours have one.
void adapt(const ExpertsArgs& args, std::span<const AdapterUse> uses, const Buffers& b, const float* x,
           std::int64_t inputs, std::int64_t shared, const float* bias, std::int64_t width, float* out,
           Worker& worker) {
    const TokenAdapters& of = args.adapters;
    for (const AdapterUse& use : uses)
        PENSTOCK_BASE_ISA::adapter({x, inputs, use.table, of.slot, of.scale, of.count, of.index, args.tokens, width,
                                    use.offset, out, b.low, args.top_k, shared, args.ids, bias},
                                   worker);
}

// The activations of products that adapters have changed.
void activate_products(const ExpertsArgs& args, const Buffers& b, Worker& worker) {
    const std::int64_t width = args.gate->rows(), each = args.up == args.gate ? width : 2 * width;
    worker.share(args.tokens * args.top_k, row_chunk(each), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t slot = begin; slot < end; ++slot) {
            const float* const from = b.products + slot * each;
            float* const to = b.hidden + slot * width;
            if (args.up == args.gate)
                activated_row(args.activation, from, width, args.limit, to);
            else
                gated_row(args.activation, from, from + width, width, args.alpha, args.limit, to);
        }
    });
}

// hidden[slot] = activation(gate · x + bias) · (up · x + bias), or without the second factor
void run_gate_up(const ExpertsArgs& args, const Buffers& b, const Inputs& gate, const Inputs& up, const Block& block,
                 std::int64_t task) {
    const std::int64_t width = args.gate->rows(), floats = block.rows * task_columns;
    const Columns c = columns_of(task, width);
    auto* const sums = reinterpret_cast<float*>(thread_memory(1, static_cast<std::size_t>(floats) * 8));
    const std::int32_t* const rows = b.groups.tokens + block.first;
    multiply(*args.gate, block.expert, c.first / panel_rows, c.panels, gate, {rows, 0}, block.rows, sums);
    if (args.up == args.gate) {
        add_bias(sums, block.rows, c.count,
                 args.gate_up_bias ? args.gate_up_bias + block.expert * width + c.first : nullptr);
        for (std::int64_t r = 0; r < block.rows; ++r) {
            const std::int64_t slot = b.groups.slots[block.first + r];
            const float* const from = sums + r * task_columns;
            if (adapts(args))
                std::copy_n(from, c.count, b.products + slot * width + c.first);
            else
                activated_row(args.activation, from, c.count, args.limit, b.hidden + slot * width + c.first);
        }
        return;
    }
    multiply(*args.up, block.expert, c.first / panel_rows, c.panels, up, {rows, 0}, block.rows, sums + floats);
    if (args.gate_up_bias) {
        const float* const bias = args.gate_up_bias + block.expert * 2 * width + c.first;
        add_bias(sums, block.rows, c.count, bias);
        add_bias(sums + floats, block.rows, c.count, bias + width);
    }
    for (std::int64_t r = 0; r < block.rows; ++r) {
        const std::int64_t slot = b.groups.slots[block.first + r];
        const float *const from = sums + r * task_columns, *const second = from + floats;
        if (!adapts(args)) {
            gated_row(args.activation, from, second, c.count, args.alpha, args.limit,
                      b.hidden + slot * width + c.first);
            continue;
        }
        std::copy_n(from, c.count, b.products + slot * 2 * width + c.first);
        std::copy_n(second, c.count, b.products + (slot * 2 + 1) * width + c.first);
    }
}

void run_down(const ExpertsArgs& args, const Buffers& b, const Inputs& inputs, const Block& block, std::int64_t task,
              float* outputs) {
    const std::int64_t width = args.down->rows();
    const Columns c = columns_of(task, width);
    auto* const sums =
        reinterpret_cast<float*>(thread_memory(1, static_cast<std::size_t>(block.rows * task_columns) * 4));
    const std::int32_t* const rows = b.groups.slots + block.first;
    multiply(*args.down, block.expert, c.first / panel_rows, c.panels, inputs, {rows, 0}, block.rows, sums);
    add_bias(sums, block.rows, c.count, args.down_bias ? args.down_bias + block.expert * width + c.first : nullptr);
    for (std::int64_t r = 0; r < block.rows; ++r)
        std::copy_n(sums + r * task_columns, c.count, outputs + rows[r] * width + c.first);
}

// What a token's output begins with, and the outputs that are added to it: of its slots, rows [0, top_k) of `outputs`,
// those of experts [first, end). Null for zeros, and for no residual.
struct Sum {
    const float *before, *outputs;
    std::int64_t first, end;
    const float* residual;
};

// out = before + weight · output of the slots of token t, experts ascending (of equal ones as routed), + residual
void combine(const ExpertsArgs& args, const Sum& of, std::int64_t t, float* out) {
    const std::int64_t width = args.down->rows();
    const auto order =
        reinterpret_cast<std::int32_t*>(thread_memory(1, static_cast<std::size_t>(args.top_k) * sizeof(std::int32_t)));
    const std::int64_t* const ids = args.ids + t * args.top_k;
    std::int64_t count = 0;
    for (std::int32_t k = 0; k < args.top_k; ++k) {
        if (ids[k] < of.first || ids[k] >= of.end) continue;
        std::int64_t at = count++;
        for (; at > 0 && ids[order[at - 1]] > ids[k]; --at) order[at] = order[at - 1];
        order[at] = k;
    }
    for (std::int64_t i = 0; i < width; i += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, width - i);
        const auto load = [&](const float* at) { return n == 16 ? vec::load16(at) : vec::load16(at, n); };
        vec::F32x16 sum = of.before ? load(of.before + i) : vec::splat16(0.0f);
        for (std::int64_t k = 0; k < count; ++k)
            sum = vec::fma(vec::splat16(args.weights[t * args.top_k + order[k]]),
                           load(of.outputs + order[k] * width + i), sum);
        if (of.residual) sum = sum + load(of.residual + i);
        n == 16 ? vec::store(out + i, sum) : vec::store(out + i, sum, n);
    }
}

constexpr std::int64_t every_expert = std::numeric_limits<std::int64_t>::max();

// How outputs of experts of several ranks come together. The first rank has the lowest experts and leaves the sums of
// its own; the others leave the outputs of their slots, all in the second rank's memory. Where a table says who has
// which, the first does as the others.
struct Sharing {
    const ExpertsArgs& args;
    RankGroup& group;
    std::int64_t width, room, chunks;  // tokens of a chunk

    explicit Sharing(const ExpertsArgs& of)
        : args(of),
          group(*of.group),
          width(of.down->rows()),
          room(std::min(of.tokens, group.slot_bytes() / (of.top_k * width * 4))),
          chunks((of.tokens + room - 1) / room) {}

    bool leaves_outputs() const { return args.places.table || group.rank() > 0; }
    float* sums(std::uint32_t age) const { return reinterpret_cast<float*>(group.slot(0, age)); }
    float* outputs(std::uint32_t age) const { return reinterpret_cast<float*>(group.slot(1, age)); }
    // Where the products of one chunk go; null where they are copied later.
    float* direct() const { return leaves_outputs() && chunks == 1 ? outputs(0) : nullptr; }

    void run(const float* own_outputs, Worker& worker) const {
        const std::uint32_t kind = exchange_kind(experts_op, args.tokens, width, args.top_k);
        const std::uint32_t note = own_note();
        const auto share = [&](std::int64_t chunk, auto&& use) {
            worker.share(std::min(room, args.tokens - chunk * room), row_chunk(width * args.top_k),
                         [&](std::int64_t begin, std::int64_t end) {
                             for (std::int64_t i = begin; i < end; ++i) use(i, chunk * room + i);
                         });
        };
        const auto fill = [&](std::int64_t chunk) {
            if (leaves_outputs() && chunks == 1) return;
            share(chunk, [&](std::int64_t i, std::int64_t t) { leave(own_outputs, i, t); });
        };
        exchange(group, chunks, kind, note, worker, fill, [&](std::int64_t chunk, std::uint32_t age) {
            share(chunk, [&](std::int64_t i, std::int64_t t) { take(age, i, t); });
        });
    }

private:
    // What ranks tell each other of which experts they have: their run, or the number of the table.
    std::uint32_t own_note() const {
        if (!args.places.table) return static_cast<std::uint32_t>(args.first << 16 | args.gate->experts());
        const std::atomic_ref<std::int32_t> number(args.places.table[3 * args.places.experts]);
        return static_cast<std::uint32_t>(number.load(std::memory_order_relaxed));
    }

    void leave(const float* own_outputs, std::int64_t i, std::int64_t t) const {
        const float* const own = own_outputs + t * args.top_k * width;
        if (!leaves_outputs())
            return combine(args, {nullptr, own, 0, args.gate->experts(), nullptr}, t, sums(0) + i * width);
        for (std::int64_t k = 0; k < args.top_k; ++k)
            if (is_own(args, t * args.top_k + k))
                std::copy_n(own + k * width, width, outputs(0) + (i * args.top_k + k) * width);
    }

    void take(std::uint32_t age, std::int64_t i, std::int64_t t) const {
        const float* const residual = args.residual ? args.residual + t * width : nullptr;
        if (args.places.table) {
            for (int r = 0; r < group.count(); ++r)
                if (group.note(r, age) != own_note()) return group.part();
            return combine(args, {nullptr, outputs(age) + i * args.top_k * width, 0, every_expert, residual}, t,
                           args.out + t * width);
        }
        std::int64_t end = 0;  // of each rank's experts begin those of the next
        for (int r = 0; r < group.count(); ++r) {
            const std::uint32_t note = group.note(r, age);
            if (note >> 16 != end) return group.part();
            end += note & 0xffff;
        }
        const float* const left = group.count() > 1 ? outputs(age) + i * args.top_k * width : nullptr;
        combine(args, {sums(age) + i * width, left, group.note(0, age) & 0xffff, end, residual}, t,
                args.out + t * width);
    }
};

// Slots of other ranks' experts have no hidden values, which are brought into form all the same.
void clear_others(const ExpertsArgs& args, float* hidden, Worker& worker) {
    const std::int64_t width = args.gate->rows();
    worker.share(args.tokens * args.top_k, row_chunk(width), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t slot = begin; slot < end; ++slot)
            if (!is_own(args, slot)) std::fill_n(hidden + slot * width, width, 0.0f);
    });
}

// The inputs of each set in the form the matrix takes; items: rows of a set, or their slots.
struct SetInputs {
    Inputs of[2];
};

SetInputs inputs_of(const PackedMatrix& matrix, const float* x, std::int64_t rows, const Sets& sets,
                    std::int64_t repeat, std::byte* scratch, Worker& worker) {
    SetInputs out;
    for (int i = 0; i < sets.count; ++i) {
        const RowSet set = repeat > 1 ? sets.set[i].repeated(repeat) : sets.set[i];
        const InputForm form = input_form(matrix, set.generated);
        out.of[i] = prepare_inputs(form, x, rows, matrix.cols(), set, matrix.order(), scratch, worker);
    }
    return out;
}

}  // namespace

void experts(const ExpertsArgs& args, Worker& worker) {
    if (args.tokens == 0) return;
    Buffers b = take_buffers(args);
    Sets sets;
    sets.count = row_sets(args.kinds, args.tokens, sets.set);
    worker.share(1, 1, [&](std::int64_t, std::int64_t) { group_tokens(args, sets, b.starts, b.groups); });
    const SetInputs gate = inputs_of(*args.gate, args.x, args.tokens, sets, 1, b.gate_inputs, worker);
    const bool alike = b.up_inputs == b.gate_inputs;
    const SetInputs up = alike ? gate : inputs_of(*args.up, args.x, args.tokens, sets, 1, b.up_inputs, worker);
    // Not *num_blocks: a member that comes late would read it after later ops have written over it.
    const std::int64_t slots = args.tokens * args.top_k;
    const std::int64_t most_blocks = slots / task_rows + std::min(slots, args.gate->experts() * sets.count);
    const auto each_task = [&](std::int64_t width, auto&& run) {
        const std::int64_t tasks = (width + task_columns - 1) / task_columns;
        worker.share(most_blocks * tasks, 1, [&](std::int64_t begin, std::int64_t end) {
            end = std::min(end, *b.groups.num_blocks * tasks);
            for (std::int64_t i = begin; i < end; ++i) run(b.groups.blocks[i / tasks], i % tasks);
        });
    };
    each_task(args.gate->rows(), [&](const Block& block, std::int64_t task) {
        run_gate_up(args, b, gate.of[block.set], up.of[block.set], block, task);
    });
    const std::int64_t inner = args.gate->rows(), products = args.up == args.gate ? inner : 2 * inner;
    if (adapts(args)) {
        adapt(args, args.gate_up_adapters, b, args.x, args.gate->cols(), args.top_k, args.gate_up_bias, products,
              b.products, worker);
        activate_products(args, b, worker);
    }
    if (args.group) clear_others(args, b.hidden, worker);
    const SetInputs hidden = inputs_of(*args.down, b.hidden, slots, sets, args.top_k, b.down_inputs, worker);
    each_task(args.down->rows(), [&](const Block& block, std::int64_t task) {
        float* const shared = args.group ? Sharing(args).direct() : nullptr;
        run_down(args, b, hidden.of[block.set], block, task, shared ? shared : b.outputs);
    });
    if (adapts(args))
        adapt(args, args.down_adapters, b, b.hidden, inner, 1, args.down_bias, args.down->rows(), b.outputs, worker);
    if (args.group) return Sharing(args).run(b.outputs, worker);
    const std::int64_t width = args.down->rows();
    worker.share(args.tokens, 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t)
            combine(args,
                    {nullptr, b.outputs + t * args.top_k * width, 0, every_expert,
                     args.residual ? args.residual + t * width : nullptr},
                    t, args.out + t * width);
    });
}

}  // namespace penstock::PENSTOCK_ISA
