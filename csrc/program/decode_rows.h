// Steps in which every row computes one token and wants its logits, filled from the block tables of request slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "program/program.h"

namespace penstock {

class DecodeRows {
public:
    // Blocks of a cache group: [slots, width] and how many of each are used. The caller's, in which rows append.
    struct Table {
        std::int32_t* blocks = nullptr;
        std::int64_t* used = nullptr;
    };
    struct Row {
        std::int64_t slot = 0, start = 0, token = 0;
        bool prompt = false;  // of kind prompt, at level fast
    };

    DecodeRows(std::vector<Table> tables, std::int64_t slots, std::int64_t width, std::int64_t block_size);

    DecodeRows(const DecodeRows&) = delete;  // its programs' inputs point into it
    DecodeRows& operator=(const DecodeRows&) = delete;

    std::int64_t most() const { return slots_; }

    // Begins a step of that many rows.
    void begin(std::int64_t rows);
    // Blocks that a slot's table grows by, one after the other.
    void append(std::size_t group, std::int64_t slot, std::int64_t block);
    // The step's next row, whose blocks have been appended.
    void add(const Row& row);
    // All rows are there; `fast` as for steps of any kind.
    void finish(bool fast);
    // The forward pass, and then the program of logits over its results.
    void run(Program& body, Program& head) const;

    const StepInputs& inputs() const { return body_; }

private:
    struct Group {
        Table table;
        std::vector<std::int64_t> slot;
        std::vector<std::int32_t> rows;  // [rows, width], where slots do not follow each other
    };

    void check_slot(std::int64_t slot) const;

    std::vector<Group> groups_;
    std::int64_t slots_, width_, block_size_;
    std::vector<std::int64_t> token_ids_, positions_, state_slot_, index_;
    std::vector<std::int32_t> query_start_, context_len_, kind_rows_;
    std::vector<std::uint8_t> prompt_;
    std::int64_t filled_ = 0, widest_ = 0;
    RowKinds kinds_{};
    StepInputs body_, head_;
};

}  // namespace penstock
