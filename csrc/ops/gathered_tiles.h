// Tiles of 16 tokens of a row, counted from its start, where blocks are no multiple of 16 tokens: brought together from
// the blocks' own tiles, so that attention sees the same tiles whatever a block's size is.
#pragma once

#include <cstring>

#include "ops/kv_layout.h"

namespace penstock::PENSTOCK_ISA {

// `count` neighbours among the 16 units of each row.
inline void copy_units(const std::byte* from, std::int64_t lane, std::byte* to, std::int64_t to_lane,
                       std::int64_t count, std::int64_t rows, std::int64_t unit) {
    for (std::int64_t row = 0; row < rows; ++row)
        std::memcpy(to + (row * kv_tile + to_lane) * unit, from + (row * kv_tile + lane) * unit,
                    static_cast<std::size_t>(count * unit));
}

// What scales tokens: a float32 each, or bfloat16 scales and minimums of groups.
inline void copy_scales(const KvLayout& layout, const std::byte* from, std::int64_t lane, std::byte* to,
                        std::int64_t to_lane, std::int64_t count, std::int64_t bytes) {
    const std::int64_t unit = layout.type == KvType::i4 ? 2 : 4;
    copy_units(from, lane, to, to_lane, count, bytes / (kv_tile * unit), unit);
}

// The keys of `count` tokens that lie side by side in one tile.
inline void copy_keys(const KvLayout& layout, const std::byte* from, std::int64_t lane, std::byte* to,
                      std::int64_t to_lane, std::int64_t count) {
    const std::int64_t codes = key_code_bytes(layout), scales = has_token_scale(layout.type) && layout.latent ? 2 : 1;
    const bool fours = in_fours(layout) || layout.type == KvType::bf16;  // four bytes of a token lie side by side
    const std::int64_t unit = fours ? 4 : layout.type == KvType::i4 ? 1 : code_bytes(layout.type, 1);
    copy_units(from, lane, to, to_lane, count, codes / (kv_tile * unit), unit);
    copy_scales(layout, from + codes, lane, to + codes, to_lane, count,
                scales * scale_bytes(layout.type, layout.key_dim));
}

// Their values.
inline void copy_values(const KvLayout& layout, const std::byte* from, std::int64_t lane, std::byte* to,
                        std::int64_t to_lane, std::int64_t count) {
    const std::int64_t codes = value_code_bytes(layout), each = codes / kv_tile;  // of a token
    const std::int64_t mates = in_fours(layout) ? 4 : layout.type == KvType::bf16 ? 2 : 1;
    if (lane % mates == 0 && to_lane % mates == 0 && count % mates == 0) {
        std::memcpy(to + to_lane * each, from + lane * each, static_cast<std::size_t>(count * each));
    } else {
        const std::int64_t columns = padded_value_dim(layout), unit = code_bytes(layout.type, 1);
        const auto place = [&](std::int64_t l) { return (l / mates * columns * mates + l % mates) * unit; };
        for (std::int64_t i = 0; i < count; ++i)
            for (std::int64_t column = 0; column < columns; ++column)
                std::memcpy(to + place(to_lane + i) + column * mates * unit,
                            from + place(lane + i) + column * mates * unit, static_cast<std::size_t>(unit));
    }
    copy_scales(layout, from + codes, lane, to + codes, to_lane, count, scale_bytes(layout.type, layout.value_dim));
}

}  // namespace penstock::PENSTOCK_ISA
