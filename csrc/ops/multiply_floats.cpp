// Products of float kinds in float32: one chain of fused multiply-adds, inputs ascending.
#include "ops/multiply_rows.h"
#include "ops/segment_sums.h"
#include "packing/float_panels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Inputs first … end - 1 of a panel as floats, into column + 0 … 15 of the tile.
template <PackedKind kind>
void unpack_floats(const PackedHeader& header, const std::byte* panel, std::int64_t first, std::int64_t end, int column,
                   FloatTile& tile) {
    const FloatPanel from(header, panel);
    const vec::Table16 table = vec::load_table(header.table);
    const std::int64_t bytes = (end - first) * value_bytes<kind>;
    for (std::int64_t at = 0; at < bytes; at += 64) vec::prefetch(from.data + end * value_bytes<kind> + at);
    each_scale(header, first, end, [&](std::int64_t begin, std::int64_t stop, std::int64_t t) {
        if (!from.scales) {
            for (std::int64_t k = begin; k < stop; ++k)
                vec::store(tile.value[k - first] + column, load_weights<kind>(from.data, k, table));
            return;
        }
        const vec::F32x16 scale = vec::load16(from.scales + 16 * t);
        for (std::int64_t k = begin; k < stop; ++k)
            vec::store(tile.value[k - first] + column, scale * load_weights<kind>(from.data, k, table));
    });
}

// Few rows times four panels, weights straight from memory: the same sums in the same order as through a tile.
template <PackedKind kind, int R>
void multiply_stream(const PackedHeader& header, const std::byte* const* panel, const float* const* row,
                     const InputRange& range, bool adds, float* sums) {
    constexpr std::int64_t ahead = 2048 / value_bytes<kind>;  // inputs
    const FloatPanel from[all_panels] = {
        {header, panel[0]}, {header, panel[1]}, {header, panel[2]}, {header, panel[3]}};
    const vec::Table16 table = vec::load_table(header.table);
    vec::F32x16 acc[R][all_panels];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < all_panels; ++p) acc[r][p] = vec::splat16(0.0f);
    const auto add = [&](std::int64_t begin, std::int64_t end, auto scaled, std::int64_t t) {
        for (std::int64_t k = begin; k < end; ++k)
#pragma GCC unroll 4
            for (int p = 0; p < all_panels; ++p) {
                vec::prefetch(from[p].data + (k + ahead) * value_bytes<kind>);
                vec::F32x16 weights = load_weights<kind>(from[p].data, k, table);
                if constexpr (scaled) weights = vec::load16(from[p].scales + 16 * t) * weights;
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) acc[r][p] = vec::fma(vec::splat16(row[r][k]), weights, acc[r][p]);
            }
    };
    each_scale(header, range.first, range.end, [&](std::int64_t begin, std::int64_t end, std::int64_t t) {
        if (from[0].scales)
            add(begin, end, std::true_type{}, t);
        else
            add(begin, end, std::false_type{}, t);
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < all_panels; ++p) {
            float* const to = sums + r * group_columns + 16 * p;
            vec::store(to, adds ? vec::load16(to) + acc[r][p] : acc[r][p]);
        }
}

template <PackedKind kind>
void multiply_kind(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums) {
    const PackedHeader& header = matrix.header();
    SegmentSums into(matrix, count, sums);
    if (count <= vec::stream_rows) {
        with_rows(static_cast<int>(count), [&](auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const float* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.floats + rows[r] * inputs.cols);
            if constexpr (R <= vec::stream_rows)
                for (; !into.done(); into.advance())
                    multiply_stream<kind, R>(header, panel, row, into.range(), into.adds(),
                                             into.adds() ? sums.at : into.to());
        });
        return;
    }
    auto& tile = *reinterpret_cast<FloatTile*>(thread_memory(3, sizeof(FloatTile)));
    for (std::int64_t first = 0, inner = 0; first < inputs.cols; first += inner) {
        const InputRange range = into.range();
        inner = std::min<std::int64_t>(64, range.end - first);
        for (int p = 0; p < panels; ++p) unpack_floats<kind>(header, panel[p], first, first + inner, 16 * p, tile);
        each_tile(count, [&](std::int64_t at, auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const float* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.floats + rows[at + r] * inputs.cols + first);
            constexpr int P = vec::float_tile_panels(R);
            for (int p = 0; p < panels; p += P)
                multiply_floats<R, P>(tile, inner, row, p, into.to() + at * group_columns);
        });
        if (first + inner == range.end) into.next();
    }
}

template <PackedKind kind>
using Kind = std::integral_constant<PackedKind, kind>;

}  // namespace

void float_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                    RowList rows, std::int64_t count, SumsOut sums) {
    const auto multiply = [&](auto kind) {
        multiply_kind<decltype(kind)::value>(matrix, panel, panels, inputs, rows, count, sums);
    };
    switch (matrix.header().kind) {
        case PackedKind::f32:
            return multiply(Kind<PackedKind::f32>{});
        case PackedKind::bf16:
            return multiply(Kind<PackedKind::bf16>{});
        case PackedKind::f16:
            return multiply(Kind<PackedKind::f16>{});
        case PackedKind::f8_e4m3:
            return multiply(Kind<PackedKind::f8_e4m3>{});
        case PackedKind::f8_e5m2:
            return multiply(Kind<PackedKind::f8_e5m2>{});
        default:
            return multiply(Kind<PackedKind::table>{});
    }
}

}  // namespace penstock::PENSTOCK_ISA
