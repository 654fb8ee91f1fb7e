#include "multiply.h"

#include <bit>
#include <cstring>

#include "code_stream.h"
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

// The panels' next spans, asked for a few lines at a time between products: asked for at once they would fill the
// processor's queues, and it would wait for memory instead of computing meanwhile.
struct Ahead {
    const std::byte* next[all_panels];
    std::int64_t bytes, at, step;  // of each panel

    void ask() {
        const std::int64_t end = std::min(at + step, bytes);
        for (; at < end; at += 64)
            for (const std::byte* panel : next) vec::prefetch(panel + at);
    }
};

template <int unit, bool has_min, bool wide>
void multiply_tile(const CodeTile& tile, const TileShape& shape, int panels, const ActivationSpan* spans, RowList rows,
                   std::int64_t count, float* sums, Ahead& ahead) {
    each_tile(count, [&](std::int64_t at, auto fixed) {
        constexpr int R = decltype(fixed)::value;
        const ActivationSpan* row[R];
        for (int r = 0; r < R; ++r) row[r] = opaque(spans + rows[at + r]);
        constexpr int P = vec::tile_panels(R);
        for (int p = 0; p < panels; p += P) {
            ahead.ask();
            multiply_codes<R, P, unit, has_min, wide>(tile, shape, row, p, sums + at * group_columns);
        }
    });
}

using MultiplyTile = void (*)(const CodeTile&, const TileShape&, int, const ActivationSpan*, RowList, std::int64_t, float*,
                             Ahead&);

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

// Few rows: panel after panel, so that memory is read in one sweep.
void stream_panels(const PackedMatrix& matrix, StreamCodes stream, const std::byte* const* panel, int panels,
                   const Inputs& inputs, RowList rows, std::int64_t count, float* sums) {
    const PackedHeader& header = matrix.header();
    SpanScales scales;
    const std::int64_t unit = header.group == 16 ? 16 : 32, units = (header.cols + unit_inputs - 1) / unit_inputs;
    SpanShape shape{0, header.zero, std::countr_zero(static_cast<std::uint64_t>(header.group / unit)),
                    header.minimum != MinKind::none};
    for (int p = 0; p < panels; ++p)
        for (std::int64_t first = 0; first < units; first += 8) {
            const std::int64_t s = first / 8;
            shape.units = std::min<std::int64_t>(8, units - first);
            const SpanLayout layout = span_layout(header, shape.units);
            const std::byte* const span = panel[p] + s * header.span_bytes;
            for (std::int64_t at = layout.scales; at < layout.bytes; at += 64) vec::prefetch(span + code_bytes_ahead + at);
            const ActivationSpan* row[stream_code_rows];
            for (int r = 0; r < count; ++r) row[r] = opaque(inputs.spans + s * inputs.tokens + rows[r]);
            group_scales(matrix, layout, span, (shape.units * unit_inputs + header.group - 1) / header.group, 0, scales);
            stream(reinterpret_cast<const std::uint8_t*>(span), header.lut, scales.scale[0], shape, row, sums + 16 * p);
        }
}

void multiply_integer(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                      RowList rows, std::int64_t count, float* sums) {
    const PackedHeader& header = matrix.header();
    if (const StreamCodes stream = choose_stream(header, count))
        return stream_panels(matrix, stream, panel, panels, inputs, rows, count, sums);
    auto& tile = *reinterpret_cast<CodeTile*>(thread_memory(3, sizeof(CodeTile)));
    const MultiplyTile multiply_rows = choose(header);
    const std::int64_t products = (count + vec::tile_rows - 1) / vec::tile_rows * ((panels + 1) / 2);
    Ahead ahead{{}, header.span_bytes, 0, (header.span_bytes / products + 63) / 64 * 64};
    std::fill_n(ahead.next, all_panels, panel[0]);
    const std::int64_t unit = header.group == 16 ? 16 : 32, groups_a_span = span_inputs / std::min(header.group, span_inputs);
    TileShape shape{0, header.zero, std::countr_zero(static_cast<std::uint64_t>(std::min(header.group, span_inputs) / unit))};
    const std::int64_t units = (header.cols + unit_inputs - 1) / unit_inputs, spans = spans_of(header.cols);
    for (std::int64_t s = 0; s < spans; ++s) {
        shape.units = std::min<std::int64_t>(8, units - 8 * s);
        const SpanLayout layout = span_layout(header, shape.units);
        const std::int64_t groups = std::min(groups_a_span, (shape.units * unit_inputs + header.group - 1) / header.group);
        const ActivationSpan* const activations = inputs.spans + s * inputs.tokens;
        for (int p = 0; p < panels; ++p) {
            const std::byte* const span = panel[p] + s * header.span_bytes;
            const auto* const codes = reinterpret_cast<const std::uint8_t*>(span);
            // After the last span come the next columns.
            ahead.next[p] = s + 1 < spans ? span + header.span_bytes : panel[p] + all_panels * header.panel_bytes;
            group_scales(matrix, layout, span, groups, 16 * p, tile.scales);
            unpack_codes(header, codes, shape.units, group_columns * all_panels, tile.bytes[0][p]);
        }
        ahead.at = 0;
        multiply_rows(tile, shape, panels, activations, rows, count, sums, ahead);
    }
}

// Sixteen weights of input k, of a panel's data.
template <PackedKind kind>
vec::F32x16 load_weights(const std::byte* data, std::int64_t k, [[maybe_unused]] const vec::Table16& table) {
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(data);
    const auto* const words = reinterpret_cast<const std::uint16_t*>(data);
    if constexpr (kind == PackedKind::f32) return vec::load16(reinterpret_cast<const float*>(data) + 16 * k);
    if constexpr (kind == PackedKind::bf16) return vec::load16_bf16(words + 16 * k);
    if constexpr (kind == PackedKind::f16) return vec::load16_f16(words + 16 * k);
    if constexpr (kind == PackedKind::f8_e4m3) return vec::load16_e4m3(bytes + 16 * k);
    if constexpr (kind == PackedKind::f8_e5m2) return vec::load16_e5m2(bytes + 16 * k);
    const std::uint8_t* const nibbles = bytes + 16 * (k / 2);
    return k % 2 ? vec::lookup_high(table, nibbles) : vec::lookup_low(table, nibbles);
}

// Bytes of sixteen weights.
template <PackedKind kind>
inline constexpr std::int64_t value_bytes = kind == PackedKind::f32                               ? 64
                                            : kind == PackedKind::bf16 || kind == PackedKind::f16 ? 32
                                            : kind == PackedKind::table                           ? 8
                                                                                                  : 16;

// A float panel: scales of its tiles of inputs, if any, and its values.
struct FloatPanel {
    const float* scales;  // [tiles][16], or null
    const std::byte* data;

    FloatPanel(const PackedHeader& header, const std::byte* panel)
        : scales(header.scale == ScaleKind::none ? nullptr : reinterpret_cast<const float*>(panel)),
          data(panel + (scales ? (header.cols + header.group - 1) / header.group * 64 : 0)) {}
};

// Cuts inputs first … end - 1 where another scale begins: use(first, end, tile).
template <class F>
void each_scale(const PackedHeader& header, std::int64_t first, std::int64_t end, F&& use) {
    while (first < end) {
        const std::int64_t tile = first / header.group, stop = std::min(end, (tile + 1) * header.group);
        use(first, stop, tile);
        first = stop;
    }
}

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
void multiply_stream(const PackedHeader& header, const std::byte* const* panel, const float* const* row, float* sums) {
    constexpr std::int64_t ahead = 2048 / value_bytes<kind>;  // inputs
    const FloatPanel from[all_panels] = {{header, panel[0]}, {header, panel[1]}, {header, panel[2]}, {header, panel[3]}};
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
    each_scale(header, 0, header.cols, [&](std::int64_t begin, std::int64_t end, std::int64_t t) {
        if (from[0].scales)
            add(begin, end, std::true_type{}, t);
        else
            add(begin, end, std::false_type{}, t);
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < all_panels; ++p) vec::store(sums + r * group_columns + 16 * p, acc[r][p]);
}

template <PackedKind kind>
void multiply_float(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                    RowList rows, std::int64_t count, float* sums) {
    const PackedHeader& header = matrix.header();
    if (count <= vec::stream_rows) {
        with_rows(static_cast<int>(count), [&](auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const float* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.x + rows[r] * inputs.cols);
            if constexpr (R <= vec::stream_rows) multiply_stream<kind, R>(header, panel, row, sums);
        });
        return;
    }
    auto& tile = *reinterpret_cast<FloatTile*>(thread_memory(3, sizeof(FloatTile)));
    for (std::int64_t first = 0; first < inputs.cols; first += 64) {
        const std::int64_t inner = std::min<std::int64_t>(64, inputs.cols - first);
        for (int p = 0; p < panels; ++p) unpack_floats<kind>(header, panel[p], first, first + inner, 16 * p, tile);
        each_tile(count, [&](std::int64_t at, auto fixed) {
            constexpr int R = decltype(fixed)::value;
            const float* row[R];
            for (int r = 0; r < R; ++r) row[r] = opaque(inputs.x + rows[at + r] * inputs.cols + first);
            constexpr int P = vec::float_tile_panels(R);
            for (int p = 0; p < panels; p += P) multiply_floats<R, P>(tile, inner, row, p, sums + at * group_columns);
        });
    }
}

using Multiply = void (*)(const PackedMatrix&, const std::byte* const*, int, const Inputs&, RowList, std::int64_t, float*);

Multiply multiplier(PackedKind kind) {
    switch (kind) {
        case PackedKind::f32: return multiply_float<PackedKind::f32>;
        case PackedKind::bf16: return multiply_float<PackedKind::bf16>;
        case PackedKind::f16: return multiply_float<PackedKind::f16>;
        case PackedKind::f8_e4m3: return multiply_float<PackedKind::f8_e4m3>;
        case PackedKind::f8_e5m2: return multiply_float<PackedKind::f8_e5m2>;
        case PackedKind::table: return multiply_float<PackedKind::table>;
        default: return multiply_integer;
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
    multiplier(matrix.header().kind)(matrix, panel, computed, inputs, {rows, first}, count, sums);
}

}  // namespace penstock::PENSTOCK_ISA
