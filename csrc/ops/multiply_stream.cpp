// Products of integer kinds for few rows: panel after panel, so that memory is read in one sweep.
#include <algorithm>
#include <bit>

#include "ops/code_stream.h"
#include "ops/multiply_rows.h"
#include "ops/segment_sums.h"

namespace penstock::PENSTOCK_ISA {
bool stream_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                     RowList rows, std::int64_t count, SumsOut sums) {
    const PackedHeader& header = matrix.header();
    if (count > vec::streamed_rows(greatest_code(header))) return false;
    // A few rows at a time, which find the codes in the nearest cache.
    const std::int64_t groups = (count + stream_code_rows - 1) / stream_code_rows;
    const StreamCodes fewest = choose_stream(header, 0, count / groups),
                      most = choose_stream(header, 0, (count + groups - 1) / groups);
    if (!fewest) return false;
    SpanScales scales;
    const std::int64_t unit = header.group == 16 ? 16 : 32, spans = spans_of(header.cols);
    SpanShape shape{0, 0, header.zero, std::countr_zero(static_cast<std::uint64_t>(header.group / unit)),
                    header.minimum != MinKind::none};
    float part[vec::most_streamed * group_columns];  // of one panel
    const ActivationSpan* row[vec::most_streamed];
    const auto stream = [&](std::uint32_t width, const std::uint8_t* codes, const SumPlace& to) {
        for (std::int64_t i = 0; i < groups; ++i) {
            const std::int64_t at = count * i / groups, rows_of_group = count * (i + 1) / groups - at;
            const StreamCodes kernel = width                            ? choose_stream(header, width, rows_of_group)
                                       : rows_of_group * groups < count ? fewest
                                                                        : most;
            kernel(header, codes, scales.scale[0], shape, row + at, to.at(at * group_columns));
        }
    };
    for (int p = 0; p < panels; ++p) {
        int segment = 0;
        float* const own = sums.at + 16 * p;
        for (std::int64_t s = 0; s < spans; ++s) {
            const SpanPlace place = matrix.place(s);
            const SpanLayout& layout = place.layout;
            const std::byte* const span = panel[p] + place.offset;
            for (std::int64_t at = layout.scales; at < layout.bytes; at += 64)
                vec::prefetch(span + code_bytes_ahead + at);
            for (int r = 0; r < count; ++r) row[r] = opaque(inputs.spans + s * inputs.tokens + rows[r]);
            group_scales(matrix, layout, span, (place.units * unit_inputs + header.group - 1) / header.group, 0,
                         scales);
            const auto* codes = reinterpret_cast<const std::uint8_t*>(span);
            const std::int64_t unit_bytes = layout.scales / place.units;
            for (shape.first = 0; shape.first < place.units; shape.first += shape.units) {
                if (place.widths) {  // runs of one width, about its own zero; such a matrix has one segment
                    const std::uint8_t* const width = place.widths + shape.first;
                    shape.units =
                        std::find_if(width, place.widths + place.units, [&](int w) { return w != *width; }) - width;
                    shape.zero = 1 << (*width - 1);
                    stream(*width, codes, {own, own, nullptr});
                    codes += 64 * *width * shape.units;
                    continue;
                }
                const InputRange range = matrix.segment(segment);
                shape.units = SpanUnits(range, s, place.units).count;
                const std::int64_t begin = s * span_inputs + shape.first * unit_inputs;
                const bool ends = range.end <= begin + shape.units * unit_inputs;
                float* const to = sums.apart ? own + segment * count * group_columns : segment ? part : own;
                const bool adds = ends && segment && !sums.apart;
                stream(0, codes, {range.first < begin ? to : nullptr, adds ? own : to, adds ? own : nullptr});
                codes += unit_bytes * shape.units;
                segment += ends;
            }
        }
    }
    return true;
}

}  // namespace penstock::PENSTOCK_ISA
