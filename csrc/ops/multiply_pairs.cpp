// Products of bfloat16 and 8-bit float kinds over pairs of bfloat16: activations rounded to nearest, weights exact,
// sums in float32. A sum is one chain of pair products, inputs ascending; with scales, one chain for every 64 inputs of
// a scale.
#include "ops/multiply_rows.h"
#include "ops/segment_sums.h"
#include "packing/float_panels.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::int64_t chunk_inputs = 64;

// A chunk of four panels: a pair of inputs of 64 columns after the other.
struct alignas(64) PairTile {
    std::uint16_t value[chunk_inputs / 2][64][2];
};

// Inputs k and k + 1 of sixteen columns; k is even.
template <PackedKind kind>
vec::Bf16x32 load_pair(const std::byte* data, std::int64_t k) {
    if constexpr (kind == PackedKind::bf16)
        return vec::interleave(reinterpret_cast<const std::uint16_t*>(data) + 16 * k);
    const vec::Table16 none{};
    return vec::exact_pairs(load_weights<kind>(data, k, none), load_weights<kind>(data, k + 1, none));
}

// Cuts inputs into chunks of one scale: use(first, end, tile of inputs that has it).
template <bool scaled, class F>
void each_chunk(const PackedHeader& header, const InputRange& range, F&& use) {
    for (std::int64_t first = range.first; first < range.end; first += chunk_inputs) {
        const std::int64_t end = std::min(first + chunk_inputs, range.end);
        if constexpr (scaled)
            each_scale(header, first, end, use);
        else
            use(first, end, 0);
    }
}

// What a chunk's sums start from, and what becomes of them.
template <bool scaled>
vec::F32x16 begin_sum(const float* sums) {
    return scaled ? vec::splat16(0.0f) : vec::load16(sums);
}
template <bool scaled>
void end_sum(vec::F32x16 part, const FloatPanel& from, std::int64_t tile, float* sums) {
    vec::store(sums, scaled ? vec::fma(vec::load16(from.scales + 16 * tile), part, vec::load16(sums)) : part);
}

// sums[row][64] += of R rows of `pairs` pairs each.
template <int R, int P, bool scaled>
void multiply_tile(const PairTile& tile, std::int64_t pairs, const std::uint16_t* const* rows, int panel,
                   const FloatPanel* from, std::int64_t scale, float* sums) {
    vec::F32x16 acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = begin_sum<scaled>(sums + r * group_columns + 16 * (panel + p));
#pragma GCC unroll 1
    for (std::int64_t k = 0; k < pairs; ++k) {
        vec::Bf16x32 weights[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) weights[p] = vec::load_pairs(tile.value[k][16 * (panel + p)]);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const vec::Bf16x32 x = vec::splat_pair(rows[r] + 2 * k);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) acc[r][p] = vec::dot(weights[p], x, acc[r][p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
            end_sum<scaled>(acc[r][p], from[panel + p], scale, sums + r * group_columns + 16 * (panel + p));
}

// Few rows, weights straight from memory: the same sums in the same order as through a tile.
template <PackedKind kind, int R, bool scaled>
void stream(const PackedHeader& header, const FloatPanel* from, const std::uint16_t* const* rows,
            const InputRange& range, bool adds, float* sums) {
    constexpr std::int64_t ahead = 2048 / value_bytes<kind>;  // inputs
    const auto run = [&](std::int64_t first, std::int64_t end, std::int64_t scale) {
        vec::F32x16 acc[R][all_panels];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < all_panels; ++p) acc[r][p] = vec::splat16(0.0f);
        for (std::int64_t k = first; k < end; k += 2)
#pragma GCC unroll 4
            for (int p = 0; p < all_panels; ++p) {
                vec::prefetch(from[p].data + (k + ahead) * value_bytes<kind>);
                const vec::Bf16x32 weights = load_pair<kind>(from[p].data, k);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) acc[r][p] = vec::dot(weights, vec::splat_pair(rows[r] + k), acc[r][p]);
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < all_panels; ++p) {
                float* const to = sums + r * group_columns + 16 * p;
                if constexpr (scaled)
                    end_sum<scaled>(acc[r][p], from[p], scale, to);
                else
                    vec::store(to, adds ? vec::load16(to) + acc[r][p] : acc[r][p]);
            }
    };
    if constexpr (scaled)
        each_chunk<scaled>(header, range, run);
    else
        run(range.first, range.end, 0);
}

template <PackedKind kind, bool scaled>
void multiply_kind(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums) {
    const PackedHeader& header = matrix.header();
    SegmentSums into(matrix, count, sums);
    const FloatPanel from[all_panels] = {
        {header, panel[0]}, {header, panel[1]}, {header, panel[2]}, {header, panel[3]}};
    if (count <= vec::stream_rows) {
        with_rows(static_cast<int>(count), [&](auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const std::uint16_t* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.pairs + rows[r] * inputs.cols);
            for (; !into.done(); scaled ? into.next() : into.advance())
                stream<kind, R, scaled>(header, from, row, into.range(), into.adds(),
                                        !scaled && into.adds() ? sums.at : into.to());
        });
        return;
    }
    auto& tile = *reinterpret_cast<PairTile*>(thread_memory(3, sizeof(PairTile)));
    const auto run = [&](std::int64_t first, std::int64_t end, std::int64_t scale) {
        for (int p = 0; p < panels; ++p)
            for (std::int64_t k = first; k < end; k += 2) {
                vec::prefetch(from[p].data + (k + chunk_inputs) * value_bytes<kind>);
                vec::store_pairs(tile.value[(k - first) / 2][16 * p], load_pair<kind>(from[p].data, k));
            }
        each_tile(count, [&](std::int64_t at, auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const std::uint16_t* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.pairs + rows[at + r] * inputs.cols + first);
            constexpr int P = vec::float_tile_panels(R);
            for (int p = 0; p < panels; p += P)
                multiply_tile<R, P, scaled>(tile, (end - first) / 2, row, p, from, scale,
                                            into.to() + at * group_columns);
        });
    };
    for (; !into.done(); into.next()) each_chunk<scaled>(header, into.range(), run);
}

}  // namespace

bool takes_pairs(const PackedHeader& header) {
    const bool kind =
        header.kind == PackedKind::bf16 || header.kind == PackedKind::f8_e4m3 || header.kind == PackedKind::f8_e5m2;
    const bool whole_pairs = header.cols % 2 == 0 &&
                             (header.scale == ScaleKind::none || header.group % 2 == 0 || header.group >= header.cols);
    return kind && whole_pairs;
}

Inputs round_inputs(const float* x, std::int64_t tokens, std::int64_t cols, std::byte* scratch, Worker& worker) {
    auto* const pairs = reinterpret_cast<std::uint16_t*>(scratch);
    worker.share(tokens, std::max<std::int64_t>(1, 8192 / cols), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin * cols; i < end * cols; i += 16) {
            if (end * cols - i >= 16) {
                vec::store16_bf16(pairs + i, vec::load16(x + i));
                continue;
            }
            std::uint16_t last[16];
            vec::store16_bf16(last, vec::load16(x + i, end * cols - i));
            std::copy_n(last, end * cols - i, pairs + i);
        }
    });
    return {InputForm::pairs, tokens, cols, x, scratch};
}

void pair_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums) {
    const PackedHeader& header = matrix.header();
    const bool scaled = header.scale != ScaleKind::none;
    switch (header.kind) {
        case PackedKind::bf16:
            return (scaled ? multiply_kind<PackedKind::bf16, true>
                           : multiply_kind<PackedKind::bf16, false>)(matrix, panel, panels, inputs, rows, count, sums);
        case PackedKind::f8_e4m3:
            return (scaled
                        ? multiply_kind<PackedKind::f8_e4m3, true>
                        : multiply_kind<PackedKind::f8_e4m3, false>)(matrix, panel, panels, inputs, rows, count, sums);
        default:
            return (scaled
                        ? multiply_kind<PackedKind::f8_e5m2, true>
                        : multiply_kind<PackedKind::f8_e5m2, false>)(matrix, panel, panels, inputs, rows, count, sums);
    }
}

}  // namespace penstock::PENSTOCK_ISA
