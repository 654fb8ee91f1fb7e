// A recorded forward pass: ops over values that lie in one arena, replayed by one call without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ops/model_ops.h"

namespace penstock {

// What a run works on; all pointers are the caller's.
struct StepInputs {
    std::int64_t tokens = 0, rows = 0, logit_rows = 0;
    const std::int64_t* token_ids = nullptr;
    const std::int64_t* positions = nullptr;
    const std::int64_t* token_types = nullptr;  // [tokens], null for models without
    const std::int32_t* query_start = nullptr;
    const std::int32_t* context_len = nullptr;
    const std::int64_t* state_slot = nullptr;    // [rows], where a row's recurrent state lies
    const std::int64_t* state_after = nullptr;   // [tokens], where it goes after each; null: it stays there
    const std::int64_t* adapter_slot = nullptr;  // [tokens, adapters], 0 for none; null where no token has one
    const float* adapter_scale = nullptr;        // [tokens, adapters]
    std::int64_t adapters = 0;
    const MaskKind* masks = nullptr;            // [rows], null if all are causal
    const std::int32_t* spans = nullptr;        // [tokens, 2], as in AttentionRows
    const std::int64_t* logit_index = nullptr;  // [logit_rows], tokens whose logits are wanted
    // Rows of hidden states that are given from outside: [levels, injected, N].
    std::int64_t injected = 0;
    const std::int64_t* injected_rows = nullptr;
    const float* injected_values = nullptr;
    struct Group {
        const std::int32_t* block_table = nullptr;  // [rows, table_width]
        std::int64_t table_width = 0;
        const std::int64_t* slot = nullptr;  // [tokens]
        // [rows], entries of another sequence (an encoder's), all of which every query sees; null: the rows' own
        // tokens.
        const std::int32_t* context_len = nullptr;
    };
    std::vector<Group> groups;
    const RowKinds* kinds = nullptr;        // of tokens, at level fast
    const RowKinds* logit_kinds = nullptr;  // of logit rows
};

// How many rows of a step a value has.
enum class Extent : int { tokens, logit_rows };

class Frame;

class Program {
public:
    using Value = int;
    static constexpr Value none = -1;

    struct Op {
        const char* name;
        std::function<void(const Frame&, Worker&)> run;
        std::vector<Value> reads, writes;
        // Scratch bytes it needs for that many rows; null for none.
        std::function<std::int64_t(std::int64_t)> scratch;
        Extent extent = Extent::tokens;
    };

    // A value in the arena, `row_bytes` for each row of `extent`.
    Value activation(std::int64_t row_bytes, Extent extent);
    // Memory of the caller that lives as long as the program.
    Value constant(const void* memory);
    // Keeps a value's place in the arena after the op that reads it last, so that it can be read after a run.
    void keep(Value value);
    void add(Op op);
    // Its ops exchange with the other ranks of this group, which outlives the program.
    void join(RankGroup& group);
    // Owned by the program; made anew by its op in each run.
    int add_plan();

    // Gives every activation its place. Nothing can be added afterwards.
    void finish(std::int64_t max_tokens, std::int64_t max_logit_rows);
    // Throws std::invalid_argument where the step is larger than finish() was told, and std::runtime_error where a
    // group it has joined was stopped, which a run that throws does itself.
    void run(const StepInputs& step);

    // From now on every run adds to seconds(), as the caller's thread sees it, and to waited().
    void measure() {
        seconds_.assign(ops_.size(), 0.0);
        waited_.assign(ops_.size(), 0.0);
    }
    const std::vector<double>& seconds() const { return seconds_; }  // one an op; empty if not measured
    // Of all members together: between the end of their own part of an op and that of the others'.
    const std::vector<double>& waited() const { return waited_; }
    const std::vector<Op>& ops() const { return ops_; }

    bool finished() const { return finished_; }
    std::int64_t num_ops() const { return static_cast<std::int64_t>(ops_.size()); }
    std::int64_t arena_bytes() const { return arena_bytes_; }
    std::byte* address(Value value) const { return slots_[static_cast<std::size_t>(value)].memory; }

private:
    friend class Frame;
    struct Slot {
        std::byte* memory = nullptr;  // a constant's; an activation's once finished
        std::int64_t row_bytes = 0;   // 0 for a constant
        Extent extent = Extent::tokens;
        std::int64_t offset = 0;
        bool kept = false;
    };

    void place_activations();
    void run_all(const StepInputs& step);
    void run_measured(const Frame& frame);
    bool stopped() const;

    std::vector<Slot> slots_;
    std::vector<Op> ops_;
    std::vector<double> seconds_, waited_;
    std::vector<std::shared_ptr<AttentionPlan>> plans_;
    std::vector<RankGroup*> groups_;
    std::shared_ptr<std::byte> arena_;
    std::byte* scratch_ = nullptr;
    std::int64_t arena_bytes_ = 0, max_tokens_ = 0, max_logit_rows_ = 0;
    bool finished_ = false;
};

// What an op sees of a run.
class Frame {
public:
    Frame(const Program& program, const StepInputs& step) : step(step), program_(program) {}

    template <class T>
    T* at(Program::Value value) const {
        return value == Program::none ? nullptr : reinterpret_cast<T*>(program_.address(value));
    }
    std::int64_t count(Extent extent) const { return extent == Extent::tokens ? step.tokens : step.logit_rows; }
    const RowKinds* kinds(Extent extent) const { return extent == Extent::tokens ? step.kinds : step.logit_kinds; }
    TokenAdapters adapters(Extent extent) const {
        return {step.adapter_slot, step.adapter_scale, step.adapters,
                extent == Extent::tokens ? nullptr : step.logit_index};
    }
    AttentionPlan& plan(int index) const { return *program_.plans_[static_cast<std::size_t>(index)]; }
    std::byte* scratch() const { return program_.scratch_; }

    const StepInputs& step;

private:
    const Program& program_;
};

}  // namespace penstock
