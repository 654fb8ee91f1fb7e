// The ops of this instruction set, in one table; most are those of PENSTOCK_BASE_ISA, which may be itself.
// Attention may be that of PENSTOCK_ATTENTION_ISA.
#include "ops/attention_plan.h"
#include "ops/ops.h"

#define PENSTOCK_TEXT_OF(x) #x
#define PENSTOCK_TEXT(x) PENSTOCK_TEXT_OF(x)

#ifndef PENSTOCK_ATTENTION_ISA
#define PENSTOCK_ATTENTION_ISA PENSTOCK_ISA
#endif

namespace penstock::PENSTOCK_BASE_ISA {

SampledRow sample_row(const RowView& row, std::int64_t vocab, const Scratch& scratch);
RowError logprobs_row(const float* logits, std::int64_t vocab, std::int64_t target, std::int64_t top,
                      const Scratch& scratch, Logprobs& out);
void dequantize(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, float* out);
bool decode_codes(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, CodeBlock* out);
void encode(BlockFormat format, const float* values, const float* importance, std::int64_t num_blocks,
            std::uint8_t* out);
void rms_norm(const RmsNormArgs& args, Worker& worker);
void layer_norm(const LayerNormArgs& args, Worker& worker);
void gate_up(const GateUpArgs& args, Worker& worker);
void route_experts(const RouteArgs& args, Worker& worker);
void activate(const ActivateArgs& args, Worker& worker);
void add(const AddArgs& args, Worker& worker);
void sigmoid_gate(const SigmoidGateArgs& args, Worker& worker);
void soft_cap(const SoftCapArgs& args, Worker& worker);
void scale_rows(const ScaleRowsArgs& args, Worker& worker);
void position_scales(const PositionScalesArgs& args, Worker& worker);
void take_rows(const TakeRowsArgs& args, Worker& worker);
void multiply(const MultiplyArgs& args, Worker& worker);
void weighted_sum(const WeightedSumArgs& args, Worker& worker);
void match_rms(const MatchRmsArgs& args, Worker& worker);
void statistical_topk(const StatisticalTopkArgs& args, Worker& worker);
void rotate_heads(const RotateArgs& args, Worker& worker);
void rope_tables(const RopeTablesArgs& args, Worker& worker);
void rope_write(const RopeWriteArgs& args, Worker& worker);
void latent_write(const LatentWriteArgs& args, Worker& worker);
void embedding(const EmbeddingArgs& args, Worker& worker);
void gated_norm(const GatedNormArgs& args, Worker& worker);
void short_conv(const ShortConvArgs& args, Worker& worker);
void selective_scan(const SelectiveScanArgs& args, Worker& worker);
void delta_rule(const DeltaRuleArgs& args, Worker& worker);
void adapter(const AdapterArgs& args, Worker& worker);
std::int64_t run_limit(Limit limit, std::int64_t rounds);
std::uint64_t read_memory(const std::byte* from, std::int64_t bytes);

}  // namespace penstock::PENSTOCK_BASE_ISA

namespace penstock::PENSTOCK_ATTENTION_ISA {
void attention(const AttentionArgs& args, Worker& worker);
}

namespace penstock::PENSTOCK_ISA {

namespace base = PENSTOCK_BASE_ISA;
#ifdef PENSTOCK_TILE_HEADER
constexpr bool two_ways = true;
#else
constexpr bool two_ways = false;
#endif
void linear(const LinearArgs& args, Worker& worker);
void head_linear(const HeadLinearArgs& args, Worker& worker);
void experts(const ExpertsArgs& args, Worker& worker);

extern const OpTable op_table;
const OpTable op_table{PENSTOCK_TEXT(PENSTOCK_ISA),
                       two_ways,
                       base::sample_row,
                       base::logprobs_row,
                       base::dequantize,
                       base::decode_codes,
                       base::encode,
                       base::rms_norm,
                       base::layer_norm,
                       base::gate_up,
                       base::route_experts,
                       base::activate,
                       base::add,
                       base::sigmoid_gate,
                       base::soft_cap,
                       base::scale_rows,
                       base::position_scales,
                       base::take_rows,
                       base::multiply,
                       base::weighted_sum,
                       base::match_rms,
                       base::statistical_topk,
                       base::rotate_heads,
                       base::rope_tables,
                       base::rope_write,
                       attention_plan,
                       PENSTOCK_ATTENTION_ISA::attention,
                       base::latent_write,
                       head_linear,
                       base::embedding,
                       linear,
                       experts,
                       base::gated_norm,
                       base::short_conv,
                       base::selective_scan,
                       base::delta_rule,
                       base::adapter,
                       base::run_limit,
                       base::read_memory};

}  // namespace penstock::PENSTOCK_ISA
