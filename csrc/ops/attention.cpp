// Attention over the paged cache (Kwon et al. 2023, arXiv:2309.06180), partitions merged as in Milakov &
// Gimelshein 2018, arXiv:1805.02867; slopes as in Press et al. 2021, arXiv:2108.12409.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "ops/attention_blocks.h"
#include "ops/attention_digits.h"
#include "ops/attention_dots.h"
#include "ops/attention_items.h"
#include "ops/attention_merge.h"
#include "ops/attention_plan.h"
#include "ops/gathered_tiles.h"
#include "ops/kv_tiles.h"
#include "ops/latent_tiles.h"

#ifdef PENSTOCK_BF16_DOTS
namespace penstock::PENSTOCK_BASE_ISA {
void attention_items(const AttentionArgs& args, const ItemRange& range, Worker& worker);
}
#endif

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr float no_score = -std::numeric_limits<float>::infinity();
constexpr std::int64_t value_columns = 64;  // columns of values converted at a time
constexpr std::int64_t tiles_far = 8;       // tiles that lie between what is asked for and what is read

// A query of an item: which positions it sees, and where its states go.
struct ItemQuery {
    std::int64_t token, low, end;
    std::int64_t state;  // -1: the item finishes it
    bool folds;
    std::int64_t position;
    std::int64_t from, to;  // of the partition at hand, from its start; none if equal
};

// Rows (a query and one of its heads) treated together, and the lanes any of them sees.
struct RowBlock {
    std::int64_t row, count, from, to;
};

// Consecutive tiles of a row, as tiles of its blocks.
struct TileWalk {
    TileWalk(const KvLayout& layout, std::int64_t tile)
        : per_block(tiles_per_block(layout)), block(tile / per_block), inner(tile % per_block) {}
    void step() {
        if (++inner < per_block) return;
        inner = 0;
        ++block;
    }
    std::int64_t per_block, block, inner;
};

// One item's work on one chunk of the heads that read one KV head.
struct Piece {
    const AttentionItem* item;
    std::int64_t kv_head, chunk;
};

// A row's tiles of keys of one KV head, [from, to); returns how many, none where tiles have to be gathered.
std::int64_t find_keys(const AttentionArgs& args, const std::int32_t* table, std::int64_t kv_head, std::int64_t from,
                       std::int64_t to, const std::byte** out) {
    if (args.layout.block_size % kv_tile != 0) return 0;
    const std::int64_t bytes = key_tile_bytes(args.layout);
    TileWalk walk(args.layout, from);
    for (std::int64_t t = from; t < to; ++t, walk.step())
        *out++ = args.keys + table[walk.block] * args.layout.key_block_bytes +
                 (kv_head * walk.per_block + walk.inner) * bytes;
    return std::max<std::int64_t>(0, to - from);
}

// Those that a piece of work reads first.
std::int64_t find_first_keys(const AttentionArgs& args, const Piece& piece, const std::byte** out) {
    const AttentionPlan& plan = *args.plan;
    const AttentionPart& part = plan.parts[static_cast<std::size_t>(piece.item->first_part)];
    const QueryUnit& unit = plan.units[static_cast<std::size_t>(part.unit)];
    const std::int64_t start = piece.item->begin * partition_tiles;
    const std::int64_t from = own_position(args.layout, seen(args.rows, unit, 0).low) / kv_tile;
    const std::int64_t end = own_position(args.layout, seen(args.rows, unit, unit.count - 1).end);
    const std::int64_t to = (end + kv_tile - 1) / kv_tile;
    return find_keys(args, args.rows.block_table + unit.row * args.rows.table_width, piece.kv_head,
                     std::max(start, from), std::min(start + partition_tiles, to), out);
}

template <KvType type>
class ItemRun {
public:
    // `next` is what the thread does afterwards, or null.
    ItemRun(const AttentionArgs& args, const Piece& piece, const Piece* next)
        : args_(args),
          plan_(*args.plan),
          layout_(args.layout),
          item_(*piece.item),
          next_(next),
          kv_head_(piece.kv_head),
          digits_(in_fours(args.layout)),
          whole_(args.layout.block_size % kv_tile == 0) {
        const std::int64_t end = first_query_head(kv_head_ + 1, args.heads, layout_.heads);
        first_head_ = first_query_head(kv_head_, args.heads, layout_.heads) + piece.chunk * plan_.head_chunk;
        heads_ = std::max<std::int64_t>(0, std::min(first_head_ + plan_.head_chunk, end) - first_head_);
        columns_ = padded_value_dim(layout_);
        key_codes_ = key_code_bytes(layout_);
        value_codes_ = value_code_bytes(layout_);
    }

    void run() {
        if (heads_ == 0) return;
        gather_queries();
        take_memory();
        cut_blocks();
        for (std::int64_t p = item_.begin; p < item_.end; ++p) {
            locate(p);
            if (tile_from_ < tile_to_) {
                score();
                for (std::int64_t t = tile_from_; !deep_ && t < std::min(tile_from_ + 2, tile_to_); ++t)
                    prefetch(value_tile_[t], value_tile_bytes(layout_));
                weigh();
                sum();
            }
            keep_states(p);
        }
        leave_results();
    }

private:
    static constexpr bool scaled = type == KvType::f8_e4m3 || type == KvType::i8;
    static constexpr bool dots = bf16_dots && type == KvType::bf16;  // queries and weights are bfloat16 as well
    static constexpr bool integers = type == KvType::i8;             // exact sums of them, unless the cache is latent
    using Stored = Codes<type == KvType::i4 ? KvType::f32 : type>;
    using Converted = Codes<KvType::f32>;

    void gather_queries() {
        for (std::int64_t i = 0; i < item_.parts; ++i) {
            const AttentionPart& part = plan_.parts[static_cast<std::size_t>(item_.first_part + i)];
            const QueryUnit& unit = plan_.units[static_cast<std::size_t>(part.unit)];
            if (i == 0) table_ = args_.rows.block_table + unit.row * args_.rows.table_width;
            for (std::int64_t q = 0; q < unit.count; ++q) {
                const std::int64_t state = unit.state < 0 ? -1 : unit.state + q * unit.states + part.state;
                const Seen view = seen(args_.rows, unit, q);
                for (std::int64_t h = 0; h < heads_; ++h)
                    query_of_row_[static_cast<std::size_t>(rows_++)] = static_cast<std::uint8_t>(num_queries_);
                queries_[static_cast<std::size_t>(num_queries_++)] = {
                    unit.token + q, view.low, view.end, state, part.folds, unit.position + q, 0, 0};
                low_ = std::min(low_, own_position(layout_, view.low));
                end_ = std::max(end_, std::min(own_position(layout_, view.end), item_.end * partition_lanes));
            }
        }
    }

    // All floats; queries are scaled as they are brought in.
    void take_memory() {
        const std::int64_t dim = layout_.key_dim, most = item_rows;
        const std::int64_t sizes[] = {most * round_up(dim, 16),
                                      most * partition_lanes,
                                      most * columns_,
                                      vec::few_queries * columns_,
                                      8 * round_up(most, 16),
                                      vec::vector_block * kv_tile * round_up(dim, 2),
                                      partition_lanes * value_columns,
                                      whole_ ? 0 : partition_tiles * gathered_bytes() / 4};
        std::int64_t total = 0;
        for (const std::int64_t size : sizes) total += round_up(size, 16);
        auto* at = reinterpret_cast<float*>(thread_memory(2, static_cast<std::size_t>(total) * sizeof(float)));
        float** const places[] = {&query_, &scores_, &sums_, &part_, &greatest_, &keys_, &values_, &gathered_};
        for (int i = 0; i < 8; ++i) {
            *places[i] = at;
            at += round_up(sizes[i], 16);
        }
        total_ = greatest_ + round_up(most, 16);
        before_ = total_ + round_up(most, 16);
        now_ = before_ + round_up(most, 16);
        query_step_ = now_ + round_up(most, 16);
        weight_step_ = query_step_ + round_up(most, 16);
        query_sum_ = reinterpret_cast<std::int32_t*>(weight_step_ + round_up(most, 16));
        weight_sum_ = query_sum_ + round_up(most, 16);
        for (std::int64_t r = 0; r < rows_; ++r) {
            const float* const from = args_.query + (query_of(r).token * args_.heads + head_of(r)) * dim;
            if (next_ && next_->item == &item_)  // and reads those beside it
                prefetch(reinterpret_cast<const std::byte*>(from + heads_ * dim), dim * 4);
            if constexpr (dots)
                take_pairs(from, r);
            else if (integers && digits_)
                take_digits(from, r);
            else
                for (std::int64_t d = 0; d < dim; ++d) query_[r * dim + d] = from[d] * args_.scale;
            reset(r);
        }
    }

    // A query as bfloat16, and a zero where it lacks the second of a pair.
    void take_pairs(const float* from, std::int64_t row) {
        const std::int64_t dim = layout_.key_dim, padded = padded_key_dim(layout_);
        std::uint16_t* const to = query_pairs() + row * padded;
        const vec::F32x16 scale = vec::splat16(args_.scale);
        const std::int64_t whole = dim / 16 * 16;
        for (std::int64_t d = 0; d < whole; d += 16) store_bf16(to + d, vec::load16(from + d) * scale);
        if (whole == dim) return;
        std::uint16_t bits[16];
        store_bf16(bits, vec::load_some(from + whole, dim - whole) * scale);
        std::copy_n(bits, padded - whole, to + whole);
    }
    // A query as whole numbers, and zeros up to a multiple of 16.
    void take_digits(const float* from, std::int64_t row) {
        const std::int64_t dim = layout_.key_dim;
        const auto part = [&](std::int64_t d) {
            return vec::load_some(from + d, std::min<std::int64_t>(16, dim - d)) * vec::splat16(args_.scale);
        };
        vec::F32x16 most = vec::splat16(0.0f), odd = most;
        for (std::int64_t d = 0; d < dim; d += 16) {
            most = vec::max(vec::abs(part(d)), most);
            odd = odd + (part(d) - part(d));
        }
        Digits digits(vec::most(most), vec::sum(odd), most_digits(padded_key_dim(layout_)));
        std::int8_t* const to = query_digits(row);
        for (std::int64_t d = 0; d < dim; d += 16) digits.store(to + 2 * d, part(d));
        query_step_[row] = digits.step;
        query_sum_[row] = digits.sum();
    }
    std::int8_t* query_digits(std::int64_t row) const {
        return reinterpret_cast<std::int8_t*>(query_) + row * 2 * padded_key_dim(layout_);
    }
    // A row's weights as whole numbers, too, take the place of the first half of its scores.
    std::int8_t* weight_digits(std::int64_t row) const {
        return reinterpret_cast<std::int8_t*>(scores_ + row * partition_lanes);
    }
    std::uint16_t* query_pairs() const { return reinterpret_cast<std::uint16_t*>(query_); }
    // A row's weights as bfloat16 take the place of the first half of its scores.
    std::uint16_t* weight_pairs(std::int64_t row) const {
        return reinterpret_cast<std::uint16_t*>(scores_ + row * partition_lanes);
    }

    const ItemQuery& query_of(std::int64_t row) const { return queries_[query_of_row_[static_cast<std::size_t>(row)]]; }
    std::int64_t gathered_bytes() const { return key_tile_bytes(layout_) + value_tile_bytes(layout_); }
    std::int64_t head_of(std::int64_t row) const { return first_head_ + row % heads_; }

    void reset(std::int64_t row) {
        greatest_[row] = no_score;
        total_[row] = 0.0f;
        std::fill_n(sums_ + row * columns_, columns_, 0.0f);
    }

    void cut_blocks() {
        num_blocks_ = rows_ <= vec::few_queries ? 1 : (rows_ + vec::many_queries - 1) / vec::many_queries;
        for (std::int64_t b = 0; b < num_blocks_; ++b) {
            const std::int64_t row = rows_ * b / num_blocks_;
            blocks_[static_cast<std::size_t>(b)] = {row, rows_ * (b + 1) / num_blocks_ - row, 0, 0};
        }
        converts_ = !dots && !digits_ &&
                    (type == KvType::i4 || (type != KvType::f32 && (rows_ > vec::few_queries || layout_.latent)));
        few_ = rows_ <= vec::few_queries && !dots && !digits_ && !converts_ && !layout_.latent;
    }

    // Which of a partition's lanes each query and block sees, and its tiles.
    void locate(std::int64_t partition) {
        const std::int64_t start = start_ = run_of_all(layout_, partition) * partition_lanes;
        std::int64_t from = partition_lanes, to = 0;
        for (ItemQuery& query : std::span(queries_.data(), static_cast<std::size_t>(num_queries_))) {
            query.from = std::clamp<std::int64_t>(query.low - start, 0, partition_lanes);
            query.to = std::clamp<std::int64_t>(query.end - start, query.from, partition_lanes);
            if (query.from == query.to) continue;
            from = std::min(from, query.from);
            to = std::max(to, query.to);
        }
        for (RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_))) {
            block.from = partition_lanes;
            block.to = 0;
            for (std::int64_t r = block.row; r < block.row + block.count; ++r) {
                const ItemQuery& query = query_of(r);
                if (query.from == query.to) continue;
                block.from = std::min(block.from, query.from);
                block.to = std::max(block.to, query.to);
            }
        }
        tile_from_ = from / kv_tile;
        tile_to_ = (to + kv_tile - 1) / kv_tile;
        find_tiles(partition * partition_tiles);
    }

    void find_tiles(std::int64_t first) {
        if (!whole_) return gather_tiles(first);
        const std::int64_t value_bytes = value_tile_bytes(layout_);
        find_keys(args_, table_, kv_head_, first + tile_from_, first + tile_to_, key_tile_ + tile_from_);
        TileWalk walk(layout_, first + tile_from_);
        for (std::int64_t t = tile_from_; t < tile_to_; ++t, walk.step()) {
            const std::int64_t tile = kv_head_ * walk.per_block + walk.inner;
            value_tile_[t] = layout_.latent
                                 ? key_tile_[t]
                                 : args_.values + table_[walk.block] * layout_.value_block_bytes + tile * value_bytes;
        }
        const std::int64_t next = first + partition_tiles;
        const std::byte* keys[partition_tiles];
        std::int64_t num_keys = 0;
        const std::int64_t end_tile = (end_ + kv_tile - 1) / kv_tile;
        if (next < end_tile)
            num_keys = find_keys(args_, table_, kv_head_, next, std::min(next + partition_tiles, end_tile), keys);
        else if (next_)
            num_keys = find_first_keys(args_, *next_, keys);
        few_ ? look_far(keys, num_keys) : look_ahead(keys, num_keys);
    }

    // Tokens that no query of the item sees are zeros: their blocks may be another row's.
    void gather_tiles(std::int64_t first) {
        const std::int64_t per_block = tiles_per_block(layout_);
        auto* at = reinterpret_cast<std::byte*>(gathered_);
        for (std::int64_t t = tile_from_; t < tile_to_; ++t) {
            std::byte* const keys = at;
            std::byte* const values = layout_.latent ? at : at + key_tile_bytes(layout_);
            std::memset(at, 0, static_cast<std::size_t>(gathered_bytes()));
            at += gathered_bytes();
            key_tile_[t] = keys;
            value_tile_[t] = values;
            const std::int64_t start = (first + t) * kv_tile;
            const std::int64_t end = std::min(start + kv_tile, end_);
            for (std::int64_t p = std::max(start, low_), count; p < end; p += count) {
                const std::int64_t block = table_[p / layout_.block_size], place = p % layout_.block_size;
                const std::int64_t tile = kv_head_ * per_block + place / kv_tile, lane = place % kv_tile;
                count = std::min({end - p, kv_tile - lane, layout_.block_size - place});
                copy_keys(layout_, args_.keys + block * layout_.key_block_bytes + tile * key_tile_bytes(layout_), lane,
                          keys, p - start, count);
                if (!layout_.latent)
                    copy_values(layout_,
                                args_.values + block * layout_.value_block_bytes + tile * value_tile_bytes(layout_),
                                lane, values, p - start, count);
            }
        }
        few_ ? look_far(nullptr, 0) : look_ahead(nullptr, 0);
    }

    // Tiles in the order they are read, one at a time; of the last, those after them are not known.
    void look_far(const std::byte* const* keys, std::int64_t num_keys) {
        const std::int64_t tiles = tile_to_ - tile_from_;
        const std::byte** at = std::copy_n(key_tile_ + tile_from_, tiles, reading_);
        at = std::copy_n(value_tile_ + tile_from_, tiles, at);
        at = std::copy_n(keys, num_keys, at);
        std::fill(at, reading_ + 3 * partition_tiles, reading_[0]);
        far_ = std::min<std::int64_t>(tiles_far, tiles);
    }

    // While values are summed, the keys that follow are asked for. Where there are few tiles, values are asked for at
    // the same time, two tiles further on, and at last the beginnings of the keys; else while the keys before them are
    // read.
    void look_ahead(const std::byte* const* keys, std::int64_t num_keys) {
        const std::int64_t tiles = tile_to_ - tile_from_;
        deep_ = tiles > vec::vector_block;
        if (deep_) {
            for (std::int64_t k = 0; k < num_keys; ++k) ahead_[k] = {keys[k], key_tile_bytes(layout_)};
            for (std::int64_t t = 0; t <= tiles; ++t) ahead_end_[tile_from_ + t] = ahead_ + t * num_keys / tiles;
            return;
        }
        const std::int64_t bytes = std::min<std::int64_t>(1024, key_tile_bytes(layout_) / 2);
        Stretch* at = ahead_;
        for (std::int64_t t = tile_from_; t < tile_to_; ++t) {
            ahead_end_[t] = at;
            if (t + 2 < tile_to_) {
                *at++ = {value_tile_[t + 2], value_tile_bytes(layout_)};
                continue;
            }
            for (std::int64_t i = 0; i < std::min<std::int64_t>(vec::vector_block, num_keys); ++i)
                *at++ = {keys[i] + (t + 1 < tile_to_ ? 0 : bytes), bytes};
        }
        ahead_end_[tile_to_] = at;
    }

    QueryBlock query_block(const RowBlock& block) const {
        return {query_ + block.row * layout_.key_dim, layout_.key_dim, block.count};
    }

    // Of the only block: tile after tile, since memory is read fastest in one stream.
    void score_few() {
        const auto keys = stored<typename Stored::Code>(key_tile_);
        for (std::int64_t t = tile_from_; t < tile_to_; ++t)
            score_tiles<Stored, vec::few_queries>(query_block(blocks_[0]), layout_.key_dim,
                                                  {keys.data() + t, reading_ + (t - tile_from_) + far_}, 1,
                                                  scores_ + t * kv_tile, partition_lanes);
    }
    void sum_few() {
        const auto tiles = stored<typename Stored::Code>(value_tile_);
        const RowBlock& block = blocks_[0];
        for (std::int64_t t = tile_from_; t < tile_to_; ++t) {
            const std::int64_t from = std::max(block.from, t * kv_tile), to = std::min(block.to, (t + 1) * kv_tile);
            const std::byte* const* const place = reading_ + (tile_to_ - tile_from_) + (t - tile_from_);
            sum_values<Stored, true>({scores_, partition_lanes, block.count},
                                     {from, to, t == tile_from_, t + 1 == tile_to_}, {tiles.data(), columns_, {}},
                                     columns_ / 16, {place[1], place[far_]}, part_, sums_, columns_, {before_, now_});
        }
    }

    void score() {
        if constexpr (type != KvType::i4 && !dots)
            if (few_) return score_few();
        constexpr std::int64_t step = vec::vector_block;
        const auto keys = stored<typename Stored::Code>(key_tile_);
        for (std::int64_t group = tile_from_ / step * step; group < tile_to_; group += step) {
            const std::int64_t begin = std::max(group, tile_from_), end = std::min(group + step, tile_to_);
            const float* converted[step];
            if (converts_)
                for (std::int64_t t = begin; t < end; ++t) {
                    const std::byte* const ahead = deep_ ? value_tile_[t] : nullptr;
                    float* const to = keys_ + (t - group) * kv_tile * round_up(layout_.key_dim, 2);
                    if (layout_.latent)
                        convert_latent_keys<type>(key_tile_[t], layout_, to);
                    else if constexpr (!integers)
                        convert_keys<type>(key_tile_[t], layout_, to, ahead);
                    converted[t - group] = to;
                }
            for (const RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_))) {
                const std::int64_t from = std::max(begin, block.from / kv_tile);
                const std::int64_t to = std::min(end, (block.to + kv_tile - 1) / kv_tile);
                if (from >= to) continue;
                float* const out = scores_ + block.row * partition_lanes + from * kv_tile;
                if constexpr (dots) {
                    const std::int64_t dim = padded_key_dim(layout_);
                    score_pairs({query_pairs() + block.row * dim, dim, block.count}, dim,
                                {keys.data() + from, deep_ && &block == blocks_.data() ? value_tile_ + from : nullptr},
                                to - from, out, partition_lanes);
                } else if (converts_)
                    score_tiles<Converted>(query_block(block), layout_.key_dim, {converted + (from - group), nullptr},
                                           to - from, out, partition_lanes);
                else if constexpr (integers)
                    score_digits({query_digits(block.row), 2 * padded_key_dim(layout_), block.count,
                                  query_step_ + block.row, query_sum_ + block.row},
                                 padded_key_dim(layout_) / kv_tile, stored<std::uint8_t>(key_tile_).data() + from,
                                 deep_ && &block == blocks_.data() ? value_tile_ + from : nullptr, asked_with_keys(),
                                 to - from, out, partition_lanes);
                else if constexpr (type == KvType::f32)
                    score_tiles<Stored>(query_block(block), layout_.key_dim,
                                        {keys.data() + from, deep_ ? value_tile_ + from : nullptr}, to - from, out,
                                        partition_lanes);
            }
        }
    }

    // Bytes of a tile of values that are asked for while keys are read as integers; the rest while rows are weighed, so
    // that memory does not rest then.
    std::int64_t asked_with_keys() const { return value_tile_bytes(layout_) / 128 * 64; }

    // A partition's tiles, as the codes they hold.
    template <class Code>
    static std::array<const Code*, partition_tiles> stored(const std::byte* const* tiles) {
        std::array<const Code*, partition_tiles> out;
        for (std::size_t t = 0; t < partition_tiles; ++t) out[t] = reinterpret_cast<const Code*>(tiles[t]);
        return out;
    }

    void weigh() {
        for (const RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_)))
            for (std::int64_t r = block.row; r < block.row + block.count; ++r) weigh_row(r, block);
        take_in();
    }

    // Turns a row's scores into weights, zeros where only other rows of the block see something. Leaves the greatest
    // score and the sum of weights in before_ and now_.
    void weigh_row(std::int64_t row, const RowBlock& block) {
        const ItemQuery& query = query_of(row);
        float* const scores = scores_ + row * partition_lanes;
        const std::int64_t begin = query.from / kv_tile, end = (query.to + kv_tile - 1) / kv_tile;
        before_[row] = no_score;
        now_[row] = 0.0f;
        weight_step_[row] = 0.0f;
        weight_sum_[row] = 0;
        const bool sees = query.from < query.to;
        const auto blank = [&] {
            for (std::int64_t t = block.from / kv_tile; t * kv_tile < block.to; ++t)
                if (!sees || t < begin || t >= end) blank_weight(row, t);
        };
        if (!sees) return blank();
        const float slope = args_.slopes ? args_.slopes[head_of(row)] : 0.0f;
        const float greatest = finish_scores(scores, begin, end, query, slope);
        const vec::F32x16 top = vec::splat16(greatest);
        vec::F32x16 total = vec::splat16(0.0f), most = total, odd = total;
        const std::int64_t asked = asked_with_keys(), rest = value_tile_bytes(layout_) - asked;
        const bool ask = digits_ && deep_ && &block == blocks_.data();
        for (std::int64_t t = begin; t < end; ++t) {
            if (ask) prefetch_part(value_tile_[t] + asked, rest, row - block.row, block.count);
            vec::F32x16 weight = vec::exp(vec::load16(scores + t * kv_tile) - top);
            if constexpr (dots) {
                total = total + store_weight(row, t, weight);
                continue;
            }
            total = total + weight;
            if (scaled && !layout_.latent) {
                const float* const scales = token_scales(value_tile_[t], value_codes_);
                weight = masked(weight * vec::load16(scales), t, query, 0.0f);
                most = vec::max(weight, most);
                odd = odd + (weight - weight);
            }
            store_weight(row, t, weight);
        }
        if (integers && digits_) {
            Digits digits(vec::most(most), vec::sum(odd), most_digits(partition_lanes));
            for (std::int64_t t = begin; t < end; ++t)
                digits.store(weight_digits(row) + t * digit_bytes, vec::load16(scores + t * kv_tile));
            weight_step_[row] = digits.step;
            weight_sum_[row] = digits.sum();
        }
        blank();  // at last, because weights that are no floats lie where other tiles' scores lay
        before_[row] = greatest;
        now_[row] = vec::sum(total);
    }

    // Final scores of tiles [begin, end) in place; the greatest of them. Tiles a query sees whole are final already.
    float finish_scores(float* scores, std::int64_t begin, std::int64_t end, const ItemQuery& query,
                        float slope) const {
        const bool all = scaled || args_.soft_cap > 0.0f || slope != 0.0f;
        const std::int64_t from = all ? end : std::min(end, (query.from + kv_tile - 1) / kv_tile);
        const std::int64_t to = all ? end : std::max(from, query.to / kv_tile);
        vec::F32x16 most = vec::splat16(no_score), other = most;
        const auto finish = [&](std::int64_t t) {
            const vec::F32x16 score = final_score(vec::load16(scores + t * kv_tile), t, query, slope);
            vec::store(scores + t * kv_tile, score);
            most = vec::max(score, most);
        };
        for (std::int64_t t = begin; t < from; ++t) finish(t);
        std::int64_t t = from;
        for (; t + 1 < to; t += 2) {
            most = vec::max(vec::load16(scores + t * kv_tile), most);
            other = vec::max(vec::load16(scores + (t + 1) * kv_tile), other);
        }
        if (t < to) most = vec::max(vec::load16(scores + t * kv_tile), most);
        for (t = to; t < end; ++t) finish(t);
        return vec::most(vec::max(other, most));
    }

    // The running greatest scores and sums of weights take in those of the partition, as in Taking; a row that sees
    // nothing there stays as it is, since e^x is 0 for what is not a number.
    void take_in() {
        for (std::int64_t r = 0; r < rows_; r += 16) {
            const std::int64_t n = std::min<std::int64_t>(16, rows_ - r);
            const vec::F32x16 greatest = vec::load_some(greatest_ + r, n), other = vec::load_some(before_ + r, n);
            const vec::F32x16 most = vec::max(greatest, other);
            const vec::F32x16 before = vec::exp(greatest - most), now = vec::exp(other - most);
            const vec::F32x16 total = vec::load_some(total_ + r, n) * before + vec::load_some(now_ + r, n) * now;
            vec::store_some(greatest_ + r, most, n);
            vec::store_some(total_ + r, total, n);
            vec::store_some(before_ + r, before, n);
            vec::store_some(now_ + r, now, n);
        }
    }

    // Returns the weight as it is stored.
    vec::F32x16 store_weight(std::int64_t row, std::int64_t tile, vec::F32x16 weight) {
        if constexpr (dots) return store_bf16(weight_pairs(row) + tile * kv_tile, weight);
        vec::store(scores_ + row * partition_lanes + tile * kv_tile, weight);
        return weight;
    }

    void blank_weight(std::int64_t row, std::int64_t tile) {
        if (integers && digits_)
            std::memset(weight_digits(row) + tile * digit_bytes, 0, digit_bytes);
        else
            store_weight(row, tile, vec::splat16(0.0f));
    }

    vec::F32x16 final_score(vec::F32x16 score, std::int64_t tile, const ItemQuery& query, float slope) const {
        if (scaled && !layout_.latent) score = score * vec::load16(token_scales(key_tile_[tile], key_codes_));
        if (args_.soft_cap > 0.0f) {
            const vec::F32x16 cap = vec::splat16(args_.soft_cap);
            score = cap * vec::tanh(score / cap);
        }
        if (slope != 0.0f) {
            static constexpr float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const std::int64_t place = start_ + tile * kv_tile - query.position;
            const vec::F32x16 distance = vec::load16(lanes) + vec::splat16(static_cast<float>(place));
            score = vec::fma(vec::splat16(slope), distance, score);
        }
        return masked(score, tile, query, no_score);
    }

    vec::F32x16 masked(vec::F32x16 x, std::int64_t tile, const ItemQuery& query, float other) const {
        const std::int64_t from = std::max<std::int64_t>(0, query.from - tile * kv_tile);
        const std::int64_t to = std::min(query.to - tile * kv_tile, kv_tile);
        return from == 0 && to == kv_tile ? x : vec::keep(x, from, to, vec::splat16(other));
    }

    static const float* token_scales(const std::byte* tile, std::int64_t offset) {
        return reinterpret_cast<const float*>(tile + offset);
    }

    void sum() {
        if constexpr (type != KvType::i4 && !dots)
            if (few_) return sum_few();
        if constexpr (dots) return layout_.latent ? sum_latent_dots() : sum_products();
        if constexpr (integers) {
            if (digits_) return sum_products();
        } else if (!converts_ && !layout_.latent) {
            const auto tiles = stored<typename Stored::Code>(value_tile_);
            return sum_columns(ValueTiles<Stored>{tiles.data(), columns_, {ahead_end_, deep_}}, 0, columns_);
        }
        for (std::int64_t column = 0; column < columns_; column += value_columns) {
            const std::int64_t count = std::min(value_columns, columns_ - column);
            const float* converted[partition_tiles];
            for (std::int64_t t = tile_from_; t < tile_to_; ++t) {
                Ahead{ahead_end_, deep_}.ask(t, column, column + count, columns_);
                float* const to = values_ + t * kv_tile * value_columns;
                if (layout_.latent)
                    convert_latent_values<type>(value_tile_[t], layout_, column, count, to, value_columns);
                else if constexpr (!integers)
                    convert_values<type>(value_tile_[t], layout_, column, count, to, value_columns);
                converted[t] = to;
            }
            sum_columns(ValueTiles<Converted>{converted, value_columns, {}}, column, count);
        }
    }

    // All blocks take some columns before any takes the next, so that those are read from the nearest cache.
    void sum_products() {
        const std::int64_t each = num_blocks_ == 1 && !deep_ ? columns_ : value_columns;
        for (std::int64_t column = 0; column < columns_; column += each)
            for (const RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_))) {
                if (block.from >= block.to) continue;
                const Ahead ahead{&block == blocks_.data() && column == 0 ? ahead_end_ : nullptr, deep_};
                const std::int64_t vectors = std::min(each, columns_ - column) / 16;
                float* const out = sums_ + block.row * columns_ + column;
                const Merging merging{before_ + block.row, now_ + block.row};
                if constexpr (dots)
                    sum_pairs({weight_pairs(block.row), 2 * partition_lanes, block.count}, block.from, block.to,
                              {stored<std::uint16_t>(value_tile_).data(), columns_, ahead}, column, vectors, out,
                              columns_, merging);
                else
                    sum_digits({weight_digits(block.row), 4 * partition_lanes, block.count, weight_step_ + block.row,
                                weight_sum_ + block.row},
                               block.from / kv_tile, (block.to + kv_tile - 1) / kv_tile,
                               stored<std::uint8_t>(value_tile_).data(), columns_, ahead, column, vectors, out,
                               columns_, merging);
            }
    }

    void sum_latent_dots() {
        for (std::int64_t column = 0; column < columns_; column += value_columns) {
            const std::int64_t count = std::min(value_columns, columns_ - column);
            const std::uint16_t* pairs[partition_tiles];
            for (std::int64_t t = tile_from_; t < tile_to_; ++t) {
                Ahead{ahead_end_, deep_}.ask(t, column, column + count, columns_);
                auto* const to = reinterpret_cast<std::uint16_t*>(values_) + t * kv_tile * value_columns;
                latent_value_pairs(value_tile_[t], layout_, column, count, to, value_columns);
                pairs[t] = to;
            }
            for (const RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_)))
                if (block.from < block.to)
                    sum_pairs({weight_pairs(block.row), 2 * partition_lanes, block.count}, block.from, block.to,
                              {pairs, value_columns, {}}, 0, count / 16, sums_ + block.row * columns_ + column,
                              columns_, {before_ + block.row, now_ + block.row});
        }
    }

    template <class C>
    void sum_columns(const ValueTiles<C>& values, std::int64_t column, std::int64_t count) {
        for (const RowBlock& block : std::span(blocks_.data(), static_cast<std::size_t>(num_blocks_))) {
            if (block.from >= block.to) continue;
            const QueryBlock weights{scores_ + block.row * partition_lanes, partition_lanes, block.count};
            sum_values(weights, {block.from, block.to, true, true}, values, count / 16, {}, part_,
                       sums_ + block.row * columns_ + column, columns_, {before_ + block.row, now_ + block.row});
        }
    }

    float* state(std::int64_t index, std::int64_t row) const {
        float* const all = args_.states ? args_.states : plan_.states.get();
        return all + (index * args_.heads + head_of(row)) * plan_.state_floats;
    }

    void keep_state(std::int64_t row, std::int64_t index) {
        float* const to = state(index, row);
        std::memcpy(to, sums_ + row * columns_, static_cast<std::size_t>(columns_) * sizeof(float));
        to[columns_] = greatest_[row];
        to[columns_ + 1] = total_[row];
    }

    void keep_states(std::int64_t partition) {
        for (std::int64_t r = 0; r < rows_; ++r) {
            const ItemQuery& query = query_of(r);
            if (query.folds) continue;
            keep_state(r, query.state + partition - item_.begin);
            reset(r);
        }
    }

    void leave_results() {
        for (std::int64_t r = 0; r < rows_; ++r) {
            const ItemQuery& query = query_of(r);
            if (!query.folds) continue;
            if (query.state >= 0)
                keep_state(r, query.state);
            else
                finish(args_, query.token, head_of(r), sums_ + r * columns_, greatest_[r], total_[r]);
        }
    }

    const AttentionArgs& args_;
    const AttentionPlan& plan_;
    const KvLayout& layout_;
    const AttentionItem& item_;
    const Piece* const next_;
    const std::int32_t* table_ = nullptr;
    std::int64_t kv_head_, first_head_, heads_, columns_;
    std::int64_t key_codes_, value_codes_;  // bytes before a tile's scales
    const bool digits_;                     // queries and weights are whole numbers
    const bool whole_;                      // blocks are multiples of a tile
    std::int64_t num_queries_ = 0, rows_ = 0, num_blocks_ = 0;
    std::int64_t low_ = std::numeric_limits<std::int64_t>::max(), end_ = 0;  // own positions that the item reads
    bool converts_ = false;
    std::array<ItemQuery, item_rows> queries_;
    std::array<std::uint8_t, item_rows> query_of_row_;
    std::array<RowBlock, item_rows> blocks_;
    // of the partition at hand
    std::int64_t start_ = 0;  // its first position
    std::int64_t tile_from_ = 0, tile_to_ = 0;
    const std::byte* key_tile_[partition_tiles] = {};
    const std::byte* value_tile_[partition_tiles] = {};
    bool deep_ = false;  // many tiles
    bool few_ = false;   // rows, which read what is stored
    std::int64_t far_ = 0;
    const std::byte* reading_[3 * partition_tiles];  // keys, values, the next keys; `far_` further on is asked for
    Stretch ahead_[partition_tiles + 2 * vec::vector_block];
    const Stretch* ahead_end_[partition_tiles + 1] = {};
    // [rows][key_dim], [rows][partition_lanes], [rows][columns_], [rows] four times, and converted codes
    float *query_ = nullptr, *scores_ = nullptr, *sums_ = nullptr;
    float* part_ = nullptr;  // [rows of a block][columns_], sums of a partition that go on
    float *greatest_ = nullptr, *total_ = nullptr, *before_ = nullptr, *now_ = nullptr;
    float *keys_ = nullptr, *values_ = nullptr;
    float* gathered_ = nullptr;  // tiles, keys before values, if blocks have none that attention can read
    float *query_step_ = nullptr, *weight_step_ = nullptr;  // [rows], of whole numbers, and the sums of those
    std::int32_t *query_sum_ = nullptr, *weight_sum_ = nullptr;
};

template <KvType type>
void run_items(const AttentionArgs& args, const ItemRange& range, Worker& worker) {
    const AttentionPlan& plan = *args.plan;
    const std::int64_t each = args.layout.heads * plan.head_chunks;
    const auto piece = [&](std::int64_t i) {
        return Piece{&plan.items[static_cast<std::size_t>(range.first + i / each)], i % each / plan.head_chunks,
                     i % plan.head_chunks};
    };
    const std::int64_t count = (range.end - range.first) * each;
    std::int64_t asked = -1;  // the piece whose keys the one before asked for
    worker.share_neighbours(count, range.pieces, [&](std::int64_t begin, std::int64_t end) {
        if (begin != asked) {
            const std::byte* first[partition_tiles];
            const std::int64_t tiles = find_first_keys(args, piece(begin), first);
            for (std::int64_t t = 0; t < tiles; ++t) prefetch(first[t], key_tile_bytes(args.layout));
        }
        for (std::int64_t i = begin; i < end; ++i) {
            asked = i + 1 < count ? i + 1 : -1;  // most likely this thread's, too
            const Piece next = piece(asked < 0 ? i : asked);
            ItemRun<type>(args, piece(i), asked < 0 ? nullptr : &next).run();
        }
    });
}

}  // namespace

void attention_items(const AttentionArgs& args, const ItemRange& range, Worker& worker) {
#ifdef PENSTOCK_BF16_DOTS
    if (args.layout.type != KvType::bf16) return PENSTOCK_BASE_ISA::attention_items(args, range, worker);
    run_items<KvType::bf16>(args, range, worker);
#else
    switch (args.layout.type) {
        case KvType::f32:
            run_items<KvType::f32>(args, range, worker);
            break;
        case KvType::bf16:
            run_items<KvType::bf16>(args, range, worker);
            break;
        case KvType::f16:
            run_items<KvType::f16>(args, range, worker);
            break;
        case KvType::f8_e4m3:
            run_items<KvType::f8_e4m3>(args, range, worker);
            break;
        case KvType::i8:
            run_items<KvType::i8>(args, range, worker);
            break;
        case KvType::i4:
            run_items<KvType::i4>(args, range, worker);
            break;
    }
#endif
}

void attention(const AttentionArgs& args, Worker& worker) {
    attention_items(args, {0, static_cast<std::int64_t>(args.plan->items.size()), args.plan->pieces}, worker);
    const auto& split = args.plan->split;
    worker.share(static_cast<std::int64_t>(split.size()) * args.heads, 4, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i)
            merge(args, split[static_cast<std::size_t>(i / args.heads)], i % args.heads);
    });
}

}  // namespace penstock::PENSTOCK_ISA
