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
        plan_.rounds.clear();
        plan_.dealt.clear();
        plan_.state_floats = state_floats(layout_);
        const std::int64_t group = (heads_ + layout_.heads - 1) / layout_.heads;
        plan_.head_chunks = (group + item_rows - 1) / item_rows;
        plan_.head_chunk = (group + plan_.head_chunks - 1) / plan_.head_chunks;
        most_tokens_ = std::max<std::int64_t>(1, item_rows / plan_.head_chunk);
        cut_rows();
        sort_units();
        if (layout_.ranks > 1) return make_rounds();
        const std::int64_t* const all = plan_.order.data();
        emit_all(all, all + count(plan_.order));
        place_states();
        plan_.pieces = sort_items(0);
    }

private:
    static std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
    template <class T>
    static std::int64_t count(const std::vector<T>& items) {
        return static_cast<std::int64_t>(items.size());
    }
    static std::int64_t ceil(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

    // Partitions are those that this rank has, counted among themselves.
    std::int64_t partition(std::int64_t position) const { return own_position(layout_, position) / partition_lanes; }
    std::int64_t first_partition(const QueryUnit& unit) const {
        return std::max(unit.first, partition(seen(rows_, unit, 0).low));
    }
    std::int64_t end_partition(const QueryUnit& unit) const {
        const std::int64_t end = seen(rows_, unit, unit.count - 1).end;
        const std::int64_t all = ceil(own_position(layout_, end), partition_lanes);
        return unit.end ? std::min(unit.end, all) : std::max<std::int64_t>(1, all);  // one that sees nothing is told so
    }
    // Partitions before it are seen in full by every query of the unit, but for their beginning under a window.
    std::int64_t full_partitions(const QueryUnit& unit) const { return partition(seen(rows_, unit, 0).end); }

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
    std::int64_t largest_item(const std::int64_t* from, const std::int64_t* to) const {
        std::int64_t total = 0;
        for (; from < to; ++from) {
            const QueryUnit& unit = plan_.units[at(*from)];
            total += std::max<std::int64_t>(0, end_partition(unit) - first_partition(unit)) * unit.count;
        }
        return std::max<std::int64_t>(1, total * layout_.heads * plan_.head_chunks / (4 * threads_));
    }

    // The blocks a unit reads in partitions that it sees in full, whichever rank has these; units are compared by them.
    struct Blocks {
        std::int64_t first, end;
        const std::int32_t* table;
        std::int64_t full;  // positions
    };
    Blocks full_blocks(std::int64_t unit) const {
        const QueryUnit& u = plan_.units[at(unit)];
        const std::int64_t size = layout_.block_size * layout_.ranks, first = seen(rows_, u, 0).low / size;
        const std::int64_t full = seen(rows_, u, 0).end / partition_lanes * partition_lanes;
        return {first, std::max(first, ceil(full, size)), rows_.block_table + u.row * rows_.table_width, full};
    }

    bool before(std::int64_t left, std::int64_t right) const {
        const Blocks a = full_blocks(left), b = full_blocks(right);
        if (a.first != b.first) return a.first < b.first;
        const auto order = std::lexicographical_compare_three_way(a.table + a.first, a.table + a.end, b.table + b.first,
                                                                  b.table + b.end);
        return order != 0 ? order < 0 : a.full < b.full;
    }
    // Whether both see partition `p` in full and in the same blocks, if they do so in all before it.
    bool agree(std::int64_t left, std::int64_t right, std::int64_t p) const {
        const Blocks a = full_blocks(left), b = full_blocks(right);
        if (p >= std::min(full_partitions(plan_.units[at(left)]), full_partitions(plan_.units[at(right)])))
            return false;
        const std::int64_t begin = std::max(a.first, p * partition_lanes / layout_.block_size),
                           end = ceil((p + 1) * partition_lanes, layout_.block_size);
        return a.first == b.first && std::equal(a.table + begin, a.table + end, b.table + begin);
    }

    // Units with few queries come first, those beside each other that read the same blocks.
    void sort_units() {
        plan_.order.resize(plan_.units.size());
        std::iota(plan_.order.begin(), plan_.order.end(), std::int64_t{0});
        std::sort(plan_.order.begin(), plan_.order.begin() + short_units_,
                  [&](std::int64_t a, std::int64_t b) { return before(a, b) || (!before(b, a) && a < b); });
    }

    // Items for units in that order.
    void emit_all(const std::int64_t* from, const std::int64_t* to) {
        largest_ = largest_item(from, to);
        const auto alone = [&](std::int64_t unit) { return unit >= short_units_; };
        const std::int64_t* const rest = std::find_if(from, to, alone);
        group_short_units(from, rest);
        for (const std::int64_t* unit = rest; unit < to; ++unit)
            emit(unit, unit + 1, first_partition(plan_.units[at(*unit)]), end_partition(plan_.units[at(*unit)]));
    }

    void group_short_units(const std::int64_t* from, const std::int64_t* end) {
        while (from < end) {
            const std::int64_t start = first_partition(plan_.units[at(*from)]);
            const std::int64_t* to = from + 1;
            while (to < end && agree(*from, *to, start)) ++to;
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
            if (unit.end) {  // of a round: a state for each partition, at the place of its turn
                plan_.parts.push_back({*from, begin - unit.first, false});
                continue;
            }
            const bool folds = unit.states == 0;
            plan_.parts.push_back({*from, unit.states, folds});
            unit.states += folds ? 1 : end - begin;
            if (end < end_partition(unit)) unit.state = 0;  // more to come
        }
    }

    // Items from `first` on, the longest first; how many pieces of them a thread takes at a time.
    std::int64_t sort_items(std::int64_t first) {
        const auto cost = [](const AttentionItem& item) {
            return (item.end - item.begin) * std::max<std::int64_t>(item.tokens, 2);
        };
        const auto from = plan_.items.begin() + first;
        std::stable_sort(from, plan_.items.end(),
                         [&](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
        std::int64_t total = 0;
        for (auto item = from; item != plan_.items.end(); ++item)
            total += cost(*item) * layout_.heads * plan_.head_chunks;
        return total > 0 ? std::clamp<std::int64_t>(total / (8 * threads_ * cost(*from)), 1, 8) : 1;
    }

    void place_states() {
        std::int64_t total = 0;
        for (QueryUnit& unit : plan_.units) {
            if (unit.state < 0) continue;
            unit.state = total;
            total += unit.states * unit.count;
            for (std::int64_t q = 0; q < unit.count; ++q)
                plan_.split.push_back({unit.token + q, unit.state + q * unit.states, unit.states});
        }
        keep(total);
    }

    // Memory for so many states of all heads.
    void keep(std::int64_t total) {
        const std::size_t floats = at(total * heads_ * plan_.state_floats);
        if (floats <= plan_.room) return;
        plan_.states.reset(new float[floats]);
        plan_.room = floats;
    }

    // All ranks plan the same rounds and differ in their items.
    void make_rounds() {
        const std::int64_t room = rows_.room / (heads_ * plan_.state_floats * 4);
        plan_.kept = 0;
        begin_round();
        for (std::size_t i = 0; i < plan_.order.size(); ++i) {
            const std::int64_t index = plan_.order[i];
            const QueryUnit unit = plan_.units[at(index)];
            const std::int64_t lanes = partition_lanes * layout_.ranks;
            const std::int64_t first = seen(rows_, unit, 0).low / lanes;
            const std::int64_t end = ceil(seen(rows_, unit, unit.count - 1).end, lanes);
            if (unit.count * (end - first) > room - used_) end_round();
            if (unit.count * (end - first) <= room) {
                add_to_round(index, {first, end}, true, true);
                continue;
            }
            const std::int64_t most = std::max<std::int64_t>(1, room / unit.count), parts = ceil(end - first, most);
            for (std::int64_t p = 0; p < parts; ++p) {
                plan_.units.push_back(unit);
                const Turns turns{first + (end - first) * p / parts, first + (end - first) * (p + 1) / parts};
                add_to_round(count(plan_.units) - 1, turns, p == 0, p + 1 == parts);
                end_round();
            }
            plan_.kept = std::max(plan_.kept, unit.count);
        }
        end_round();
        keep(plan_.kept);
    }

    struct Turns {
        std::int64_t first, end;
    };

    void begin_round() {
        plan_.round.clear();
        used_ = 0;
        first_query_ = count(plan_.dealt);
    }

    void add_to_round(std::int64_t index, const Turns& turns, bool begins, bool ends) {
        QueryUnit& unit = plan_.units[at(index)];
        unit.first = turns.first;
        unit.end = turns.end;
        unit.states = turns.end - turns.first;
        unit.state = used_;
        for (std::int64_t q = 0; q < unit.count; ++q) {
            const Seen view = seen(rows_, unit, q);
            const std::int64_t first = std::max(view.low / partition_lanes, turns.first * layout_.ranks);
            const std::int64_t end = std::min(ceil(view.end, partition_lanes), turns.end * layout_.ranks);
            plan_.dealt.push_back({unit.token + q, first, end, unit.state + q * unit.states, turns.first,
                                   begins && ends ? -1 : q, begins, ends});
        }
        used_ += unit.count * unit.states;
        plan_.round.push_back(index);
    }

    void end_round() {
        if (plan_.round.empty()) return;
        const std::int64_t first = count(plan_.items);
        emit_all(plan_.round.data(), plan_.round.data() + count(plan_.round));
        const std::int64_t pieces = sort_items(first);
        plan_.rounds.push_back({first, count(plan_.items), first_query_, count(plan_.dealt), pieces});
        begin_round();
    }

    const AttentionRows& rows_;
    const KvLayout& layout_;
    const std::int64_t heads_, threads_;
    AttentionPlan& plan_;
    std::int64_t most_tokens_ = 1, short_units_ = 0, largest_ = 1;
    std::int64_t used_ = 0, first_query_ = 0;  // of the round at hand: states, and its first query
};

}  // namespace

void attention_plan(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
                    Worker& worker) {
    worker.share(1, 1, [&](std::int64_t, std::int64_t) { Planner(rows, layout, heads, plan, worker.count()).make(); });
}

}  // namespace penstock
