// Tiles of a latent cache as floats: keys as they lie, values turned out of the first elements of the keys.
#pragma once

#include "ops/kv_tiles.h"

namespace penstock::PENSTOCK_ISA {

// Element d of a latent tile's 16 tokens, scales included; `odd` tells whether d is odd.
template <KvType type, bool odd>
static inline vec::F32x16 latent_element(const std::byte* tile, const KvLayout& layout, std::int64_t d) {
    if constexpr (type == KvType::i4) {
        const std::uint16_t* const scales = group_scales(tile, key_code_bytes(layout), d / kv_group);
        vec::F32x16 low, high;
        vec::load16_nibbles(reinterpret_cast<const std::uint8_t*>(tile) + d / 2 * kv_tile, low, high);
        return vec::fma(odd ? high : low, vec::load16_bf16(scales), vec::load16_bf16(scales + kv_tile));
    } else {
        using C = Codes<type>;
        const auto* const code = reinterpret_cast<const typename C::Code*>(tile);
        if constexpr (C::paired) return C::template load<odd>(code + (d - odd) * kv_tile);
        const vec::F32x16 value = C::template load<false>(code + d * kv_tile);
        if constexpr (type != KvType::f8_e4m3 && type != KvType::i8) return value;
        const auto* const scales = reinterpret_cast<const float*>(tile + key_code_bytes(layout));
        return value * vec::load16(scales + (d < layout.value_dim ? 0 : kv_tile));
    }
}

// [key_dim][16] floats.
template <KvType type>
static inline void convert_latent_keys(const std::byte* tile, const KvLayout& layout, float* out) {
    std::int64_t d = 0;
    for (; d + 1 < layout.key_dim; d += 2) {
        vec::store(out + d * kv_tile, latent_element<type, false>(tile, layout, d));
        vec::store(out + (d + 1) * kv_tile, latent_element<type, true>(tile, layout, d + 1));
    }
    if (d < layout.key_dim) vec::store(out + d * kv_tile, latent_element<type, false>(tile, layout, d));
}

// Columns [column, column + count) of all 16 tokens, rows `stride` floats apart; both are multiples of 16. Columns
// beyond the values are zeros.
template <KvType type>
static inline void convert_latent_values(const std::byte* tile, const KvLayout& layout, std::int64_t column,
                                         std::int64_t count, float* out, std::int64_t stride) {
    for (std::int64_t c = 0; c < count; c += 16) {
        vec::F32x16 row[16];
        const bool inside = column + c < layout.value_dim;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i += 2) {
            row[i] = inside ? latent_element<type, false>(tile, layout, column + c + i) : vec::splat16(0.0f);
            row[i + 1] = inside ? latent_element<type, true>(tile, layout, column + c + i + 1) : vec::splat16(0.0f);
        }
        vec::transpose(row);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) vec::store(out + i * stride + c, row[i]);
    }
}

// The same of bfloat16 in pairs of tokens, [8][stride][2]; defined where there are dot products of pairs.
void latent_value_pairs(const std::byte* tile, const KvLayout& layout, std::int64_t column, std::int64_t count,
                        std::uint16_t* out, std::int64_t stride);

#ifdef PENSTOCK_BF16_DOTS
inline void latent_value_pairs(const std::byte* tile, const KvLayout& layout, std::int64_t column, std::int64_t count,
                               std::uint16_t* out, std::int64_t stride) {
    const auto* const code = reinterpret_cast<const std::uint16_t*>(tile);
    const std::int64_t dim = padded_key_dim(layout);
    for (std::int64_t c = 0; c < count; c += 32) {
        vec::F32x16 row[16];  // of pairs of elements, then of tokens
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            const std::int64_t d = column + c + 2 * i;
            row[i] = d < dim ? vec::load_bits(code + d * kv_tile) : vec::splat16(0.0f);
        }
        vec::transpose(row);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i)
            vec::store_pairs(out + 2 * (i * stride + c), row[2 * i], row[2 * i + 1], count - c >= 32);
    }
}
#endif

}  // namespace penstock::PENSTOCK_ISA
