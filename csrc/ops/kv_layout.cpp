#include "ops/kv_layout.h"

#include <stdexcept>
#include <string>

namespace penstock {

KvLayout kv_layout(KvType type, std::int64_t block_size, std::int64_t heads, std::int64_t key_dim,
                   std::int64_t value_dim, bool latent) {
    const auto positive = [](const char* name, std::int64_t value) {
        if (value < 1)
            throw std::invalid_argument(std::string(name) + " of a KV cache is " + std::to_string(value) +
                                        "; it must be at least 1.");
    };
    positive("block size", block_size);
    positive("number of heads", heads);
    positive("key size", key_dim);
    positive("value size", value_dim);
    if (latent && (value_dim % kv_tile != 0 || value_dim > key_dim))
        throw std::invalid_argument("value size of a latent KV cache is " + std::to_string(value_dim) +
                                    "; it must be a multiple of 16 of at most the key size, " +
                                    std::to_string(key_dim) + ".");
    KvLayout out{type, block_size, heads, key_dim, value_dim, 0, 0, latent};
    out.key_block_bytes = heads * tiles_per_block(out) * key_tile_bytes(out);
    out.value_block_bytes = heads * tiles_per_block(out) * value_tile_bytes(out);
    return out;
}

}  // namespace penstock
