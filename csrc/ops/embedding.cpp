// Rows of a packed table.
#include "packing/packed.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

void embedding(const EmbeddingArgs& args, Worker& worker) {
    const std::int64_t width = args.table->cols();
    worker.share(args.tokens, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            float* const out = args.out + t * width;
            unpack_row(*args.table, args.token_ids[t], out);
            if (args.scale != 1.0f)
                for (std::int64_t i = 0; i < width; ++i) out[i] *= args.scale;
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
