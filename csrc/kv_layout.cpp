#include "kv_layout.h"

#include <stdexcept>
#include <string>

namespace penstock {

KvLayout kv_layout(KvType type, std::int64_t block_size, std::int64_t heads, std::int64_t key_dim,
                   std::int64_t value_dim) {
    const auto positive = [](const char* name, std::int64_t value) {
        if (value < 1)
            throw std::invalid_argument(std::string(name) + " of a KV cache is " + std::to_string(value) +
                                        "; it must be at least 1.");
    };
    positive("block size", block_size);
    positive("number of heads", heads);
    positive("key size", key_dim);
    positive("value size", value_dim);
    KvLayout out{type, block_size, heads, key_dim, value_dim, 0, 0};
    out.key_block_bytes = heads * tiles_per_block(out) * key_tile_bytes(out);
    out.value_block_bytes = heads * tiles_per_block(out) * value_tile_bytes(out);
    return out;
}

}  // namespace penstock
