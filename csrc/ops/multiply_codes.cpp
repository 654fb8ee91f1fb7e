// Products of integer kinds: activations of 8 bits, exact sums of a scale's inputs, floats between scales.
#include <algorithm>
#include <bit>

#include "ops/multiply_rows.h"
#include "ops/segment_sums.h"

namespace penstock::PENSTOCK_ISA {
namespace {

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

template <int unit, int most>
void multiply_tile(const CodeTile& tile, const TileShape& shape, int panels, const ActivationSpan* spans, RowList rows,
                   std::int64_t count, const SumPlace& sums, Ahead& ahead) {
    each_tile(count, [&](std::int64_t at, auto fixed) {
        constexpr int R = decltype(fixed)::value;
        const ActivationSpan* row[R];
        for (int r = 0; r < R; ++r) row[r] = opaque(spans + rows[at + r]);
        constexpr int P = vec::tile_panels(R);
        for (int p = 0; p < panels; p += P) {
            ahead.ask();
            multiply_codes<R, P, unit, most>(tile, shape, row, p, sums.at(at * group_columns));
        }
    });
}

using MultiplyTile = void (*)(const CodeTile&, const TileShape&, int, const ActivationSpan*, RowList, std::int64_t,
                              const SumPlace&, Ahead&);

template <int most>
MultiplyTile choose_tile(const PackedHeader& header) {
    return header.group == 16 ? multiply_tile<16, most> : multiply_tile<32, most>;
}

// By the greatest code, of which some instruction sets sum several products in 16 bits.
MultiplyTile choose(const PackedHeader& header) {
    const int most = greatest_code(header);
    if constexpr (!vec::sums_by_greatest) return choose_tile<255>(header);
    if (most <= 15) return choose_tile<15>(header);
    if (most <= 31) return choose_tile<31>(header);
    if (most <= 63) return choose_tile<63>(header);
    if (most <= 127) return choose_tile<127>(header);
    return choose_tile<255>(header);
}

}  // namespace

void code_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums) {
    const PackedHeader& header = matrix.header();
    if (stream_products(matrix, panel, panels, inputs, rows, count, sums)) return;
    auto& tile = *reinterpret_cast<CodeTile*>(thread_memory(3, sizeof(CodeTile)));
    const MultiplyTile multiply_rows = choose(header);
    const std::int64_t products = (count + vec::tile_rows - 1) / vec::tile_rows * ((panels + 1) / 2);
    Ahead ahead{{}, header.span_bytes, 0, (header.span_bytes / products + 63) / 64 * 64};
    std::fill_n(ahead.next, all_panels, panel[0]);
    const std::int64_t unit = header.group == 16 ? 16 : 32,
                       groups_a_span = span_inputs / std::min(header.group, span_inputs);
    TileShape shape{0, 0, header.zero,
                    std::countr_zero(static_cast<std::uint64_t>(std::min(header.group, span_inputs) / unit)),
                    header.minimum != MinKind::none};
    const std::int64_t spans = spans_of(header.cols);
    SegmentSums into(matrix, count, sums);
    for (std::int64_t s = 0; s < spans; ++s) {
        const SpanPlace place = matrix.place(s);
        const std::int64_t groups =
            std::min(groups_a_span, (place.units * unit_inputs + header.group - 1) / header.group);
        const ActivationSpan* const activations = inputs.spans + s * inputs.tokens;
        for (int p = 0; p < panels; ++p) {
            const std::byte* const span = panel[p] + place.offset;
            // After the last span come the next columns.
            ahead.next[p] = s + 1 < spans ? span + place.layout.bytes : panel[p] + all_panels * header.panel_bytes;
            group_scales(matrix, place.layout, span, groups, 16 * p, tile.scales);
            unpack_codes(header, span, place, group_columns * all_panels, tile.bytes[0][p]);
        }
        ahead.at = 0;
        for (shape.first = 0; shape.first < place.units; shape.first += shape.units) {
            const InputRange range = into.range();
            shape.units = SpanUnits(range, s, place.units).count;
            const std::int64_t begin = s * span_inputs + shape.first * unit_inputs;
            const bool ends = range.end <= begin + shape.units * unit_inputs;
            multiply_rows(tile, shape, panels, activations, rows, count, into.place(range.first < begin, ends), ahead);
            if (ends) into.advance();
        }
    }
}

Inputs quantise_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set,
                       const std::int32_t* order, std::byte* scratch, Worker& worker) {
    auto* const spans = reinterpret_cast<ActivationSpan*>(scratch);
    constexpr std::int64_t chunk = 16;  // about a microsecond
    worker.share(set.count * spans_of(cols), chunk, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t span = i / set.count, row = set.row(i % set.count);
            quantise_span(x + row * cols, cols, span, order, spans[span * tokens + row]);
        }
    });
    return {InputForm::codes, tokens, cols, x, scratch};
}

}  // namespace penstock::PENSTOCK_ISA
