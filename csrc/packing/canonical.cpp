#include "packing/canonical.h"

#include "vec/dispatch.h"

namespace penstock {

bool decode_codes(BlockFormat format, const std::uint8_t* blocks, std::int64_t num_blocks, CodeBlock* out) {
    return ops().decode_codes(format, blocks, num_blocks, out);
}

}  // namespace penstock
