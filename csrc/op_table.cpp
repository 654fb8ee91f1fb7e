// The ops of this instruction set, in one table.
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

extern const OpTable op_table;
const OpTable op_table{PENSTOCK_TEXT(PENSTOCK_ISA), sample_row, logprobs_row, dequantize, decode_codes, encode};

}  // namespace penstock::PENSTOCK_ISA
