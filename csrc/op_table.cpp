// The ops of this instruction set, in one table.
#include "attention_plan.h"
#include "ops.h"

#define PENSTOCK_TEXT_OF(x) #x
#define PENSTOCK_TEXT(x) PENSTOCK_TEXT_OF(x)

namespace penstock::PENSTOCK_ISA {

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
void add(const AddArgs& args, Worker& worker);
void soft_cap(const SoftCapArgs& args, Worker& worker);
void take_rows(const TakeRowsArgs& args, Worker& worker);
void rope_tables(const RopeTablesArgs& args, Worker& worker);
void rope_write(const RopeWriteArgs& args, Worker& worker);
void attention(const AttentionArgs& args, Worker& worker);
void embedding(const EmbeddingArgs& args, Worker& worker);
void linear(const LinearArgs& args, Worker& worker);
void experts(const ExpertsArgs& args, Worker& worker);
std::int64_t run_limit(Limit limit, std::int64_t rounds);
std::uint64_t read_memory(const std::byte* from, std::int64_t bytes);

extern const OpTable op_table;
const OpTable op_table{PENSTOCK_TEXT(PENSTOCK_ISA),
                       sample_row,
                       logprobs_row,
                       dequantize,
                       decode_codes,
                       encode,
                       rms_norm,
                       layer_norm,
                       gate_up,
                       route_experts,
                       add,
                       soft_cap,
                       take_rows,
                       rope_tables,
                       rope_write,
                       attention_plan,
                       attention,
                       embedding,
                       linear,
                       experts,
                       run_limit,
                       read_memory};

}  // namespace penstock::PENSTOCK_ISA
