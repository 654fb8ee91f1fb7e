// The ops of this instruction set, in one table; most are those of PENSTOCK_BASE_ISA, which may be itself.
// Attention may be that of PENSTOCK_ATTENTION_ISA.
#include "ops/op_table.h"
#include "ops/attention_plan.h"

#define PENSTOCK_TEXT_OF(x) #x
#define PENSTOCK_TEXT(x) PENSTOCK_TEXT_OF(x)

#define PENSTOCK_SKIP(name, Args)
#define PENSTOCK_DECLARE(name, Args) void name(const Args& args, Worker& worker);
#define PENSTOCK_SHARED(name, Args) .name = base::name,
#define PENSTOCK_OWN(name, Args) .name = name,

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
PENSTOCK_MODEL_OPS(PENSTOCK_DECLARE, PENSTOCK_DECLARE, PENSTOCK_SKIP)
std::int64_t run_limit(Limit limit, std::int64_t rounds);
std::uint64_t read_memory(const std::byte* from, std::int64_t bytes);

}  // namespace penstock::PENSTOCK_BASE_ISA

namespace penstock::PENSTOCK_ATTENTION_ISA {
void attention(const AttentionArgs& args, Worker& worker);
void shared_attention(const SharedAttentionArgs& args, Worker& worker);
}  // namespace penstock::PENSTOCK_ATTENTION_ISA

namespace penstock::PENSTOCK_ISA {

namespace base = PENSTOCK_BASE_ISA;
#ifdef PENSTOCK_TILE_HEADER
constexpr bool two_ways = true;
#else
constexpr bool two_ways = false;
#endif
PENSTOCK_MODEL_OPS(PENSTOCK_SKIP, PENSTOCK_SKIP, PENSTOCK_DECLARE)

extern const OpTable op_table;
const OpTable op_table{
    .isa = PENSTOCK_TEXT(PENSTOCK_ISA),
    .two_ways = two_ways,
    .sample_row = base::sample_row,
    .logprobs_row = base::logprobs_row,
    .dequantize = base::dequantize,
    .decode_codes = base::decode_codes,
    .encode = base::encode,
    PENSTOCK_MODEL_OPS(PENSTOCK_SHARED, PENSTOCK_SHARED, PENSTOCK_OWN).attention_plan = attention_plan,
    .attention = PENSTOCK_ATTENTION_ISA::attention,
    .shared_attention = PENSTOCK_ATTENTION_ISA::shared_attention,
    .run_limit = base::run_limit,
    .read_memory = base::read_memory};

}  // namespace penstock::PENSTOCK_ISA
