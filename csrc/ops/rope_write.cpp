// Rotary tables; splitting a merged projection, norming and rotating its heads, writing keys and values to the cache.
#include <algorithm>
#include <cmath>

#include "ops/kv_encode.h"
#include "ops/rotate.h"
#include "ops/row_chunk.h"
#include "ops/segments.h"
#include "vec/prefetch.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The sum over x's vectors of what `term` makes of them; those lanes of the last one that lie beyond x count as zeros.
template <class F>
float sum_of(const float* x, std::int64_t size, F&& term) {
    vec::F32x16 sums = vec::splat16(0.0f);
    for (std::int64_t i = 0; i < size; i += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, size - i);
        vec::F32x16 value = term(vec::load_some(x + i, n));
        if (n < 16) {
            float lane[16];
            vec::store(lane, value);
            value = vec::load16(lane, n);
        }
        sums = sums + value;
    }
    return vec::sum(sums);
}

float sum_of_squares(const float* x, std::int64_t size) {
    vec::F32x16 squares = vec::splat16(0.0f);
    for (std::int64_t i = 0; i < size; i += 16) {
        const vec::F32x16 value = vec::load_some(x + i, std::min<std::int64_t>(16, size - i));
        squares = vec::fma(value, value, squares);
    }
    return vec::sum(squares);
}

// What brings x's root mean square to one; `unit` of segments.h, where x is of several heads.
float rms_factor(const float* x, std::int64_t size, float eps, std::int64_t unit = 0) {
    const float squares = segmented_sum(
        size, unit, [=](std::int64_t begin, std::int64_t end) { return sum_of_squares(x + begin, end - begin); });
    return 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
}

// out = (x - mean) · factor · scales; out may be x.
void scale_head(const float* x, const float* scales, std::int64_t dim, float mean, float factor, float* out) {
    const vec::F32x16 centre = vec::splat16(mean), by = vec::splat16(factor);
    for (std::int64_t i = 0; i < dim; i += 16) {
        const std::int64_t n = std::min<std::int64_t>(16, dim - i);
        vec::store_some(out + i, (vec::load_some(x + i, n) - centre) * by * vec::load_some(scales + i, n), n);
    }
}

// A head's elements into `out`, normed by their root mean square if `scales` are given.
void take_head(const float* x, const float* scales, std::int64_t dim, float eps, float* out) {
    if (scales)
        scale_head(x, scales, dim, 0.0f, rms_factor(x, dim, eps), out);
    else
        std::copy_n(x, dim, out);
}

// The same by mean and variance.
void take_head_layer(const float* x, const float* scales, std::int64_t dim, float eps, float* out) {
    const float size = static_cast<float>(dim);
    const float mean = sum_of(x, dim, [](vec::F32x16 value) { return value; }) / size;
    const vec::F32x16 centre = vec::splat16(mean);
    const float squares = sum_of(x, dim, [=](vec::F32x16 value) { return (value - centre) * (value - centre); });
    scale_head(x, scales, dim, mean, 1.0f / std::sqrt(squares / size + eps), out);
}

// Zeros up to a multiple of 32 elements.
void pad(float* x, std::int64_t dim) { std::fill(x + dim, x + round_up(dim, kv_group), 0.0f); }

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

// 8-bit integers in fours of elements, and of tokens.
void place_key_fours(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    for (std::int64_t d = 0; d < dim; ++d)
        tile[(d / 4 * kv_tile + lane) * 4 + d % 4] = static_cast<std::byte>(code[d] ^ 0x80);
}
void place_value_fours(const std::uint32_t* code, std::int64_t dim, std::int64_t lane, std::byte* tile) {
    std::byte* const to = tile + lane / 4 * 4 * dim + lane % 4;
    for (std::int64_t d = 0; d < dim; ++d) to[4 * d] = static_cast<std::byte>(code[d] ^ 0x80);
}

// Keys and values of bfloat16 of up to 16 tokens that lie side by side in a tile from `lane` on.
struct HalfRun {
    const std::uint16_t* code;  // [count][stride], zeros beyond the head
    std::int64_t stride, count, lane;
};

// Rounds a head's elements, which zeros follow, and returns `to`.
const std::uint16_t* store_halves(const float* x, std::int64_t dim, std::uint16_t* to) {
    for (std::int64_t i = 0; i < dim; i += 16) vec::store16_bf16(to + i, vec::load16(x + i));
    return to;
}

// In pairs of elements.
void place_key_pairs(const HalfRun& run, std::int64_t dim, std::byte* tile) {
    constexpr std::int64_t few = 5;  // below, moving pairs one by one is faster than turning 16 rows
    auto* const to = reinterpret_cast<std::uint32_t*>(tile) + run.lane;
    if (run.count < few) {
        for (std::int64_t t = 0; t < run.count; ++t)
            for (std::int64_t d = 0; d < dim; d += 2)
                std::memcpy(to + d / 2 * kv_tile + t, run.code + t * run.stride + d, 4);
        return;
    }
    for (std::int64_t d = 0; d < dim; d += 32) {
        vec::F32x16 row[kv_tile];
        for (std::int64_t t = 0; t < kv_tile; ++t) {
            float lane[16] = {};
            if (t < run.count) std::memcpy(lane, run.code + t * run.stride + d, sizeof lane);
            row[t] = vec::load16(lane);
        }
        vec::transpose(row);
        for (std::int64_t i = 0; i < kv_tile && d + 2 * i < dim; ++i)
            vec::store_some(reinterpret_cast<float*>(to + (d / 2 + i) * kv_tile), row[i], run.count);
    }
}

// In pairs of tokens.
void place_value_pairs(const HalfRun& run, std::int64_t dim, std::byte* tile) {
    auto* const to = reinterpret_cast<std::uint16_t*>(tile);
    const auto row = [&](std::int64_t lane) { return run.code + (lane - run.lane) * run.stride; };
    const std::int64_t end = run.lane + run.count;
    for (std::int64_t lane = run.lane; lane < end; ++lane) {
        std::uint16_t* const pair = to + lane / 2 * 2 * dim;
        const std::uint16_t* const first = row(lane);
        if (lane % 2 == 0 && lane + 1 < end) {
            const std::uint16_t* const second = row(++lane);
            for (std::int64_t d = 0; d < dim; ++d) {
                pair[2 * d] = first[d];
                pair[2 * d + 1] = second[d];
            }
        } else {
            for (std::int64_t d = 0; d < dim; ++d) pair[2 * d + lane % 2] = first[d];
        }
    }
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
            place_key_pairs({store_halves(entry.value, dim, entry.half), 0, 1, lane}, dim, tile);
            break;
        case KvType::f16:
            place_key<std::uint16_t>(entry.code, dim, lane, tile);
            break;
        case KvType::i8:
            if (in_fours(layout)) {
                place_key_fours(entry.code, dim, lane, tile);
                break;
            }
            [[fallthrough]];
        case KvType::f8_e4m3:
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
            place_value_pairs({store_halves(entry.value, layout.value_dim, entry.half), 0, 1, lane}, room, tile);
            break;
        case KvType::f16:
            place_value<std::uint16_t>(entry.code, room, lane, tile);
            break;
        case KvType::f8_e4m3:
            place_value<std::uint8_t>(entry.code, room, lane, tile);
            break;
        case KvType::i8:
            place_value_fours(entry.code, room, lane, tile);
            break;
        case KvType::i4:
            for (std::int64_t i = 0; i < room / 2; ++i) {
                const std::uint32_t* const pair = entry.code + i / 16 * kv_group + i % 16;
                tile[lane * room / 2 + i] = static_cast<std::byte>(pair[0] | pair[16] << 4);
            }
    }
    place_scales(layout, entry, layout.value_dim, lane, tile + value_code_bytes(layout));
}

// Elements that a thread has room for in an entry.
std::int64_t entry_room(const KvLayout& layout) {
    return round_up(std::max(layout.key_dim, layout.value_dim), kv_group) + kv_group;
}

void write_latent(const LatentWriteArgs& args, std::int64_t token, KvEntry& entry) {
    const KvLayout& layout = args.layout;
    const std::int64_t dim = layout.key_dim, latent = layout.value_dim;
    const float* const x = args.x + token * dim;
    std::fill_n(entry.value + latent, entry_room(layout) - latent, 0.0f);
    take_head(x, args.norm, latent, args.eps, entry.value);
    take_rotated(x + latent, args.rotation, token, entry.value + latent);
    const std::int64_t slot = own_position(layout, args.slot[token]);
    const std::int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
    write_key(layout, entry, offset % kv_tile,
              args.keys + block * layout.key_block_bytes + offset / kv_tile * key_tile_bytes(layout));
}

// The queries of a token that read one KV head, and their key into `entry`; where the value lies.
const float* take_token(const RopeWriteArgs& args, std::int64_t token, std::int64_t kv_head, KvEntry& entry) {
    const KvLayout& layout = args.layout;
    const std::int64_t dim = layout.key_dim, half = args.rotary_dim / 2;
    const float* const x = args.qkv + token * ((args.heads + layout.heads) * dim + layout.heads * layout.value_dim);
    const float* const cos = args.cos + token * args.rotary_dim;
    const float* const sin = args.sin + token * args.rotary_dim;
    const auto head = [&](std::int64_t index, float* out) {
        const float* const from = x + index * dim;
        const float* const scales = args.qk_norm ? args.qk_norm + index * dim : nullptr;
        if (scales && args.norm == HeadNorm::all)
            scale_head(from, scales, dim, 0.0f, args.factors[token * 2 + (index >= args.heads)], out);
        else if (scales && args.norm == HeadNorm::layer)
            take_head_layer(from, scales, dim, args.eps, out);
        else
            take_head(from, args.norm == HeadNorm::rotated ? nullptr : scales, dim, args.eps, out);
        rotate(out, cos, sin, half);
        if (scales && args.norm == HeadNorm::rotated) take_head(out, scales, dim, args.eps, out);
    };
    const std::int64_t end = first_query_head(kv_head + 1, args.heads, layout.heads);
    for (std::int64_t h = first_query_head(kv_head, args.heads, layout.heads); h < end; ++h)
        head(h, args.query + (token * args.heads + h) * dim);
    head(args.heads + kv_head, entry.value);
    pad(entry.value, dim);
    return x + (args.heads + layout.heads) * dim + kv_head * layout.value_dim;
}

void take_value(const float* value, std::int64_t dim, KvEntry& entry) {
    take_head(value, nullptr, dim, 0.0f, entry.value);
    pad(entry.value, dim);
}

// Where a slot's token lies, for one KV head.
struct Place {
    Place(const RopeWriteArgs& args, std::int64_t of_all, std::int64_t kv_head) {
        const KvLayout& layout = args.layout;
        const std::int64_t slot = own_position(layout, of_all);
        const std::int64_t block = slot / layout.block_size, offset = slot % layout.block_size;
        const std::int64_t tile = kv_head * tiles_per_block(layout) + offset / kv_tile;
        lane = offset % kv_tile;
        key_tile = args.keys + block * layout.key_block_bytes + tile * key_tile_bytes(layout);
        value_tile = args.values + block * layout.value_block_bytes + tile * value_tile_bytes(layout);
    }
    std::byte *key_tile, *value_tile;
    std::int64_t lane;
};

// All of tokens [first, last), at most 16, that concerns one KV head.
void write_tokens(const RopeWriteArgs& args, std::int64_t first, std::int64_t last, std::int64_t kv_head,
                  KvEntry& entry) {
    const KvLayout& layout = args.layout;
    for (std::int64_t token = first; token < last; ++token) {
        const Place place(args, args.slot[token], kv_head);
        const float* const value = take_token(args, token, kv_head, entry);
        if (!has_position(layout, args.slot[token])) continue;
        write_key(layout, entry, place.lane, place.key_tile);
        take_value(value, layout.value_dim, entry);
        write_value(layout, entry, place.lane, place.value_tile);
    }
}

// The same in bfloat16: tokens that are neighbours in a tile go there together.
void write_token_pairs(const RopeWriteArgs& args, std::int64_t first, std::int64_t last, std::int64_t kv_head,
                       KvEntry& entry) {
    const KvLayout& layout = args.layout;
    const std::int64_t room = entry_room(layout);
    std::uint16_t *const keys = entry.half, *const values = keys + kv_tile * room;
    for (std::int64_t token = first; token < last; ++token) {
        const float* const value = take_token(args, token, kv_head, entry);
        store_halves(entry.value, layout.key_dim, keys + (token - first) * room);
        take_value(value, layout.value_dim, entry);
        store_halves(entry.value, layout.value_dim, values + (token - first) * room);
    }
    for (std::int64_t token = first, end; token < last; token = end) {
        end = token + 1;
        if (!has_position(layout, args.slot[token])) continue;
        const Place place(args, args.slot[token], kv_head);
        for (; end < last && args.slot[end] == args.slot[end - 1] + 1; ++end)
            if (args.slot[end] % kv_run == 0 || Place(args, args.slot[end], kv_head).key_tile != place.key_tile) break;
        const std::int64_t at = (token - first) * room;
        place_key_pairs({keys + at, room, end - token, place.lane}, layout.key_dim, place.key_tile);
        place_value_pairs({values + at, room, end - token, place.lane}, padded_value_dim(layout), place.value_tile);
    }
}

// Of an item of rope_write(), the first token's: a key touches each line of its tile.
void ask_for_tile(const RopeWriteArgs& args, std::int64_t item) {
    const KvLayout& layout = args.layout;
    const Place place(args, args.slot[item / layout.heads * kv_tile], item % layout.heads);
    for (std::int64_t at = 0; at < key_tile_bytes(layout); at += 64) vec::prefetch(place.key_tile + at);
}

KvEntry entry_memory(const KvLayout& layout) {
    const std::int64_t room = entry_room(layout);
    std::byte* const memory = thread_memory(3, static_cast<std::size_t>(room * (12 + 4 * kv_tile)));
    auto* const value = reinterpret_cast<float*>(memory);
    auto* const groups = reinterpret_cast<std::uint16_t*>(memory + room * 8);
    auto* const half = reinterpret_cast<std::uint16_t*>(memory + room * 12);
    return {value, reinterpret_cast<std::uint32_t*>(memory + room * 4), 0.0f, groups, groups + room / kv_group, half};
}

}  // namespace

void rope_tables(const RopeTablesArgs& args, Worker& worker) {
    worker.share(args.tokens, row_chunk(32 * args.half), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            float* const cos = args.cos + t * 2 * args.half;
            float* const sin = args.sin + t * 2 * args.half;
            for (std::int64_t i = 0; i < args.half; ++i) {
                const std::int64_t axis = args.axes ? args.axes[i] : 0;
                const float position = static_cast<float>(args.positions[axis * args.tokens + t]);
                const float angle = position * args.frequencies[i];
                const float c = std::cos(angle) * args.factor, s = std::sin(angle) * args.factor;
                cos[i] = cos[args.half + i] = c;
                sin[i] = -s;
                sin[args.half + i] = s;
            }
        }
    });
}

void rotate_heads(const RotateArgs& args, Worker& worker) {
    const std::int64_t width = args.heads * args.dim;
    worker.share(args.tokens, row_chunk(width), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = begin; t < end; ++t) {
            float* const out = args.out + t * width;
            std::copy_n(args.x + t * width, width, out);
            const float *const cos = args.cos + t * args.rotary_dim, *const sin = args.sin + t * args.rotary_dim;
            for (std::int64_t h = 0; h < args.heads; ++h) rotate(out + h * args.dim, cos, sin, args.rotary_dim / 2);
        }
    });
}

// An item is up to 16 tokens, which mostly fall into one tile.
void latent_write(const LatentWriteArgs& args, Worker& worker) {
    const std::int64_t spans = (args.tokens + kv_tile - 1) / kv_tile, span = std::min(args.tokens, kv_tile);
    worker.share(spans, row_chunk(span * args.layout.key_dim), [&](std::int64_t begin, std::int64_t end) {
        KvEntry entry = entry_memory(args.layout);
        for (std::int64_t token = begin * kv_tile; token < std::min(end * kv_tile, args.tokens); ++token)
            if (has_position(args.layout, args.slot[token])) write_latent(args, token, entry);
    });
}

// An item is one KV head of up to 16 tokens, which mostly fall into one tile.
void rope_write(const RopeWriteArgs& args, Worker& worker) {
    const KvLayout& layout = args.layout;
    if (args.qk_norm && args.norm == HeadNorm::all) {
        const std::int64_t dim = layout.key_dim, queries = args.heads * dim, keys = layout.heads * dim;
        const std::int64_t group = args.heads % layout.heads == 0 ? args.heads / layout.heads : 1;  // of a KV head
        const std::int64_t stride = queries + keys + layout.heads * layout.value_dim;
        worker.share(args.tokens, row_chunk(queries + keys), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t t = begin; t < end; ++t) {
                args.factors[2 * t] = rms_factor(args.qkv + t * stride, queries, args.eps, group * dim);
                args.factors[2 * t + 1] = rms_factor(args.qkv + t * stride + queries, keys, args.eps, dim);
            }
        });
    }
    const std::int64_t spans = (args.tokens + kv_tile - 1) / kv_tile, span = std::min(args.tokens, kv_tile);
    const std::int64_t width = (args.heads / layout.heads + 2) * layout.key_dim + layout.value_dim;
    const std::int64_t items = spans * layout.heads, each = std::max<std::int64_t>(1, items / (2 * worker.count()));
    worker.share_neighbours(items, std::min(each, row_chunk(span * width)), [&](std::int64_t begin, std::int64_t end) {
        KvEntry entry = entry_memory(layout);
        ask_for_tile(args, begin);
        for (std::int64_t item = begin; item < end; ++item) {
            if (item + 1 < end) ask_for_tile(args, item + 1);
            const std::int64_t first = item / layout.heads * kv_tile, last = std::min(first + kv_tile, args.tokens);
            const auto write = layout.type == KvType::bf16 ? write_token_pairs : write_tokens;
            write(args, first, last, item % layout.heads, entry);
        }
    });
}

}  // namespace penstock::PENSTOCK_ISA
