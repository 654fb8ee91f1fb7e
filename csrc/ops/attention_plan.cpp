#include "ops/attention_plan.h"

#include <algorithm>
#include <numeric>

namespace penstock {
namespace {

class Planner {
public:
    Planner(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
            std::int64_t threads)
        : rows_(rows), layout_(layout), heads_(heads), threads_(threads), plan_(plan) {}

    void make() {
        plan_.items.clear();
        plan_.parts.clear();
        plan_.units.clear();
        plan_.split.clear();
        const std::int64_t group = (heads_ + layout_.heads - 1) / layout_.heads;
        plan_.head_chunks = (group + item_rows - 1) / item_rows;
        plan_.head_chunk = (group + plan_.head_chunks - 1) / plan_.head_chunks;
        most_tokens_ = std::max<std::int64_t>(1, item_rows / plan_.head_chunk);
        cut_rows();
        largest_ = largest_item();
        group_short_units();
        for (std::int64_t unit = short_units_; unit < count(plan_.units); ++unit)
            emit(&unit, &unit + 1, first_partition(plan_.units[at(unit)]), end_partition(plan_.units[at(unit)]));
        place_states();
        const auto cost = [](const AttentionItem& item) {
            return (item.end - item.begin) * std::max<std::int64_t>(item.tokens, 2);
        };
        std::ranges::stable_sort(plan_.items, std::greater<>(), cost);
        std::int64_t total = 0;
        for (const AttentionItem& item : plan_.items) total += cost(item) * layout_.heads * plan_.head_chunks;
        if (total > 0) plan_.pieces = std::clamp<std::int64_t>(total / (8 * threads_ * cost(plan_.items[0])), 1, 8);
    }

private:
    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    template <class T>
    static std::int64_t count(const std::vector<T>& items) {
        return static_cast<std::int64_t>(items.size());
    }

    std::int64_t first_partition(const QueryUnit& unit) const { return seen(rows_, unit, 0).low / partition_lanes; }
    std::int64_t end_partition(const QueryUnit& unit) const {
        return (seen(rows_, unit, unit.count - 1).end - 1) / partition_lanes + 1;
    }
    // Partitions before it are seen in full by every query of the unit, but for their beginning under a window.
    std::int64_t full_partitions(const QueryUnit& unit) const { return seen(rows_, unit, 0).end / partition_lanes; }

    // Rows with few queries become one unit, first in the list; those with many become several.
    void cut_rows() {
        const std::int64_t few = std::max<std::int64_t>(1, most_tokens_ / 2);
        const auto add = [&](std::int64_t row, std::int64_t done, std::int64_t queries) {
            const std::int64_t total = rows_.query_start[row + 1] - rows_.query_start[row];
            plan_.units.push_back(
                {row, rows_.query_start[row] + done, queries, rows_.context_len[row] - total + done, -1, 0});
        };
        const auto queries_of = [&](std::int64_t row) { return rows_.query_start[row + 1] - rows_.query_start[row]; };
        for (std::int64_t row = 0; row < rows_.rows; ++row)
            if (const std::int64_t queries = queries_of(row); queries > 0 && queries <= few) add(row, 0, queries);
        short_units_ = count(plan_.units);
        for (std::int64_t row = 0; row < rows_.rows; ++row)
            if (const std::int64_t queries = queries_of(row); queries > few)
                for (std::int64_t done = 0; done < queries; done += most_tokens_)
                    add(row, done, std::min(most_tokens_, queries - done));
    }

    // Partitions an item may have, times its tokens, if every thread is to get several items.
    std::int64_t largest_item() const {
        std::int64_t total = 0;
        for (const QueryUnit& unit : plan_.units) total += (end_partition(unit) - first_partition(unit)) * unit.count;
        return std::max<std::int64_t>(1, total * layout_.heads * plan_.head_chunks / (4 * threads_));
    }

    // The blocks a unit reads in partitions it sees in full; units are compared by them.
    struct Blocks {
        std::int64_t first, end;
        const std::int32_t* table;
    };
    Blocks full_blocks(std::int64_t unit) const {
        const QueryUnit& u = plan_.units[at(unit)];
        const std::int64_t first = seen(rows_, u, 0).low / layout_.block_size;
        const std::int64_t end = blocks_before(full_partitions(u));
        return {first, std::max(first, end), rows_.block_table + u.row * rows_.table_width};
    }
    std::int64_t blocks_before(std::int64_t partition) const {
        return (partition * partition_lanes + layout_.block_size - 1) / layout_.block_size;
    }

    bool before(std::int64_t left, std::int64_t right) const {
        const Blocks a = full_blocks(left), b = full_blocks(right);
        if (a.first != b.first) return a.first < b.first;
        return std::lexicographical_compare(a.table + a.first, a.table + a.end, b.table + b.first, b.table + b.end);
    }
    // Whether both see partition `p` in full and in the same blocks, if they do so in all before it.
    bool agree(std::int64_t left, std::int64_t right, std::int64_t p) const {
        const Blocks a = full_blocks(left), b = full_blocks(right);
        const std::int64_t begin = std::max(a.first, p * partition_lanes / layout_.block_size),
                           end = blocks_before(p + 1);
        return a.first == b.first && end <= a.end && end <= b.end &&
               std::equal(a.table + begin, a.table + end, b.table + begin);
    }

    void group_short_units() {
        plan_.order.resize(at(short_units_));
        std::iota(plan_.order.begin(), plan_.order.end(), std::int64_t{0});
        std::ranges::sort(plan_.order,
                          [&](std::int64_t a, std::int64_t b) { return before(a, b) || (!before(b, a) && a < b); });
        const std::int64_t* const all = plan_.order.data();
        for (const std::int64_t* from = all; from < all + short_units_;) {
            const std::int64_t start = first_partition(plan_.units[at(*from)]);
            const std::int64_t* to = from + 1;
            while (to < all + short_units_ && agree(*from, *to, start)) ++to;
            emit_common(from, to, start);
            from = to;
        }
    }

    // Sorted units that agree in partition `begin`, or one unit.
    void emit_common(const std::int64_t* from, const std::int64_t* to, std::int64_t begin) {
        if (to - from == 1) return emit(from, to, begin, end_partition(plan_.units[at(*from)]));
        std::int64_t end = begin + 1;
        while (agree(*from, to[-1], end)) ++end;
        emit(from, to, begin, end);
        while (from < to) {
            if (end == end_partition(plan_.units[at(*from)])) {
                ++from;
                continue;
            }
            const std::int64_t* next = from + 1;
            while (next < to && agree(*from, *next, end)) ++next;
            emit_common(from, next, end);
            from = next;
        }
    }

    // Items for these units and partitions, none with too many rows or too much work.
    void emit(const std::int64_t* from, const std::int64_t* to, std::int64_t begin, std::int64_t end) {
        while (from < to) {
            std::int64_t tokens = 0;
            const std::int64_t* next = from;
            while (next < to && (tokens == 0 || tokens + plan_.units[at(*next)].count <= most_tokens_))
                tokens += plan_.units[at(*next++)].count;
            const std::int64_t step = threads_ == 1 ? end - begin : std::max<std::int64_t>(1, largest_ / tokens);
            for (std::int64_t p = begin; p < end; p += step) add_item(from, next, tokens, p, std::min(p + step, end));
            from = next;
        }
    }

    void add_item(const std::int64_t* from, const std::int64_t* to, std::int64_t tokens, std::int64_t begin,
                  std::int64_t end) {
        plan_.items.push_back({count(plan_.parts), to - from, begin, end, tokens});
        for (; from < to; ++from) {
            QueryUnit& unit = plan_.units[at(*from)];
            const bool folds = unit.states == 0;
            plan_.parts.push_back({*from, unit.states, folds});
            unit.states += folds ? 1 : end - begin;
            if (end < end_partition(unit)) unit.state = 0;  // more to come
        }
    }

    void place_states() {
        plan_.state_floats = padded_value_dim(layout_) + 16;
        std::int64_t total = 0;
        for (QueryUnit& unit : plan_.units) {
            if (unit.state < 0) continue;
            unit.state = total;
            total += unit.states * unit.count;
            for (std::int64_t q = 0; q < unit.count; ++q)
                plan_.split.push_back({unit.token + q, unit.state + q * unit.states, unit.states});
        }
        const std::size_t floats = at(total * heads_ * plan_.state_floats);
        if (floats <= plan_.room) return;
        plan_.states.reset(new float[floats]);
        plan_.room = floats;
    }

    const AttentionRows& rows_;
    const KvLayout& layout_;
    const std::int64_t heads_, threads_;
    AttentionPlan& plan_;
    std::int64_t most_tokens_ = 1, short_units_ = 0, largest_ = 1;
};

}  // namespace

void attention_plan(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
                    Worker& worker) {
    worker.share(1, 1, [&](std::int64_t, std::int64_t) { Planner(rows, layout, heads, plan, worker.count()).make(); });
}

}  // namespace penstock
