// How a step's attention is cut into pieces that threads take.
//
// A row's context is split into partitions of 16 tiles of 16 tokens, counted from position 0 on whatever the step and
// the blocks' size are. A query's scores are exponentiated, summed and multiplied with the values within each
// partition, and the partitions are merged in ascending order by one formula, so that the result is the same to the bit
// however the work is cut.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "ops/kv_layout.h"

namespace penstock {

constexpr std::int64_t partition_tiles = 16;
constexpr std::int64_t partition_lanes = partition_tiles * kv_tile;
static_assert(partition_lanes == kv_run);  // a rank has whole partitions
constexpr std::int64_t item_rows = 72;     // most queries times heads of an item

// Consecutive queries of one row.
struct QueryUnit {
    std::int64_t row, token, count;
    std::int64_t position;  // of the first query
    std::int64_t state;     // where the first query's states are kept, if several items work on the unit; else -1
    std::int64_t states;    // of each query
    std::int64_t first = 0, end = 0;  // in a round: its turns, of each of which there is a state
};

// A unit's part in an item. If it folds, it leaves one state for all of the item's partitions, else one for each.
struct AttentionPart {
    std::int64_t unit;
    std::int64_t state;  // the first it leaves, of the unit's
    bool folds;
};

// Partitions [begin, end), of those that this rank has, for units that read the same blocks there.
struct AttentionItem {
    std::int64_t first_part, parts;
    std::int64_t begin, end;
    std::int64_t tokens;
};

struct SplitQuery {
    std::int64_t token;
    std::int64_t state, states;  // its first one, and how many
};

// Where contexts lie with several ranks, all compute in rounds: what one leaves of a round fits what they share. A
// context's turn t is its partitions t · ranks to (t + 1) · ranks, of which each rank has one.
struct AttentionRound {
    std::int64_t first_item, end_item;
    std::int64_t first_query, end_query;  // of `dealt`
    std::int64_t pieces;                  // as of a plan
};

// A query in a round.
struct DealtQuery {
    std::int64_t token;
    std::int64_t first, end;   // partitions of the round that it sees, counted in all
    std::int64_t state, turn;  // its first one in each rank's slot, and of which turn
    std::int64_t kept;         // where what it has so far is kept between its rounds; -1: this is the only one
    bool begins, ends;
};

struct AttentionPlan {
    std::vector<AttentionItem> items;  // the longest first, of each round
    std::vector<AttentionPart> parts;
    std::vector<QueryUnit> units;
    std::vector<SplitQuery> split;  // the queries of units that keep states
    std::int64_t head_chunk = 1;    // query heads of a KV head that an item treats at a time
    std::int64_t head_chunks = 1;
    std::int64_t pieces = 1;  // of work, an item's on one KV head each, that a thread takes at a time

    std::vector<AttentionRound> rounds;
    std::vector<DealtQuery> dealt;
    std::int64_t kept = 0;  // queries that states are kept of between rounds

    std::int64_t state_floats = 0;    // one head's state: sums over values, then greatest score, sum of weights
    std::unique_ptr<float[]> states;  // [states][heads][state_floats]
    std::size_t room = 0;

    std::vector<std::int64_t> order, round;  // work space of attention_plan()
};

inline std::int64_t lowest_seen(std::int64_t position, std::int64_t window, bool chunked = false) {
    if (window == 0 || position < window) return 0;
    return position - (chunked ? position % window : window - 1);
}

// Positions [low, end) that a query of a unit sees. Neither falls from one query of a row to the next.
struct Seen {
    std::int64_t low, end;
};
inline Seen seen(const AttentionRows& rows, const QueryUnit& unit, std::int64_t query) {
    const std::int64_t position = unit.position + query, context = rows.context_len[unit.row], side = rows.window / 2;
    const MaskKind kind = rows.masks ? rows.masks[unit.row] : MaskKind::causal;
    if (rows.whole || kind == MaskKind::cross || (kind == MaskKind::bidirectional && rows.window == 0))
        return {0, context};
    if (kind == MaskKind::bidirectional)
        return {std::max<std::int64_t>(0, position - side), std::min(context, position + side + 1)};
    const std::int64_t low = lowest_seen(position, rows.window, rows.chunked);
    if (kind == MaskKind::causal) return {low, position + 1};
    const std::int32_t* const span = rows.spans + 2 * (unit.token + query);
    return {std::min<std::int64_t>(low, span[0]), std::clamp<std::int64_t>(span[1], position + 1, context)};
}

// Floats of one head's state, whatever the cache's type is: layers of several types share a plan.
inline std::int64_t state_floats(const KvLayout& layout) { return round_up(layout.value_dim, kv_group) + 16; }

// Bytes that a rank leaves of a unit's queries for one turn at most: what it has to be able to leave at a time.
inline std::int64_t least_room(const KvLayout& layout, std::int64_t heads) {
    return std::max(item_rows * layout.heads, 2 * heads) * state_floats(layout) * 4;
}

// Made by one member of the team; `plan` keeps its memory between steps. Where contexts lie with several ranks, all of
// them plan the same rounds, of as many heads as any has.
void attention_plan(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
                    Worker& worker);

}  // namespace penstock
