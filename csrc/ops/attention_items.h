// What attention does with the items of a plan.
#pragma once

#include "ops/attention_plan.h"

namespace penstock {

// Items [first, end), of which a thread takes so many pieces at a time.
struct ItemRange {
    std::int64_t first, end, pieces;
};

}  // namespace penstock

namespace penstock::PENSTOCK_ISA {

// Finishes queries that one item has all of; others leave states.
void attention_items(const AttentionArgs& args, const ItemRange& range, Worker& worker);

}  // namespace penstock::PENSTOCK_ISA
