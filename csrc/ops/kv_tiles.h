// Tiles of stored keys and values as floats.
#pragma once

#include "ops/attention_blocks.h"
#include "ops/kv_layout.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// Of a 4-bit tile: scales and minimums of group g, each one bfloat16 a token.
static inline const std::uint16_t* group_scales(const std::byte* tile, std::int64_t code_bytes, std::int64_t g) {
    return reinterpret_cast<const std::uint16_t*>(tile + code_bytes) + 2 * g * kv_tile;
}

// [key_dim][16] floats, or one dimension more where it is odd; without the tokens' scales (f8_e4m3, i8). As many bytes
// are asked for from `ahead`, if not null, as are read.
template <KvType type>
static inline void convert_keys(const std::byte* tile, const KvLayout& layout, float* out, const std::byte* ahead) {
    if constexpr (type == KvType::i4) {
        const auto* const code = reinterpret_cast<const std::uint8_t*>(tile);
        for (std::int64_t d = 0; d < layout.key_dim; d += 2) {
            const std::uint16_t* const scales = group_scales(tile, key_code_bytes(layout), d / kv_group);
            const vec::F32x16 scale = vec::load16_bf16(scales), minimum = vec::load16_bf16(scales + kv_tile);
            vec::F32x16 low, high;
            if (ahead && d % 8 == 0) vec::prefetch(ahead + d / 2 * kv_tile);
            vec::load16_nibbles(code + d / 2 * kv_tile, low, high);
            vec::store(out + d * kv_tile, vec::fma(low, scale, minimum));
            vec::store(out + (d + 1) * kv_tile, vec::fma(high, scale, minimum));
        }
    } else {
        const auto* const code = reinterpret_cast<const typename Codes<type>::Code*>(tile);
        in_pairs<Codes<type>>(0, layout.key_dim, [&](std::int64_t d, auto second) {
            const auto* const at = code + (second ? d - 1 : d) * kv_tile;
            constexpr std::int64_t bytes = kv_tile * sizeof(*code);
            if (ahead && d * bytes % 64 == 0) vec::prefetch(ahead + d * bytes);
            vec::store(out + d * kv_tile, Codes<type>::template load<second.value>(at));
        });
    }
}

// Columns [column, column + count) of all 16 tokens, rows `stride` floats apart; column is a multiple
// of 32.
template <KvType type>
static inline void convert_values(const std::byte* tile, const KvLayout& layout, std::int64_t column,
                                  std::int64_t count, float* out, std::int64_t stride) {
    const std::int64_t columns = padded_value_dim(layout);
    using Stored = Codes<type == KvType::i4 ? KvType::f32 : type>;
    in_pairs<Stored>(0, kv_tile, [&](std::int64_t token, auto second) {
        float* const to = out + token * stride;
        if constexpr (type == KvType::i4) {
            const auto* const code = reinterpret_cast<const std::uint8_t*>(tile) + token * columns / 2;
            for (std::int64_t i = 0; i < count; i += kv_group) {
                const std::uint16_t* const scales =
                    group_scales(tile, value_code_bytes(layout), (column + i) / kv_group) + token;
                const vec::F32x16 scale = vec::splat16_bf16(scales[0]), minimum = vec::splat16_bf16(scales[kv_tile]);
                vec::F32x16 low, high;
                vec::load16_nibbles(code + (column + i) / 2, low, high);
                vec::store(to + i, vec::fma(low, scale, minimum));
                vec::store(to + i + 16, vec::fma(high, scale, minimum));
            }
        } else {
            constexpr std::int64_t each = Stored::paired ? 2 : 1;
            const auto* const code = reinterpret_cast<const typename Stored::Code*>(tile) +
                                     (second ? token - 1 : token) * columns + each * column;
            for (std::int64_t i = 0; i < count; i += 16)
                vec::store(to + i, Stored::template load<second.value>(code + each * i));
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
