// Low-rank adapters of a step's tokens: shrink to the rank, then expand. A dot product is one chain of sixteen lanes
// over its inputs, an output one chain over the rank for each adapter of its token in turn, whatever is computed beside
// it.
#include <algorithm>
#include <type_traits>

#include "ops/adapter_table.h"
#include "ops/model_ops.h"
#include "ops/row_chunk.h"
#include "packing/small_floats.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

using Entry = AdapterTable::Entry;

constexpr std::int64_t row_block = 4, rank_block = 4, column_block = 256;

template <FloatType type>
inline vec::F32x16 load(const void* from, std::int64_t at, std::int64_t n) {
    if constexpr (type == FloatType::f32) return vec::load_some(static_cast<const float*>(from) + at, n);
    const auto* values = static_cast<const std::uint16_t*>(from) + at;
    std::uint16_t some[16] = {};
    if (n < 16) {
        for (std::int64_t i = 0; i < n; ++i) some[i] = values[i];
        values = some;
    }
    return type == FloatType::bf16 ? vec::load16_bf16(values) : vec::load16_f16(values);
}

float value(const AdapterTable::Entry& entry, std::int64_t at) {
    if (entry.type == FloatType::f32) return static_cast<const float*>(entry.down)[at];
    const std::uint16_t bits = static_cast<const std::uint16_t*>(entry.down)[at];
    return entry.type == FloatType::bf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Calls function of the adapter's type.
template <class F>
auto by_type(FloatType type, F&& function) {
    if (type == FloatType::f32) return function(std::integral_constant<FloatType, FloatType::f32>{});
    if (type == FloatType::bf16) return function(std::integral_constant<FloatType, FloatType::bf16>{});
    return function(std::integral_constant<FloatType, FloatType::f16>{});
}

// What a row has at one place of its token's list.
struct Use {
    const Entry* entry = nullptr;  // null for none
    std::int64_t expert = 0;
    float scale = 0.0f;
    bool like(const Use& other) const { return entry == other.entry && expert == other.expert; }
};

// The rows of a call and what their tokens have.
struct Rows {
    const AdapterArgs& args;

    std::int64_t count() const { return args.tokens * args.each; }
    Use use(std::int64_t row, std::int64_t place) const {
        const std::int64_t token = args.index ? args.index[row / args.each] : row / args.each;
        const Entry& entry = (*args.table)[args.slot[token * args.count + place]];
        if (entry.rank == 0) return {};
        return {&entry, expert(row), args.scale[token * args.count + place]};
    }
    std::int64_t expert(std::int64_t row) const {
        if (args.table->experts == 1) return 0;
        return args.experts ? args.experts[row] : row % args.each;
    }
    const float* x(std::int64_t row) const { return args.x + row / args.shared * args.x_stride; }
    float* low(std::int64_t row, std::int64_t place) const {
        return args.scratch + (row * args.count + place) * args.table->most_rank;
    }
    // The part of the output that the table's adapters change.
    float* out(std::int64_t row) const { return args.out + row * args.width + args.offset; }
};

// Dot products of N rows with L lines of the down matrix.
template <FloatType type, int N, int L>
void shrink(const Rows& rows, const Use* uses, std::int64_t row, std::int64_t place, std::int64_t line) {
    const Entry& entry = *uses->entry;
    const std::int64_t inputs = rows.args.table->inputs, first = uses->expert * entry.rank + line;
    vec::F32x16 sums[N][L];
    for (int t = 0; t < N; ++t)
        for (int r = 0; r < L; ++r) sums[t][r] = vec::splat16(0.0f);
    for (std::int64_t k = 0; k < inputs; k += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, inputs - k);
        vec::F32x16 x[N];
        for (int t = 0; t < N; ++t) x[t] = vec::load_some(rows.x(row + t) + k, n);
        for (int r = 0; r < L; ++r) {
            const vec::F32x16 weight = load<type>(entry.down, (first + r) * inputs + k, n);
            for (int t = 0; t < N; ++t) sums[t][r] = vec::fma(x[t], weight, sums[t][r]);
        }
    }
    for (int t = 0; t < N; ++t)
        for (int r = 0; r < L; ++r)
            rows.low(row + t, place)[line + r] = vec::sum(sums[t][r]) * entry.scale * uses[t].scale;
}

template <FloatType type, int N>
void shrink_lines(const Rows& rows, const Use* uses, std::int64_t row, std::int64_t place, std::int64_t line) {
    const std::int64_t rank = uses->entry->rank;
    if (line + rank_block <= rank) return shrink<type, N, rank_block>(rows, uses, row, place, line);
    for (; line < rank; ++line) shrink<type, N, 1>(rows, uses, row, place, line);
}

// Lines [line, line + rank_block) for rows [first, last); those of a whole block that have the same adapter together.
void shrink_block(const Rows& rows, std::int64_t first, std::int64_t last, std::int64_t place, std::int64_t line) {
    Use uses[row_block];
    bool alike = last - first == row_block;
    for (std::int64_t r = first; r < last; ++r) {
        uses[r - first] = rows.use(r, place);
        alike = alike && uses[0].like(uses[r - first]);
    }
    if (alike && uses[0].entry) {
        if (line < uses[0].entry->rank)
            by_type(uses[0].entry->type,
                    [&](auto type) { shrink_lines<type(), row_block>(rows, uses, first, place, line); });
        return;
    }
    for (std::int64_t r = first; r < last; ++r) {
        const Use* const use = uses + (r - first);
        if (use->entry && line < use->entry->rank)
            by_type(use->entry->type, [&](auto type) { shrink_lines<type(), 1>(rows, use, r, place, line); });
    }
}

// As shrink_block, where inputs are numbers: a column of the down matrix for each row.
void look_up_block(const Rows& rows, std::int64_t first, std::int64_t last, std::int64_t place, std::int64_t line) {
    for (std::int64_t row = first; row < last; ++row) {
        const Use use = rows.use(row, place);
        if (!use.entry) continue;
        const Entry& entry = *use.entry;
        const std::int64_t number = rows.args.numbers[row];
        const float scale = rows.args.factor * entry.scale * use.scale;
        for (std::int64_t r = line; r < std::min(line + rank_block, entry.rank); ++r)
            rows.low(row, place)[r] = value(entry, r * rows.args.table->inputs + number) * scale;
    }
}

// `n` sums over the rank of one row from column `at` on.
vec::F32x16 expanded(const Rows& rows, const Use& use, const float* low, std::int64_t at, std::int64_t n) {
    const Entry& entry = *use.entry;
    const std::int64_t outputs = rows.args.table->outputs, first = use.expert * entry.rank;
    return by_type(entry.type, [&](auto type) {
        vec::F32x16 sum = vec::splat16(0.0f);
        for (std::int64_t r = 0; r < entry.rank; ++r)
            sum = vec::fma(vec::splat16(low[r]), load<type()>(entry.up, (first + r) * outputs + at, n), sum);
        return sum;
    });
}

// What the weight alone gave a row: its output without bias and residual.
vec::F32x16 product(const Rows& rows, std::int64_t row, vec::F32x16 out, std::int64_t at, std::int64_t n) {
    const AdapterArgs& args = rows.args;
    const std::int64_t column = args.offset + at;
    if (args.residual) out = out - vec::load_some(args.residual + row * args.width + column, n);
    if (args.bias) out = out - vec::load_some(args.bias + rows.expert(row) * args.width + column, n);
    return out;
}

void expand_block(const Rows& rows, std::int64_t row, std::int64_t column) {
    const AdapterTable& table = *rows.args.table;
    const std::int64_t end = std::min(column + column_block, table.outputs);
    Use uses[AdapterArgs::most];
    bool any = false;
    for (std::int64_t a = 0; a < rows.args.count; ++a) any = (uses[a] = rows.use(row, a)).entry || any;
    if (!any) return;
    float* const out = rows.out(row);
    for (std::int64_t at = column; at < end; at += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, end - at);
        const vec::F32x16 given = vec::load_some(out + at, n);
        vec::F32x16 total = given;
        for (std::int64_t a = 0; a < rows.args.count; ++a) {
            const Entry* const entry = uses[a].entry;
            if (!entry) continue;
            vec::F32x16 sum = expanded(rows, uses[a], rows.low(row, a), at, n);
            if (entry->columns) {
                const vec::F32x16 factor = vec::load_some(entry->columns + uses[a].expert * table.outputs + at, n);
                const vec::F32x16 more = (factor - vec::splat16(1.0f)) * vec::splat16(uses[a].scale);
                sum = vec::fma(more, product(rows, row, given, at, n), factor * sum);
            }
            total = total + sum;
        }
        vec::store_some(out + at, total, n);
    }
}

}  // namespace

void adapter(const AdapterArgs& args, Worker& worker) {
    if (!args.slot) return;
    const Rows rows{args};
    std::int64_t rank = 0;
    for (std::int64_t i = 0; i < args.tokens * args.count; ++i) {
        const std::int64_t token = args.index ? args.index[i / args.count] : i / args.count;
        rank = std::max(rank, (*args.table)[args.slot[token * args.count + i % args.count]].rank);
    }
    if (rank == 0) return;
    const std::int64_t lines = (rank + rank_block - 1) / rank_block * args.count;
    const std::int64_t columns = (args.table->outputs + column_block - 1) / column_block;
    // An item is a part of a block of rows; neighbours read the same rows.
    const auto share = [&](std::int64_t parts, std::int64_t work, auto&& run) {
        const std::int64_t blocks = (rows.count() + row_block - 1) / row_block;
        worker.share(blocks * parts, row_chunk(work), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t item = begin; item < end; ++item) {
                const std::int64_t first = item / parts * row_block;
                run(first, std::min(first + row_block, rows.count()), item % parts);
            }
        });
    };
    share(lines, args.numbers ? rank_block : rank_block * args.table->inputs,
          [&](std::int64_t first, std::int64_t last, std::int64_t part) {
              const auto block = args.numbers ? look_up_block : shrink_block;
              block(rows, first, last, part % args.count, part / args.count * rank_block);
          });
    share(columns, column_block * rank, [&](std::int64_t first, std::int64_t last, std::int64_t part) {
        for (std::int64_t row = first; row < last; ++row) expand_block(rows, row, part * column_block);
    });
}

}  // namespace penstock::PENSTOCK_ISA
