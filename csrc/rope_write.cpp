// Rotary tables; splitting a merged projection, norming and rotating its heads, writing keys and values to the cache.
#include <algorithm>
#include <cmath>

#include "kv_encode.h"
#include "rotate.h"
#include "row_chunk.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A head's elements into `out`, normed if `scales` are given, and zeros up to a multiple of 32.
void take_head(const float* x, const float* scales, std::int64_t dim, float eps, float* out) {
    const auto part = [=](std::int64_t i) { return std::min<std::int64_t>(16, dim - i); };
    vec::F32x16 squares = vec::splat16(0.0f);
    for (std::int64_t i = 0; i < dim; i += 16) {
        const vec::F32x16 value = vec::load_some(x + i, part(i));
        squares = vec::fma(value, value, squares);
        vec::store(out + i, value);
    }
    for (std::int64_t i = round_up(dim, 16); i < round_up(dim, kv_group); ++i) out[i] = 0.0f;
    if (!scales) return;
    const vec::F32x16 factor = vec::splat16(1.0f / std::sqrt(vec::sum(squares) / static_cast<float>(dim) + eps));
    for (std::int64_t i = 0; i < dim; i += 16)
        vec::store(out + i, vec::load16(out + i) * factor * vec::load_some(scales + i, part(i)));
}

template <class T>
void place_key(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    T* const to = reinterpret_cast<T*>(tile) + lane;
    for (std::int64_t d = 0; d < dim; ++d) to[d * kv_tile] = static_cast<T>(code[d]);
}

template <class T>
void place_value(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    T* const to = reinterpret_cast<T*>(tile) + lane * dim;
    for (std::int64_t d = 0; d < dim; ++d) to[d] = static_cast<T>(code[d]);
}

// Keys and values of bfloat16, in pairs of elements and of tokens.
void place_key_pairs(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    auto* const to = reinterpret_cast<std::uint32_t*>(tile) + lane;
    for (std::int64_t d = 0; d < dim; d += 2) to[d / 2 * kv_tile] = code[d] | code[d + 1] << 16;
}
void place_value_pairs(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    auto* const to = reinterpret_cast<std::uint16_t*>(tile) + lane / 2 * 2 * dim + lane % 2;
    for (std::int64_t d = 0; d < dim; ++d) to[2 * d] = static_cast<std::uint16_t>(code[d]);
}

void place_scales(const KvLayout& layout, const KvEntry& entry, std::int64_t dim, std::int64_t lane,
                  std::byte* scales) {
    if (has_token_scale(layout.type)) reinterpret_cast<float*>(scales)[lane] = entry.scale;
    if (layout.type != KvType::i4) return;
    auto* const to = reinterpret_cast<std::uint16_t*>(scales);
    for (std::int64_t g = 0; g * kv_group < dim; ++g) {
        to[2 * g * kv_tile + lane] = entry.group_scale[g];
        to[(2 * g + 1) * kv_tile + lane] = entry.group_minimum[g];
    }
}

void write_key(const KvLayout& layout, KvEntry& entry, std::int64_t lane, std::byte* tile) {
    const std::int64_t dim = layout.key_dim;
    if (layout.latent && has_token_scale(layout.type)) {
        KvEntry rotated = entry;
        rotated.value += layout.value_dim;
        rotated.code += layout.value_dim;
        encode_entry(layout.type, rotated, dim - layout.value_dim);
        encode_entry(layout.type, entry, layout.value_dim);
        reinterpret_cast<float*>(tile + key_code_bytes(layout))[kv_tile + lane] = rotated.scale;
    } else {
        encode_entry(layout.type, entry, dim);
    }
    switch (layout.type) {
        case KvType::f32:
            place_key<std::uint32_t>(entry.code, dim, lane, tile);
            break;
        case KvType::bf16:
            place_key_pairs(entry.code, dim, lane, tile);
            break;
        case KvType::f16:
            place_key<std::uint16_t>(entry.code, dim, lane, tile);
            break;
        case KvType::f8_e4m3:
        case KvType::i8:
            place_key<std::uint8_t>(entry.code, dim, lane, tile);
            break;
        case KvType::i4:
            for (std::int64_t d = 0; d < dim; d += 2)
                tile[d / 2 * kv_tile + lane] = static_cast<std::byte>(entry.code[d] | entry.code[d + 1] << 4);
    }
    place_scales(layout, entry, dim, lane, tile + key_code_bytes(layout));
}

void write_value(const KvLayout& layout, KvEntry& entry, std::int64_t lane, std::byte* tile) {
    const std::int64_t room = padded_value_dim(layout);
    encode_entry(layout.type, entry, layout.value_dim);
    switch (layout.type) {
        case KvType::f32:
            place_value<std::uint32_t>(entry.code, room, lane, tile);
            break;
        case KvType::bf16:
            place_value_pairs(entry.code, room, lane, tile);
            break;
        case KvType::f16:
            place_value<std::uint16_t>(entry.code, room, lane, tile);
            break;
        case KvType::f8_e4m3:
        case KvType::i8:
            place_value<std::uint8_t>(entry.code, room, lane, tile);
            break;
        case KvType::i4:
            for (std::int64_t i = 0; i < room / 2; ++i) {
                const std::uint32_t* const pair = entry.code + i / 16 * kv_group + i % 16;
                tile[lane * room / 2 + i] = static_cast<std::byte>(pair[0] | pair[16] << 4);
            }
    }
    place_scales(layout, entry, layout.value_dim, lane, tile + value_code_bytes(layout));
}

void write_latent(const LatentWriteArgs& args, std::int64_t token, KvEntry& entry) {
    const KvLayout& layout = args.layout;
    const std::int64_t dim = layout.key_dim, latent = layout.value_dim;
    const float* const x = args.x + token * dim;
    std::fill_n(entry.value + latent, round_up(dim, kv_group) + kv_group - latent, 0.0f);
    take_head(x, args.norm, latent, args.eps, entry.value);
    take_rotated(x + latent, args.rotation, token, entry.value + latent);
    const std::int64_t block = args.slot[token] / layout.block_size, offset = args.slot[token] % layout.block_size;
    write_key(layout, entry, offset % kv_tile,
              args.keys + block * layout.key_block_bytes + offset / kv_tile * key_tile_bytes(layout));
}

// All of a token that concerns one KV head.
void write_token(const RopeWriteArgs& args, std::int64_t token, std::int64_t kv_head, KvEntry& entry) {
    const KvLayout& layout = args.layout;
    const std::int64_t dim = layout.key_dim, half = args.rotary_dim / 2;
    const float* const x = args.qkv + token * ((args.heads + layout.heads) * dim + layout.heads * layout.value_dim);
    const float* const cos = args.cos + token * args.rotary_dim;
    const float* const sin = args.sin + token * args.rotary_dim;
    const auto head = [&](std::int64_t index) {
        take_head(x + index * dim, args.qk_norm ? args.qk_norm + index * dim : nullptr, dim, args.eps, entry.value);
        rotate(entry.value, cos, sin, half);
    };
    const std::int64_t end = first_query_head(kv_head + 1, args.heads, layout.heads);
    for (std::int64_t h = first_query_head(kv_head, args.heads, layout.heads); h < end; ++h) {
        head(h);
        std::memcpy(args.query + (token * args.heads + h) * dim, entry.value, static_cast<std::size_t>(dim) * 4);
    }
    const std::int64_t block = args.slot[token] / layout.block_size, offset = args.slot[token] % layout.block_size;
    const std::int64_t tile = kv_head * tiles_per_block(layout) + offset / kv_tile, lane = offset % kv_tile;
    head(args.heads + kv_head);
    write_key(layout, entry, lane, args.keys + block * layout.key_block_bytes + tile * key_tile_bytes(layout));
    const float* const value = x + (args.heads + layout.heads) * dim + kv_head * layout.value_dim;
    take_head(value, nullptr, layout.value_dim, 0.0f, entry.value);
    write_value(layout, entry, lane, args.values + block * layout.value_block_bytes + tile * value_tile_bytes(layout));
}

KvEntry entry_memory(const KvLayout& layout) {
    const std::int64_t room = round_up(std::max(layout.key_dim, layout.value_dim), kv_group) + kv_group;
    std::byte* const memory = thread_memory(3, static_cast<std::size_t>(room * 12));
    auto* const value = reinterpret_cast<float*>(memory);
    auto* const groups = reinterpret_cast<std::uint16_t*>(memory + room * 8);
    return {value, reinterpret_cast<std::uint32_t*>(memory + room * 4), 0.0f, groups, groups + room / kv_group};
}

}  // namespace

void rope_tables(const RopeTablesArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(32 * args.half), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            float* const cos = args.cos + t * 2 * args.half;
            float* const sin = args.sin + t * 2 * args.half;
            const float position = static_cast<float>(args.positions[t]);
            for (std::int64_t i = 0; i < args.half; ++i) {
                const float angle = position * args.frequencies[i];
                const float c = std::cos(angle) * args.factor, s = std::sin(angle) * args.factor;
                cos[i] = cos[args.half + i] = c;
                sin[i] = -s;
                sin[args.half + i] = s;
            }
        }
    });
}

// An item is up to 16 tokens, which mostly fall into one tile.
void latent_write(const LatentWriteArgs& args, Worker& worker) {
    const std::int64_t spans = (args.tokens + kv_tile - 1) / kv_tile, span = std::min(args.tokens, kv_tile);
    worker.share(spans, row_chunk(span * args.layout.key_dim), [&](std::int64_t begin, std::int64_t end) {
        KvEntry entry = entry_memory(args.layout);
        for (std::int64_t token = begin * kv_tile; token < std::min(end * kv_tile, args.tokens); ++token)
            write_latent(args, token, entry);
    });
}

// An item is one KV head of up to 16 tokens, which mostly fall into one tile.
void rope_write(const RopeWriteArgs& args, Worker& worker) {
    const KvLayout& layout = args.layout;
    const std::int64_t spans = (args.tokens + kv_tile - 1) / kv_tile, span = std::min(args.tokens, kv_tile);
    const std::int64_t width = (args.heads / layout.heads + 2) * layout.key_dim + layout.value_dim;
    worker.share(spans * layout.heads, row_chunk(span * width), [&](std::int64_t begin, std::int64_t end) {
        KvEntry entry = entry_memory(layout);
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t first = item / layout.heads * kv_tile, last = std::min(first + kv_tile, args.tokens);
            for (std::int64_t token = first; token < last; ++token)
                write_token(args, token, item % layout.heads, entry);
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
