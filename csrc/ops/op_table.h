// The ops of one instruction set.
#pragma once

#include "ops/model_ops.h"
#include "ops/ops.h"
#include "program/machine_limits.h"

namespace penstock {

struct OpTable {
    const char* isa;
    bool two_ways;  // linear() and experts() look at RowKinds
    SampledRow (*sample_row)(const RowView& row, std::int64_t vocab, const Scratch& scratch);
    RowError (*logprobs_row)(const float* logits, std::int64_t vocab, std::int64_t target, std::int64_t top,
                             const Scratch& scratch, Logprobs& out);
    void (*dequantize)(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, float* out);
    bool (*decode_codes)(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, CodeBlock* out);
    // Consecutive blocks of one row; importance [values of the blocks] weighs squared errors, null: by size alone.
    void (*encode)(BlockFormat format, const float* values, const float* importance, std::int64_t num_blocks,
                   std::uint8_t* out);
#define PENSTOCK_MEMBER(name, Args) void (*name)(const Args& args, Worker& worker);
    PENSTOCK_MODEL_OPS(PENSTOCK_MEMBER, PENSTOCK_MEMBER, PENSTOCK_MEMBER)
#undef PENSTOCK_MEMBER
    void (*attention_plan)(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
                           Worker& worker);
    void (*attention)(const AttentionArgs& args, Worker& worker);
    void (*shared_attention)(const SharedAttentionArgs& args, Worker& worker);
    // Of machine_limits.h: operations done, and something of all bytes (a multiple of 256).
    std::int64_t (*run_limit)(Limit limit, std::int64_t rounds);
    std::uint64_t (*read_memory)(const std::byte* from, std::int64_t bytes);
};

}  // namespace penstock
