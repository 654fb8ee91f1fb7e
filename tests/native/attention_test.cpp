// Rotary writes and paged attention against the formulas in double, and bit for bit against themselves: however a step
// is cut into chunks, whoever its rows are batched with, whether they share blocks, on however many threads.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ops/attention_plan.h"
#include "program/team.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

template <class T>
std::size_t at(T i) {
    return static_cast<std::size_t>(i);
}

using Floats = std::vector<float>;
using Random = std::mt19937_64;

float normal(Random& random) { return std::normal_distribution<float>()(random); }

Floats normals(Random& random, std::int64_t count) {
    Floats out(at(count));
    for (float& x : out) x = normal(random);
    return out;
}

float bf16(std::uint16_t bits) {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

float small_float(unsigned bits, int exponent_bits, int fraction_bits) {  // no infinities, no NaN
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> fraction_bits & ((1u << exponent_bits) - 1));
    const double fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1)) / (1 << fraction_bits);
    const double size = exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias);
    return static_cast<float>(bits >> (exponent_bits + fraction_bits) & 1 ? -size : size);
}

template <class T>
T read(const std::byte* from, std::int64_t index) {
    T out;
    std::memcpy(&out, from + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return out;
}

// Element `place` of a tile, as kv_layout.h describes tiles; `half` is the upper half of a byte that holds two.
double element(KvType type, const std::byte* tile, std::int64_t place, bool half) {
    switch (type) {
        case KvType::f32:
            return read<float>(tile, place);
        case KvType::bf16:
            return bf16(read<std::uint16_t>(tile, place));
        case KvType::f16:
            return small_float(read<std::uint16_t>(tile, place), 5, 10);
        case KvType::f8_e4m3:
            return small_float(read<std::uint8_t>(tile, place), 4, 3);
        case KvType::i8:
            return read<std::int8_t>(tile, place);
        case KvType::i4:
            return read<std::uint8_t>(tile, place) >> (half ? 4 : 0) & 15;
    }
    return 0;
}

double scaled(KvType type, double code, const std::byte* scales, std::int64_t d, std::int64_t lane) {
    if (type == KvType::f8_e4m3 || type == KvType::i8) return code * read<float>(scales, lane);
    if (type != KvType::i4) return code;
    return bf16(read<std::uint16_t>(scales, d / 32 * 32 + lane)) * code +
           bf16(read<std::uint16_t>(scales, d / 32 * 32 + 16 + lane));
}

struct Case {
    KvType type = KvType::f32;
    std::int64_t heads = 4, kv_heads = 2, dim = 8, value_dim = 8, block_size = 16, window = 0;
    bool sinks = false;
    float cap = 0.0f;
    bool latent = false;  // values are the beginnings of keys
    bool both = false;    // rows are read both ways
};

// A row: its projections from position 0 on, and its blocks.
struct Row {
    Floats qkv;
    std::vector<std::int32_t> blocks;
    std::int64_t context;
};

struct Cache {
    Case shape;
    KvLayout layout;
    std::vector<std::byte> keys, values;  // all slots hold NaN, or NaN for scale, until they are written
    std::vector<Row> rows;
    Floats sinks;
    std::int32_t next_block = 1;

    Cache(const Case& c, std::int64_t blocks, Random& random)
        : shape(c),
          layout(kv_layout(c.type, c.block_size, c.kv_heads, c.dim, c.value_dim, c.latent)),
          keys(at(blocks * layout.key_block_bytes), std::byte{0xff}),
          values(at(blocks * layout.value_block_bytes), std::byte{0xff}) {
        if (c.sinks) sinks = normals(random, c.heads);
    }

    std::int64_t width() const { return (shape.heads + shape.kv_heads) * shape.dim + shape.kv_heads * shape.value_dim; }
    // Where element `minor` of 16 or more lies whose fours lie `span` apart, the other index being `major`.
    static std::int64_t in_four(std::int64_t minor, std::int64_t major, std::int64_t span) {
        return minor / 4 * 4 * span + 4 * major + minor % 4;
    }
    // The integer that is stored plus 128.
    static double biased(const std::byte* tile, std::int64_t place) { return read<std::uint8_t>(tile, place) - 128.0; }
    double key(const Row& row, std::int64_t position, std::int64_t head, std::int64_t d) const {
        const std::int64_t offset = position % layout.block_size, lane = offset % 16;
        const std::byte* const tile = keys.data() +
                                      row.blocks[at(position / layout.block_size)] * layout.key_block_bytes +
                                      (head * tiles_per_block(layout) + offset / 16) * key_tile_bytes(layout);
        const bool packed = shape.type == KvType::i4;
        const std::int64_t place =
            shape.type == KvType::bf16 ? d / 2 * 32 + lane * 2 + d % 2 : (packed ? d / 2 : d) * 16 + lane;
        const double code =
            in_fours(layout) ? biased(tile, in_four(d, lane, 16)) : element(shape.type, tile, place, d % 2);
        const std::int64_t second = shape.latent && has_token_scale(shape.type) && d >= shape.value_dim ? 16 : 0;
        return scaled(shape.type, code, tile + key_code_bytes(layout), d, lane + second);
    }
    double value(const Row& row, std::int64_t position, std::int64_t head, std::int64_t d) const {
        if (shape.latent) return key(row, position, head, d);
        const std::int64_t offset = position % layout.block_size, lane = offset % 16;
        const std::byte* const tile = values.data() +
                                      row.blocks[at(position / layout.block_size)] * layout.value_block_bytes +
                                      (head * tiles_per_block(layout) + offset / 16) * value_tile_bytes(layout);
        const bool packed = shape.type == KvType::i4;
        const std::int64_t room = padded_value_dim(layout);
        const std::int64_t place = packed                       ? lane * room / 2 + d / 32 * 16 + d % 16
                                   : shape.type == KvType::bf16 ? lane / 2 * 2 * room + 2 * d + lane % 2
                                                                : lane * room + d;
        const double code =
            in_fours(layout) ? biased(tile, in_four(lane, d, room)) : element(shape.type, tile, place, d / 16 % 2);
        return scaled(shape.type, code, tile + value_code_bytes(layout), d, lane);
    }
};

// The keys of positions [begin, end) as entries of a latent cache, unnormed and unrotated.
void write_entries(Cache& cache, const Row& row, std::int64_t begin, std::int64_t end,
                   const std::vector<std::int64_t>& slots) {
    const Case& c = cache.shape;
    const std::int64_t rest = c.dim - c.value_dim;
    Floats x, cos(at((end - begin) * rest), 1.0f), sin(cos.size(), 0.0f);
    for (std::int64_t p = begin; p < end; ++p) {
        const float* const from = row.qkv.data() + p * cache.width() + c.heads * c.dim;
        x.insert(x.end(), from, from + c.dim);
    }
    const LatentWriteArgs args{x.data(),     nullptr,     0.0f,         {cos.data(), sin.data(), rest, false},
                               slots.data(), end - begin, cache.layout, cache.keys.data()};
    run_team([&](Worker& worker) { ops().latent_write(args, worker); });
}

// Runs rope_write without rotation for positions [begin, end) of a row; the queries.
Floats write(Cache& cache, const Row& row, std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> slots;
    for (std::int64_t p = begin; p < end; ++p)
        slots.push_back(row.blocks[at(p / cache.layout.block_size)] * cache.layout.block_size +
                        p % cache.layout.block_size);
    if (cache.shape.latent) {
        write_entries(cache, row, begin, end, slots);
        return {};
    }
    Floats query(at((end - begin) * cache.shape.heads * cache.shape.dim));
    const RopeWriteArgs args{row.qkv.data() + begin * cache.width(),
                             nullptr,
                             nullptr,
                             0,
                             slots.data(),
                             end - begin,
                             cache.shape.heads,
                             nullptr,
                             0.0f,
                             cache.layout,
                             cache.keys.data(),
                             cache.values.data(),
                             query.data()};
    run_team([&](Worker& worker) { ops().rope_write(args, worker); });
    return query;
}

// A row of `context` random tokens, the first `common` of them and their whole blocks those of `mate`.
void add_row(Cache& cache, std::int64_t context, Random& random, const Row* mate = nullptr, std::int64_t common = 0) {
    Row row{normals(random, context * cache.width()), {}, context};
    if (mate) std::copy_n(mate->qkv.begin(), common * cache.width(), row.qkv.begin());
    const std::int64_t shared = common / cache.layout.block_size;
    for (std::int64_t b = 0; b * cache.layout.block_size < context; ++b)
        row.blocks.push_back(b < shared ? mate->blocks[at(b)] : cache.next_block++);
    require(cache.next_block * cache.layout.key_block_bytes <= static_cast<std::int64_t>(cache.keys.size()),
            "enough blocks");
    write(cache, row, 0, context);
    cache.rows.push_back(std::move(row));
}

// One step's row: queries at positions [begin, end).
struct Ask {
    std::size_t row;
    std::int64_t begin, end;
};

// Attention of a step, [queries][heads · value_dim]. Table entries no query may read are poisoned.
Floats attend(const Cache& cache, const std::vector<Ask>& asks, AttentionPlan& plan) {
    const Case& c = cache.shape;
    std::vector<std::int32_t> starts{0}, lengths, table;
    std::int64_t table_width = 1;
    for (const Ask& ask : asks)
        table_width = std::max(table_width, static_cast<std::int64_t>(cache.rows[ask.row].blocks.size()));
    Floats query;
    for (const Ask& ask : asks) {
        const Row& row = cache.rows[ask.row];
        starts.push_back(starts.back() + static_cast<std::int32_t>(ask.end - ask.begin));
        const std::int64_t context = c.both ? row.context : ask.end;
        lengths.push_back(static_cast<std::int32_t>(context));
        const std::int64_t low = lowest_seen(ask.begin, c.window) / c.block_size, high = (context - 1) / c.block_size;
        for (std::int64_t b = 0; b < table_width; ++b)
            table.push_back(b < low || b > high ? std::numeric_limits<std::int32_t>::max() : row.blocks[at(b)]);
        for (std::int64_t p = ask.begin; p < ask.end; ++p) {
            const float* const from = row.qkv.data() + p * cache.width();
            query.insert(query.end(), from, from + c.heads * c.dim);
        }
    }
    const std::vector<MaskKind> masks(asks.size(), MaskKind::bidirectional);
    const AttentionRows rows{starts.data(),
                             lengths.data(),
                             table.data(),
                             table_width,
                             static_cast<std::int64_t>(asks.size()),
                             c.window,
                             c.both ? masks.data() : nullptr};
    Floats out(at(starts.back() * c.heads * c.value_dim), std::nanf(""));
    const AttentionArgs args{query.data(),
                             &plan,
                             rows,
                             cache.layout,
                             cache.keys.data(),
                             cache.values.data(),
                             c.heads,
                             0.3f,
                             c.sinks ? cache.sinks.data() : nullptr,
                             c.cap,
                             out.data()};
    run_team([&](Worker& worker) {
        ops().attention_plan(rows, cache.layout, c.heads, plan, worker);
        ops().attention(args, worker);
    });
    return out;
}

double exact(const Cache& cache, const Row& row, std::int64_t position, std::int64_t head, std::int64_t column) {
    const Case& c = cache.shape;
    const std::int64_t kv = head * c.kv_heads / c.heads;
    double total = c.sinks ? std::exp(static_cast<double>(cache.sinks[at(head)])) : 0.0, sum = 0.0;
    const std::int64_t end = c.both ? row.context : position + 1;
    for (std::int64_t p = lowest_seen(position, c.window); p < end; ++p) {
        double score = 0.0;
        for (std::int64_t d = 0; d < c.dim; ++d)
            score += static_cast<double>(row.qkv[at(position * cache.width() + head * c.dim + d)]) *
                     cache.key(row, p, kv, d);
        score *= 0.3;
        if (c.cap > 0) score = c.cap * std::tanh(score / c.cap);
        total += std::exp(score);
        sum += std::exp(score) * cache.value(row, p, kv, column);
    }
    return sum / total;
}

// Of the formula on the stored keys and values; queries and weights are bfloat16 where pairs of those are multiplied,
// and whole numbers of 15 bits where integers are.
double tolerance(const Case& c) {
    if (c.type == KvType::i8 && !c.latent) return 2e-4;
    return c.type == KvType::bf16 && std::strcmp(ops().isa, "avx512_bf16") == 0 ? 2e-2 : 2e-5;
}

void compare_exact(const Cache& cache, const std::vector<Ask>& asks, const Floats& got, Random& random) {
    const Case& c = cache.shape;
    for (const float x : got) require(std::isfinite(x), "a finite result");
    std::int64_t token = 0;
    for (const Ask& ask : asks)
        for (std::int64_t p = ask.begin; p < ask.end; ++p, ++token)
            for (std::int64_t h = 0; h < c.heads; ++h) {
                const std::int64_t column =
                    static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(c.value_dim));
                const double want = exact(cache, cache.rows[ask.row], p, h, column);
                const double have = got[at((token * c.heads + h) * c.value_dim + column)];
                if (std::fabs(want - have) > tolerance(c) * (1 + std::fabs(want))) {
                    std::fprintf(stderr, "position %d head %d: %.8f, not %.8f\n", static_cast<int>(p),
                                 static_cast<int>(h), have, want);
                    require(false, "attention as the formula gives it");
                }
            }
}

bool same(const float* a, const float* b, std::int64_t count) { return std::memcmp(a, b, at(count) * 4) == 0; }

// Each query alone, rows in chunks, and other thread counts give the same bits.
void compare_cuts(const Cache& cache, const std::vector<Ask>& asks, const Floats& whole, AttentionPlan& plan,
                  Random& random) {
    const std::int64_t width = cache.shape.heads * cache.shape.value_dim;
    for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        require(attend(cache, asks, plan) == whole, "the same bits on any number of threads");
        std::int64_t token = 0;
        for (const Ask& ask : asks) {
            for (std::int64_t p = ask.begin; p < ask.end;) {
                const std::int64_t end =
                    std::min<std::int64_t>(ask.end, p + 1 + static_cast<std::int64_t>(random() % 30));
                const Floats part = attend(cache, {{ask.row, p, end}}, plan);
                require(same(part.data(), whole.data() + token * width, (end - p) * width),
                        "the same bits in any chunks");
                token += end - p;
                p = end;
            }
        }
    }
    set_num_threads(2);
}

void ragged(const Case& c, Random& random, bool cuts) {
    Cache cache(c, 16 + 3200 / c.block_size, random);
    AttentionPlan plan;
    for (const std::int64_t context : {1, 16, 17, 33, 300, 90, 5, 257, 700}) add_row(cache, context, random);
    const std::vector<Ask> asks{{0, 0, 1},   {1, 15, 16}, {2, 16, 17},   {3, 0, 33},    {4, 299, 300},
                                {5, 20, 90}, {6, 2, 5},   {7, 250, 257}, {8, 699, 700}, {4, 40, 41}};
    const Floats got = attend(cache, asks, plan);
    compare_exact(cache, asks, got, random);
    if (cuts) compare_cuts(cache, asks, got, plan, random);
}

// Rows with a common beginning give the same bits whether its blocks are shared or each row has its own.
void shared_prefix(const Case& c, Random& random) {
    Cache apart(c, 16 + 12000 / c.block_size, random), shared(c, 16 + 12000 / c.block_size, random);
    shared.sinks = apart.sinks;
    std::vector<Ask> asks;
    constexpr std::int64_t common[] = {0, 600, 600, 600, 900, 600, 300, 0};
    for (std::size_t r = 0; r < 8; ++r) {
        const std::int64_t context = 610 + 97 * static_cast<std::int64_t>(r), like = common[r];
        const std::size_t mate = r == 4 ? 3 : 0;
        const std::int64_t prefix = std::min(like, r == 4 ? 650 : like);
        Random tail(r), again(r);
        add_row(apart, context, tail, r ? &apart.rows[mate] : nullptr, 0);
        Row& row = apart.rows.back();
        if (r) std::copy_n(apart.rows[mate].qkv.begin(), prefix * apart.width(), row.qkv.begin());
        write(apart, row, 0, context);
        add_row(shared, context, again, r ? &shared.rows[mate] : nullptr, prefix);
        const std::int64_t queries = r == 5 ? 3 : r == 2 ? 40 : 1;
        asks.push_back({r, context - queries, context});
    }
    AttentionPlan plan;
    for (const int threads : {1, 2, 5}) {
        set_num_threads(threads);
        const Floats a = attend(apart, asks, plan), b = attend(shared, asks, plan);
        require(a == b, "the same bits whether blocks are shared or not");
        if (c.window == 0) {
            const auto common_items =
                std::ranges::count_if(plan.items, [](const AttentionItem& item) { return item.parts > 1; });
            require(common_items > 0, "a shared block is treated once");
        }
    }
    set_num_threads(2);
}

// Stored keys and values are as near to the written ones as their type allows.
void precision(Random& random) {
    constexpr double allowed[] = {0.0, 4e-3, 5e-4, 7e-2, 1.0 / 127, 1.0 / 15};  // of the greatest magnitude
    for (int type = 0; type < 6; ++type) {
        Case c{.type = static_cast<KvType>(type), .dim = 75, .value_dim = 40};
        Cache cache(c, 6, random);
        add_row(cache, 50, random);
        const Row& row = cache.rows[0];
        for (std::int64_t p = 0; p < 50; ++p)
            for (std::int64_t h = 0; h < c.kv_heads; ++h)
                for (std::int64_t d = 0; d < c.dim; ++d) {
                    const float* const x = row.qkv.data() + p * cache.width();
                    const double key = x[(c.heads + h) * c.dim + d];
                    require(std::fabs(cache.key(row, p, h, d) - key) <= allowed[type] * 5,
                            "a key near the one written");
                    if (d >= c.value_dim) continue;
                    const double value = x[(c.heads + c.kv_heads) * c.dim + h * c.value_dim + d];
                    require(std::fabs(cache.value(row, p, h, d) - value) <= allowed[type] * 5,
                            "a value near the one written");
                }
    }
}

// Norm, rotation and split as the formulas say, in double.
void rotation(Random& random) {
    for (const std::int64_t half : {4, 10, 32}) {
        const std::int64_t heads = 3, kv_heads = 2, dim = 64, value_dim = 24, tokens = 19;
        const std::int64_t width = (heads + kv_heads) * dim + kv_heads * value_dim;
        const Floats qkv = normals(random, tokens * width), norm = normals(random, (heads + kv_heads) * dim);
        Floats frequencies(at(half)), cos(at(tokens * 2 * half)), sin(cos), query(at(tokens * heads * dim));
        for (std::int64_t i = 0; i < half; ++i)
            frequencies[at(i)] = static_cast<float>(std::pow(10000.0, -double(i) / double(half)));
        std::vector<std::int64_t> positions, slots;
        for (std::int64_t t = 0; t < tokens; ++t) {
            positions.push_back(t * 37);
            slots.push_back(16 + t);
        }
        const KvLayout layout = kv_layout(KvType::f32, 16, kv_heads, dim, value_dim);
        std::vector<std::byte> keys(at(3 * layout.key_block_bytes)), values(at(3 * layout.value_block_bytes));
        run_team([&](Worker& worker) {
            ops().rope_tables({positions.data(), frequencies.data(), tokens, half, 1.5f, cos.data(), sin.data()},
                              worker);
            ops().rope_write({qkv.data(), cos.data(), sin.data(), 2 * half, slots.data(), tokens, heads, norm.data(),
                              1e-6f, layout, keys.data(), values.data(), query.data()},
                             worker);
        });
        for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t h = 0; h < heads + kv_heads; ++h) {
                const float* const x = qkv.data() + t * width + h * dim;
                double squares = 0.0;
                for (std::int64_t d = 0; d < dim; ++d) squares += double(x[d]) * x[d];
                const auto normed = [&](std::int64_t d) {
                    return x[d] / std::sqrt(squares / double(dim) + 1e-6) * norm[at(h * dim + d)];
                };
                for (std::int64_t d = 0; d < dim; ++d) {
                    double want = normed(d);
                    if (d < 2 * half) {
                        const double angle = static_cast<float>(positions[at(t)]) * frequencies[at(d % half)];
                        const double other = normed(d < half ? d + half : d - half) * (d < half ? -1 : 1);
                        want = 1.5 * (want * std::cos(angle) + other * std::sin(angle));
                    }
                    const std::int64_t slot = slots[at(t)];
                    const float have = h < heads ? query[at((t * heads + h) * dim + d)]
                                                 : read<float>(keys.data() + slot / 16 * layout.key_block_bytes +
                                                                   (h - heads) * key_tile_bytes(layout),
                                                               d * 16 + slot % 16);
                    require(std::fabs(want - have) < 2e-5 * (1 + std::fabs(want)), "rotated as the formula says");
                }
            }
    }
}

std::vector<Case> cases() {
    std::vector<Case> out;
    for (int type = 0; type < 6; ++type) {
        const auto t = static_cast<KvType>(type);
        out.push_back({.type = t, .heads = 6, .kv_heads = 2, .dim = 20, .value_dim = 36, .window = 40, .sinks = true});
        out.push_back({.type = t, .heads = 8, .kv_heads = 1, .dim = 32, .value_dim = 32, .cap = 2.0f});
        out.push_back({.type = t, .heads = 5, .kv_heads = 1, .dim = 57, .value_dim = 48, .latent = true});
        out.push_back(
            {.type = t, .heads = 80, .kv_heads = 1, .dim = 100, .value_dim = 96, .latent = true, .both = true});
    }
    out.push_back({.type = KvType::f32, .heads = 3, .kv_heads = 3, .dim = 8, .value_dim = 80, .block_size = 4});
    out.push_back(
        {.type = KvType::i8, .heads = 5, .kv_heads = 2, .dim = 17, .value_dim = 8, .block_size = 12, .window = 1});
    out.push_back({.type = KvType::f16,
                   .heads = 2,
                   .kv_heads = 1,
                   .dim = 8,
                   .value_dim = 8,
                   .block_size = 40,
                   .window = 300,
                   .sinks = true,
                   .cap = 3.0f});
    out.push_back({.type = KvType::bf16, .heads = 1, .kv_heads = 2, .dim = 9, .value_dim = 9, .block_size = 512});
    out.push_back({.type = KvType::bf16, .heads = 5, .kv_heads = 1, .dim = 17, .value_dim = 72, .block_size = 13});
    out.push_back(
        {.type = KvType::bf16, .heads = 4, .kv_heads = 2, .dim = 16, .value_dim = 16, .block_size = 7, .window = 9});
    for (const KvType type :
         {KvType::f32, KvType::bf16, KvType::f16})  // values of more vectors than are summed at a time
        out.push_back({.type = type, .heads = 4, .kv_heads = 2, .dim = 32, .value_dim = 144});
    return out;
}

}  // namespace

int main() {
    for (const auto isa : built_isas()) {
        if (select_isa(isa).refusal != Refusal::none) continue;
        Random random(5);
        set_num_threads(2);
        rotation(random);
        precision(random);
        for (const Case& c : cases()) ragged(c, random, true);
        ragged({.type = KvType::bf16, .heads = 90, .kv_heads = 1, .dim = 96, .value_dim = 64}, random, false);
        for (const KvType type : {KvType::f32, KvType::bf16, KvType::f16, KvType::i8, KvType::i4})
            for (const std::int64_t window : {0, 700}) {
                shared_prefix({.type = type,
                               .heads = 4,
                               .kv_heads = 2,
                               .dim = 16,
                               .value_dim = 16,
                               .window = window,
                               .sinks = true},
                              random);
                shared_prefix({.type = type,
                               .heads = 20,
                               .kv_heads = 1,
                               .dim = 8,
                               .value_dim = 8,
                               .block_size = 8,
                               .window = window},
                              random);
                shared_prefix({.type = type,
                               .heads = 20,
                               .kv_heads = 1,
                               .dim = 24,
                               .value_dim = 16,
                               .window = window,
                               .latent = true},
                              random);
            }
        std::printf("%s passed\n", ops().isa);
    }
    return 0;
}
