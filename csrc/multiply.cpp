#include "multiply.h"

#include <bit>
#include <cstring>

#include "tiles.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int all_panels = 4;
static_assert(task_columns == group_columns);

// The rows of one call, in turn.
struct RowList {
    const std::int32_t* rows;
    std::int64_t first;
    std::int64_t operator[](std::int64_t i) const { return rows ? rows[i] : first + i; }
};

// Rows are cut into tiles as equal as can be: seven rows are four and three, not six and one.
template <class F>
void each_tile(std::int64_t count, F&& use) {
    const std::int64_t tiles = (count + vec::tile_rows - 1) / vec::tile_rows;
    for (std::int64_t i = 0, at = 0; i < tiles; ++i) {
        const std::int64_t rows = (count - at + tiles - i - 1) / (tiles - i);
        with_rows(static_cast<int>(rows), [&](auto fixed) { use(at, fixed); });
        at += rows;
    }
}

template <int unit, bool has_min, bool wide>
void multiply_tile(const CodeTile& tile, const TileShape& shape, int panels, const ActivationSpan* spans, RowList rows,
                   std::int64_t count, float* sums) {
    each_tile(count, [&](std::int64_t at, auto fixed) {
        constexpr int R = decltype(fixed)::value;
        const ActivationSpan* row[R];
        for (int r = 0; r < R; ++r) row[r] = opaque(spans + rows[at + r]);
        constexpr int P = vec::tile_panels(R);
        for (int p = 0; p < panels; p += P)
            multiply_codes<R, P, unit, has_min, wide>(tile, shape, row, p, sums + at * group_columns);
    });
}

using MultiplyTile = void (*)(const CodeTile&, const TileShape&, int, const ActivationSpan*, RowList, std::int64_t, float*);

MultiplyTile choose(const PackedHeader& header) {
    const bool has_min = header.minimum != MinKind::none;
    const bool wide = header.bits == 8 || (header.has_lut && *std::max_element(header.lut, header.lut + 16) > 129);
    if (header.group == 16) {
        if (wide) return has_min ? multiply_tile<16, true, true> : multiply_tile<16, false, true>;
        return has_min ? multiply_tile<16, true, false> : multiply_tile<16, false, false>;
    }
    if (wide) return has_min ? multiply_tile<32, true, true> : multiply_tile<32, false, true>;
    return has_min ? multiply_tile<32, true, false> : multiply_tile<32, false, false>;
}

void multiply_integer(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                      RowList rows, std::int64_t count, float* sums) {
    const PackedHeader& header = matrix.header();
    auto& tile = *reinterpret_cast<CodeTile*>(thread_memory(3, sizeof(CodeTile)));
    const MultiplyTile multiply_rows = choose(header);
    const std::int64_t unit = header.group == 16 ? 16 : 32, groups_a_span = span_inputs / std::min(header.group, span_inputs);
    TileShape shape{0, header.zero, std::countr_zero(static_cast<std::uint64_t>(std::min(header.group, span_inputs) / unit))};
    const std::int64_t units = (header.cols + unit_inputs - 1) / unit_inputs, spans = spans_of(header.cols);
    for (std::int64_t s = 0; s < spans; ++s) {
        shape.units = std::min<std::int64_t>(8, units - 8 * s);
        const SpanLayout layout = span_layout(header, shape.units);
        const std::int64_t groups = std::min(groups_a_span, (shape.units * unit_inputs + header.group - 1) / header.group);
        for (int p = 0; p < panels; ++p) {
            const std::byte* const span = panel[p] + s * header.span_bytes;
            unpack_codes(header, reinterpret_cast<const std::uint8_t*>(span), shape.units, group_columns * 4,
                         tile.bytes[0][p]);
            group_scales(matrix, layout, span, groups, 16 * p, tile.scales);
            for (std::int64_t at = 0; at < header.span_bytes; at += 64) vec::prefetch(span + header.span_bytes + at);
        }
        multiply_rows(tile, shape, panels, inputs.spans + s * inputs.tokens, rows, count, sums);
    }
}

// Inputs first … first + count - 1 of a panel as floats, into column + 0 … 15 of the tile.
void unpack_floats(const PackedMatrix& matrix, const std::byte* panel, std::int64_t first, std::int64_t count, int column,
                   FloatTile& tile) {
    const PackedHeader& header = matrix.header();
    const auto scales = reinterpret_cast<const float*>(panel);
    const bool scaled = header.scale != ScaleKind::none;
    const std::int64_t tiles = scaled ? (header.cols + header.group - 1) / header.group : 0;
    const std::byte* const data = panel + tiles * 64;
    const vec::Table16 table = vec::load_table(header.table);
    const auto value = [&](std::int64_t k) {
        switch (header.kind) {
            case PackedKind::f32: return vec::load16(reinterpret_cast<const float*>(data) + 16 * k);
            case PackedKind::bf16: return vec::load16_bf16(reinterpret_cast<const std::uint16_t*>(data) + 16 * k);
            case PackedKind::f16: return vec::load16_f16(reinterpret_cast<const std::uint16_t*>(data) + 16 * k);
            case PackedKind::f8_e4m3: return vec::load16_e4m3(reinterpret_cast<const std::uint8_t*>(data) + 16 * k);
            case PackedKind::f8_e5m2: return vec::load16_e5m2(reinterpret_cast<const std::uint8_t*>(data) + 16 * k);
            default: break;
        }
        const auto* const nibbles = reinterpret_cast<const std::uint8_t*>(data) + 16 * (k / 2);
        return k % 2 ? vec::lookup_high(table, nibbles) : vec::lookup_low(table, nibbles);
    };
    for (std::int64_t k = 0; k < count; ++k) {
        const vec::F32x16 plain = value(first + k);
        vec::store(tile.value[k] + column, scaled ? vec::load16(scales + (first + k) / header.group * 16) * plain : plain);
    }
}

void multiply_float(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                    RowList rows, std::int64_t count, float* sums) {
    auto& tile = *reinterpret_cast<FloatTile*>(thread_memory(3, sizeof(FloatTile)));
    for (std::int64_t first = 0; first < inputs.cols; first += 64) {
        const std::int64_t inner = std::min<std::int64_t>(64, inputs.cols - first);
        for (int p = 0; p < panels; ++p) unpack_floats(matrix, panel[p], first, inner, 16 * p, tile);
        each_tile(count, [&](std::int64_t at, auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const float* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.x + rows[at + r] * inputs.cols + first);
            constexpr int P = vec::tile_panels(R);
            for (int p = 0; p < panels; p += P)
                multiply_floats<R, P>(tile, inner, row, p, sums + at * group_columns);
        });
    }
}

}  // namespace

std::int64_t inputs_bytes(std::int64_t tokens, std::int64_t cols) {
    return tokens * spans_of(cols) * static_cast<std::int64_t>(sizeof(ActivationSpan));
}

Inputs quantise_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const std::int32_t* order,
                       std::byte* scratch, Worker& worker) {
    auto* const spans = reinterpret_cast<ActivationSpan*>(scratch);
    constexpr std::int64_t chunk = 16;  // about a microsecond
    worker.share(tokens * spans_of(cols), chunk, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t span = i / tokens, row = i % tokens;
            quantise_span(x + row * cols, cols, span, order, spans[i]);
        }
    });
    return {x, spans, tokens, cols};
}

void multiply(const PackedMatrix& matrix, std::int64_t expert, std::int64_t first_panel, int panels, const Inputs& inputs,
              const std::int32_t* rows, std::int64_t first, std::int64_t count, float* sums) {
    // A tile has four panels; what the missing ones of the last columns yield is not used.
    const std::byte* panel[all_panels];
    const std::int64_t last = matrix.panels() - 1;
    for (int p = 0; p < all_panels; ++p) panel[p] = matrix.panel(expert, std::min(first_panel + p, last));
    std::memset(sums, 0, static_cast<std::size_t>(count * group_columns) * sizeof(float));
    const int step = vec::tile_panels(1), computed = (panels + step - 1) / step * step;
    (matrix.integer() ? multiply_integer : multiply_float)(matrix, panel, computed, inputs, {rows, first}, count, sums);
}

}  // namespace penstock::PENSTOCK_ISA
