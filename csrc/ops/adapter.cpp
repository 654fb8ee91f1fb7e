// Low-rank adapters of a step's rows: shrink to the rank, then expand. A dot product is one chain of sixteen lanes over
// its inputs, an output one chain over the rank, whatever is computed beside it.
#include <algorithm>
#include <type_traits>

#include "ops/adapter_table.h"
#include "ops/model_ops.h"
#include "ops/row_chunk.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::int64_t token_block = 4, rank_block = 4, column_block = 256;

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

// Dot products of T tokens and R lines of the down matrix.
template <FloatType type, int T, int R>
void shrink(const AdapterArgs& args, const AdapterTable::Entry& entry, std::int64_t token, std::int64_t line) {
    const std::int64_t inputs = args.table->inputs;
    vec::F32x16 sums[T][R];
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) sums[t][r] = vec::splat16(0.0f);
    for (std::int64_t k = 0; k < inputs; k += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, inputs - k);
        vec::F32x16 x[T];
        for (int t = 0; t < T; ++t) x[t] = vec::load_some(args.x + (token + t) * inputs + k, n);
        for (int r = 0; r < R; ++r) {
            const vec::F32x16 weight = load<type>(entry.down, (line + r) * inputs + k, n);
            for (int t = 0; t < T; ++t) sums[t][r] = vec::fma(x[t], weight, sums[t][r]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r)
            args.scratch[(token + t) * args.table->most_rank + line + r] = vec::sum(sums[t][r]) * entry.scale;
}

template <FloatType type, int T>
void shrink_lines(const AdapterArgs& args, const AdapterTable::Entry& entry, std::int64_t token, std::int64_t line) {
    if (line + rank_block <= entry.rank) return shrink<type, T, rank_block>(args, entry, token, line);
    for (; line < entry.rank; ++line) shrink<type, T, 1>(args, entry, token, line);
}

// `n` outputs of one token from column `at` on.
template <FloatType type>
void expand(const AdapterArgs& args, const AdapterTable::Entry& entry, std::int64_t token, std::int64_t at, std::int64_t n) {
    const float* const low = args.scratch + token * args.table->most_rank;
    float* const out = args.out + token * args.width + args.offset + at;
    vec::F32x16 sum = vec::splat16(0.0f);
    for (std::int64_t r = 0; r < entry.rank; ++r)
        sum = vec::fma(vec::splat16(low[r]), load<type>(entry.up, r * args.table->outputs + at, n), sum);
    vec::store_some(out, vec::load_some(out, n) + sum, n);
}

// Calls function(adapter, first token, last) for the runs of tokens in [from, to) whose rows have one.
template <class F>
void for_runs(const AdapterArgs& args, std::int64_t from, std::int64_t to, F&& function) {
    const std::int32_t* const starts = args.query_start;
    for (std::int64_t first = from, last; first < to; first = last) {
        const auto token = static_cast<std::int32_t>(args.index ? args.index[first] : first);
        const std::int64_t row = std::upper_bound(starts, starts + args.rows + 1, token) - starts - 1;
        last = args.index ? first + 1 : std::min<std::int64_t>(to, starts[row + 1]);
        const AdapterTable::Entry& entry = (*args.table)[args.slot[row]];
        if (entry.rank > 0) function(entry, first, last);
    }
}

template <FloatType type>
void shrink_run(const AdapterArgs& args, const AdapterTable::Entry& entry, std::int64_t first, std::int64_t last,
                std::int64_t line) {
    if (last - first == token_block) return shrink_lines<type, token_block>(args, entry, first, line);
    for (; first < last; ++first) shrink_lines<type, 1>(args, entry, first, line);
}

template <FloatType type>
void expand_run(const AdapterArgs& args, const AdapterTable::Entry& entry, std::int64_t first, std::int64_t last,
                std::int64_t column) {
    const std::int64_t end = std::min(column + column_block, args.table->outputs);
    for (std::int64_t at = column; at < end; at += 16)
        for (std::int64_t t = first; t < last; ++t) expand<type>(args, entry, t, at, std::min<std::int64_t>(16, end - at));
}

// Calls function of the adapter's type.
template <class F>
void by_type(FloatType type, F&& function) {
    switch (type) {
        case FloatType::f32:
            return function(std::integral_constant<FloatType, FloatType::f32>{});
        case FloatType::bf16:
            return function(std::integral_constant<FloatType, FloatType::bf16>{});
        case FloatType::f16:
            return function(std::integral_constant<FloatType, FloatType::f16>{});
    }
}

}  // namespace

void adapter(const AdapterArgs& args, Worker& worker) {
    if (!args.slot) return;
    std::int64_t rank = 0;
    for (std::int64_t row = 0; row < args.rows; ++row)
        rank = std::max(rank, (*args.table)[args.slot[row]].rank);
    const std::int64_t blocks = (args.tokens + token_block - 1) / token_block;
    const std::int64_t lines = (rank + rank_block - 1) / rank_block;
    const std::int64_t columns = (args.table->outputs + column_block - 1) / column_block;
    // An item is `parts` of a block of tokens; neighbours read the same tokens.
    const auto share = [&](std::int64_t parts, std::int64_t work, auto&& run) {
        worker.share(blocks * parts, row_chunk(work), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t item = begin; item < end; ++item) {
                const std::int64_t first = item / parts * token_block, part = item % parts;
                for_runs(args, first, std::min(first + token_block, args.tokens),
                         [&](const AdapterTable::Entry& entry, std::int64_t from, std::int64_t to) {
                             by_type(entry.type, [&](auto type) { run(type, entry, from, to, part); });
                         });
            }
        });
    };
    share(lines, rank_block * args.table->inputs,
          [&](auto type, const AdapterTable::Entry& entry, std::int64_t from, std::int64_t to, std::int64_t part) {
              if (part * rank_block < entry.rank) shrink_run<type()>(args, entry, from, to, part * rank_block);
          });
    if (rank > 0)
        share(columns, column_block * rank,
              [&](auto type, const AdapterTable::Entry& entry, std::int64_t from, std::int64_t to, std::int64_t part) {
                  expand_run<type()>(args, entry, from, to, part * column_block);
              });
}

}  // namespace penstock::PENSTOCK_ISA
