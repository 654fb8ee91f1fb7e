#include "program/decode_rows.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

namespace penstock {
namespace {

constexpr RowKinds none_of_prompt{nullptr, 0};

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

}  // namespace

DecodeRows::DecodeRows(std::vector<Table> tables, std::int64_t slots, std::int64_t width, std::int64_t block_size)
    : slots_(slots), width_(width), block_size_(block_size) {
    if (slots < 1 || width < 1 || block_size < 1)
        throw std::invalid_argument("slots, blocks a slot and tokens a block must be at least 1.");
    for (auto* column : {&token_ids_, &positions_, &state_slot_, &index_}) column->resize(size(slots));
    for (auto* column : {&context_len_, &kind_rows_}) column->resize(size(slots));
    query_start_.resize(size(slots) + 1);
    prompt_.resize(size(slots));
    std::iota(index_.begin(), index_.end(), 0);
    std::iota(query_start_.begin(), query_start_.end(), 0);
    for (const Table& table : tables)
        groups_.push_back(
            {table, std::vector<std::int64_t>(size(slots)), std::vector<std::int32_t>(size(slots * width))});
    body_.token_ids = token_ids_.data();
    body_.positions = positions_.data();
    body_.query_start = query_start_.data();
    body_.context_len = context_len_.data();
    body_.state_slot = state_slot_.data();
    body_.logit_index = head_.logit_index = index_.data();
    body_.groups.resize(groups_.size());
}

void DecodeRows::check_slot(std::int64_t slot) const {
    if (slot < 0 || slot >= slots_)
        throw std::out_of_range("slot " + std::to_string(slot) + " is none of " + std::to_string(slots_) + ".");
}

void DecodeRows::begin(std::int64_t rows) {
    if (rows < 1 || rows > slots_)
        throw std::out_of_range(std::to_string(rows) + " rows do not fit " + std::to_string(slots_) + " slots.");
    filled_ = widest_ = 0;
    body_.tokens = body_.rows = body_.logit_rows = head_.logit_rows = rows;
}

void DecodeRows::append(std::size_t group, std::int64_t slot, std::int64_t block) {
    check_slot(slot);
    const Table& table = groups_.at(group).table;
    std::int64_t& used = table.used[slot];
    if (used < 0 || used >= width_) throw std::out_of_range("the table of slot " + std::to_string(slot) + " is full.");
    table.blocks[slot * width_ + used++] = static_cast<std::int32_t>(block);
}

void DecodeRows::add(const Row& row) {
    check_slot(row.slot);
    const std::int64_t logical = row.start / block_size_;
    if (filled_ == body_.rows || row.start < 0 || logical >= width_)
        throw std::out_of_range("position " + std::to_string(row.start) + " of slot " + std::to_string(row.slot) +
                                " lies outside of its table, or the step has all its rows.");
    for (const Group& group : groups_)
        if (logical >= group.table.used[row.slot])
            throw std::out_of_range("slot " + std::to_string(row.slot) + " has no block for position " +
                                    std::to_string(row.start) + ".");
    const std::size_t at = size(filled_++);
    token_ids_[at] = row.token;
    positions_[at] = row.start;
    state_slot_[at] = row.slot;
    context_len_[at] = static_cast<std::int32_t>(row.start + 1);
    prompt_[at] = row.prompt;
    widest_ = std::max(widest_, logical + 1);
    for (Group& group : groups_)
        group.slot[at] = group.table.blocks[row.slot * width_ + logical] * block_size_ + row.start % block_size_;
}

void DecodeRows::finish(bool fast) {
    if (filled_ != body_.rows) throw std::logic_error("a step lacks rows.");
    const std::int64_t first = state_slot_[0];
    bool follow = true;
    for (std::int64_t r = 1; r < filled_; ++r) follow &= state_slot_[size(r)] == first + r;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        Group& group = groups_[g];
        const std::int32_t* blocks = group.table.blocks + first * width_;
        if (!follow) {
            for (std::int64_t r = 0; r < filled_; ++r)
                std::copy_n(group.table.blocks + state_slot_[size(r)] * width_, widest_,
                            &group.rows[size(r * widest_)]);
            blocks = group.rows.data();
        }
        body_.groups[g] = {blocks, follow ? width_ : widest_, group.slot.data(), nullptr};
    }
    body_.kinds = body_.logit_kinds = head_.kinds = head_.logit_kinds = fast ? &none_of_prompt : nullptr;
    if (!fast) return;
    std::size_t next = 0;
    for (const bool prompt : {true, false}) {
        for (std::int64_t r = 0; r < filled_; ++r)
            if ((prompt_[size(r)] != 0) == prompt) kind_rows_[next++] = static_cast<std::int32_t>(r);
        if (prompt) kinds_.prompt = static_cast<std::int64_t>(next);
    }
    kinds_.rows = kind_rows_.data();
    body_.kinds = &kinds_;
}

void DecodeRows::run(Program& body, Program& head) const {
    body.run(body_);
    head.run(head_);
}

}  // namespace penstock
