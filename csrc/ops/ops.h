// What the ops take and give, shared by every instruction set: plain structs of pointers and numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "packing/canonical.h"
#include "program/machine_limits.h"

namespace penstock {

enum class RowError : std::uint8_t {
    none = 0,
    not_finite = 1,       // a logit is NaN or +infinity, or all are -infinity
    nothing_allowed = 2,  // every token is banned by the row's masks
};

// One row to sample: its logits and what was asked of it. All token ids are below the vocabulary size.
struct RowView {
    const float* logits;
    const std::int32_t* bias_ids;
    const double* bias_values;
    std::int64_t num_biases;
    const std::uint32_t* allowed;  // bit t % 32 of word t / 32; null allows all
    const std::uint32_t* grammar;  // the same, of this step alone
    const std::int32_t* banned;
    std::int64_t num_banned;
    const std::int32_t* stop_ids;  // banned too, while the row is below its min_tokens
    std::int64_t num_stop_ids;
    const std::int32_t* seen_ids;     // distinct tokens of prompt and output
    const std::int64_t* seen_counts;  // how often each was generated
    std::int64_t num_seen;
    double repetition_penalty, presence_penalty, frequency_penalty;
    double temperature, typical_p, top_p, min_p;
    std::int64_t top_k;
    std::uint64_t seed, position;  // whose noise, with the sequence's number
    std::uint32_t sequence;
};

// Work space of one thread for a vocabulary of V tokens.
struct Scratch {
    float* logits;         // [V]
    float* values;         // [V]
    double* weights;       // [V]
    std::uint64_t* keys;   // [V]
    std::uint32_t* ids;    // [V]
    std::uint32_t* index;  // [V]
};

struct Logprobs {
    double logprob;
    std::int64_t rank;      // 1 is the most probable; equal logits rank by token id
    std::int32_t* top_ids;  // [top]
    double* top_logprobs;   // [top]
};

struct SampledRow {
    std::int64_t token;
    RowError error;
};

// Of the ops of a model's forward pass: model_ops.h.
class Worker;
struct ActivateArgs;
struct AdapterArgs;
struct AddArgs;
struct AttentionArgs;
struct AttentionPlan;
struct AttentionRows;
struct DeltaRuleArgs;
struct EmbeddingArgs;
struct ExpertsArgs;
struct GateUpArgs;
struct GatedNormArgs;
struct HeadLinearArgs;
struct KvLayout;
struct LatentWriteArgs;
struct LayerNormArgs;
struct LinearArgs;
struct MatchRmsArgs;
struct MultiplyArgs;
struct PositionScalesArgs;
struct RmsNormArgs;
struct RopeTablesArgs;
struct RopeWriteArgs;
struct RotateArgs;
struct RouteArgs;
struct ScaleRowsArgs;
struct SelectiveScanArgs;
struct ShortConvArgs;
struct SigmoidGateArgs;
struct SoftCapArgs;
struct StatisticalTopkArgs;
struct TakeRowsArgs;
struct WeightedSumArgs;

// The ops of one instruction set.
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
    void (*rms_norm)(const RmsNormArgs& args, Worker& worker);
    void (*layer_norm)(const LayerNormArgs& args, Worker& worker);
    void (*gate_up)(const GateUpArgs& args, Worker& worker);
    void (*route_experts)(const RouteArgs& args, Worker& worker);
    void (*activate)(const ActivateArgs& args, Worker& worker);
    void (*add)(const AddArgs& args, Worker& worker);
    void (*sigmoid_gate)(const SigmoidGateArgs& args, Worker& worker);
    void (*soft_cap)(const SoftCapArgs& args, Worker& worker);
    void (*scale_rows)(const ScaleRowsArgs& args, Worker& worker);
    void (*position_scales)(const PositionScalesArgs& args, Worker& worker);
    void (*take_rows)(const TakeRowsArgs& args, Worker& worker);
    void (*multiply)(const MultiplyArgs& args, Worker& worker);
    void (*weighted_sum)(const WeightedSumArgs& args, Worker& worker);
    void (*match_rms)(const MatchRmsArgs& args, Worker& worker);
    void (*statistical_topk)(const StatisticalTopkArgs& args, Worker& worker);
    void (*rotate)(const RotateArgs& args, Worker& worker);
    void (*rope_tables)(const RopeTablesArgs& args, Worker& worker);
    void (*rope_write)(const RopeWriteArgs& args, Worker& worker);
    void (*attention_plan)(const AttentionRows& rows, const KvLayout& layout, std::int64_t heads, AttentionPlan& plan,
                           Worker& worker);
    void (*attention)(const AttentionArgs& args, Worker& worker);
    void (*latent_write)(const LatentWriteArgs& args, Worker& worker);
    void (*head_linear)(const HeadLinearArgs& args, Worker& worker);
    void (*embedding)(const EmbeddingArgs& args, Worker& worker);
    void (*linear)(const LinearArgs& args, Worker& worker);
    void (*experts)(const ExpertsArgs& args, Worker& worker);
    void (*gated_norm)(const GatedNormArgs& args, Worker& worker);
    void (*short_conv)(const ShortConvArgs& args, Worker& worker);
    void (*selective_scan)(const SelectiveScanArgs& args, Worker& worker);
    void (*delta_rule)(const DeltaRuleArgs& args, Worker& worker);
    void (*adapter)(const AdapterArgs& args, Worker& worker);
    // Of machine_limits.h: operations done, and something of all bytes (a multiple of 256).
    std::int64_t (*run_limit)(Limit limit, std::int64_t rounds);
    std::uint64_t (*read_memory)(const std::byte* from, std::int64_t bytes);
};

}  // namespace penstock
