// How one layer's keys and values lie in a block: a run for each KV head, a run being tiles of 16 tokens.
//
// A tile of keys is transposed, [key_dim][16 tokens], so that the scores of 16 keys are the lanes of a vector; a tile
// of values is [16 tokens][value_dim], the dimension padded. After a tile's codes come what scales them, for 16 tokens
// at a time: one float32 a token (f8_e4m3, i8), or for each 32 elements a bfloat16 scale and a bfloat16 minimum a token
// (i4, whose codes 0 to 15 stand for minimum + scale · code). Two 4-bit keys share a byte as elements 2 i and 2 i + 1
// of one token, two values as elements i and i + 16 of 32.
//
// Four 8-bit integers that a dot product takes together lie side by side, each plus 128: keys are
// [key_dim / 4][16 tokens][4], the dimension padded to a multiple of 16, and values [4 fours of tokens][value_dim][4].
//
// Two bfloat16 that a dot product takes together lie side by side: keys are [key_dim / 2][16 tokens][2], an odd
// dimension padded by zeros, and values [8 pairs of tokens][value_dim][2]. A tile always has room for 16 tokens.
//
// Where a block lies with several ranks, its positions are dealt to them in runs of 256, which attention takes
// together: rank r of n has runs r, r + n, … of each block, one behind the other.
//
// A latent cache keeps keys only, whose first value_dim elements are the values; where codes have a float32 scale,
// those elements have one a token and the other elements another. Its 8-bit integers lie like floats, as they are.
#pragma once

#include "ops/model_ops.h"

namespace penstock {

constexpr std::int64_t kv_tile = 16;   // tokens
constexpr std::int64_t kv_run = 256;   // positions that one rank has
constexpr std::int64_t kv_group = 32;  // i4 elements that share a scale and a minimum

// Fills in the bytes of a block. Throws std::invalid_argument for sizes below 1, and for a latent cache whose value
// size is no multiple of 16 or is above the key size.
KvLayout kv_layout(KvType type, std::int64_t block_size, std::int64_t heads, std::int64_t key_dim,
                   std::int64_t value_dim, bool latent = false);

inline std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Bytes of `count` codes.
inline std::int64_t code_bytes(KvType type, std::int64_t count) {
    switch (type) {
        case KvType::f32:
            return 4 * count;
        case KvType::bf16:
        case KvType::f16:
            return 2 * count;
        case KvType::f8_e4m3:
        case KvType::i8:
            return count;
        case KvType::i4:
            return count / 2;
    }
    return 0;
}

// Bytes of what scales a tile of `dim` elements a token.
inline std::int64_t scale_bytes(KvType type, std::int64_t dim) {
    if (type == KvType::i4) return round_up(dim, kv_group) / kv_group * 4 * kv_tile;
    return type == KvType::f8_e4m3 || type == KvType::i8 ? 4 * kv_tile : 0;
}

inline bool has_token_scale(KvType type) { return type == KvType::f8_e4m3 || type == KvType::i8; }
inline bool in_fours(const KvLayout& l) { return l.type == KvType::i8 && !l.latent; }

// Elements a token's key, or value, takes up in its tile.
inline std::int64_t padded_key_dim(const KvLayout& l) {
    if (in_fours(l)) return round_up(l.key_dim, kv_tile);
    return l.type == KvType::i4 || l.type == KvType::bf16 ? round_up(l.key_dim, 2) : l.key_dim;
}
inline std::int64_t padded_value_dim(const KvLayout& l) {
    return round_up(l.value_dim, l.type == KvType::i4 ? kv_group : kv_tile);
}
inline std::int64_t key_code_bytes(const KvLayout& l) { return code_bytes(l.type, padded_key_dim(l) * kv_tile); }
inline std::int64_t value_code_bytes(const KvLayout& l) { return code_bytes(l.type, padded_value_dim(l) * kv_tile); }
inline std::int64_t key_tile_bytes(const KvLayout& l) {
    const std::int64_t scales = l.latent && has_token_scale(l.type) ? 2 : 1;
    return round_up(key_code_bytes(l) + scales * scale_bytes(l.type, l.key_dim), 64);
}
inline std::int64_t value_tile_bytes(const KvLayout& l) {
    return l.latent ? 0 : round_up(value_code_bytes(l) + scale_bytes(l.type, l.value_dim), 64);
}
inline std::int64_t tiles_per_block(const KvLayout& l) { return (l.block_size + kv_tile - 1) / kv_tile; }

// Whether a position, or a slot, is this rank's.
inline bool has_position(const KvLayout& l, std::int64_t position) { return position / kv_run % l.ranks == l.place; }

// How many of the positions before this one are: its own place here, if it is this rank's.
inline std::int64_t own_position(const KvLayout& l, std::int64_t position) {
    const std::int64_t run = position / kv_run, turn = run / l.ranks, rank = run % l.ranks;
    return rank == l.place ? turn * kv_run + position % kv_run : (turn + (rank > l.place)) * kv_run;
}

// Run `run` of those that this rank has of a context, counted in all.
inline std::int64_t run_of_all(const KvLayout& l, std::int64_t run) { return run * l.ranks + l.place; }

// The first query head that reads this KV head, of K: head h reads h · K / H.
inline std::int64_t first_query_head(std::int64_t kv_head, std::int64_t heads, std::int64_t kv_heads) {
    return (kv_head * heads + kv_heads - 1) / kv_heads;
}

}  // namespace penstock
