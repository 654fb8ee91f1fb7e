#include "packing/packed.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "packing/lattice_grids.h"
#include "packing/lattice_layout.h"
#include "packing/small_floats.h"
#include "program/huge_memory.h"

namespace penstock {
namespace {

std::int64_t up_to(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::int64_t stored_bytes(ScaleKind kind) {
    switch (kind) {
        case ScaleKind::none:
            return 0;
        case ScaleKind::f32:
            return 4;
        case ScaleKind::f16:
        case ScaleKind::bf16:
            return 2;
        default:
            return 1;
    }
}

std::int64_t value_bits(PackedKind kind) {
    switch (kind) {
        case PackedKind::f32:
            return 32;
        case PackedKind::bf16:
        case PackedKind::f16:
            return 16;
        case PackedKind::f8_e4m3:
        case PackedKind::f8_e5m2:
            return 8;
        default:
            return 4;
    }
}

bool two_level(const PackedHeader& h) {
    return h.scale == ScaleKind::two_level || h.scale == ScaleKind::two_level_nibbles ||
           h.scale == ScaleKind::odd_nibbles;
}

float stored_scale(ScaleKind kind, const std::byte* at, std::int64_t i) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(at);
    switch (kind) {
        case ScaleKind::f32:
            return reinterpret_cast<const float*>(at)[i];
        case ScaleKind::bf16:
            return bf16_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
        case ScaleKind::e8m0:
            return e8m0_to_float(bytes[i]);
        case ScaleKind::e4m3:
            return e4m3_to_float(bytes[i]);
        default:
            return f16_to_float(reinterpret_cast<const std::uint16_t*>(at)[i]);
    }
}

struct GroupScale {
    float scale, minimum;  // minimum negated
    float zero;
};

GroupScale group_scale(const PackedHeader& h, const SpanLayout& layout, const std::byte* span, std::int64_t group,
                       int column) {
    const std::int64_t i = group * 16 + column;
    const auto zero = static_cast<float>(h.zero);
    if (!two_level(h)) {
        GroupScale out{stored_scale(h.scale, span + layout.scales, i) * h.factor, 0.0f, zero};
        if (h.scale == ScaleKind::squares) {
            const float root = static_cast<float>(span[layout.scales + i]) + 1;
            out.scale = root * root * reinterpret_cast<const float*>(span + layout.supers)[group];
        }
        if (h.minimum == MinKind::stored) out.minimum = stored_scale(h.scale, span + layout.minimums, i);
        if (h.minimum == MinKind::fractions) out.zero = stored_scale(h.scale, span + layout.minimums, i);
        if (h.minimum == MinKind::zeros) out.zero = static_cast<float>(span[layout.minimums + i]);
        return out;
    }
    const auto* super = reinterpret_cast<const std::uint16_t*>(span + layout.supers);
    int sub = 0, sub_min = 0;
    if (h.scale == ScaleKind::odd_nibbles)
        sub = 2 * (static_cast<int>(span[layout.scales + group / 2 * 16 + column]) >> group % 2 * 4 & 15) + 1;
    else
        sub = static_cast<std::int8_t>(span[layout.scales + i]);
    if (h.scale == ScaleKind::two_level_nibbles)
        sub_min = sub >> 4 & 15, sub &= 15;
    else if (h.minimum == MinKind::stored)
        sub_min = static_cast<std::int8_t>(span[layout.minimums + i]);
    GroupScale out{static_cast<float>(sub) * (f16_to_float(super[column]) * h.factor), 0.0f, zero};
    if (h.minimum == MinKind::stored) out.minimum = static_cast<float>(sub_min) * f16_to_float(super[16 + column]);
    return out;
}

// Byte 4 c + i of vector v of the planes at `unit`; see codes.h.
int plane_code(std::uint32_t bits, const std::uint8_t* unit, std::int64_t v, std::int64_t byte) {
    const auto nibble = [&] { return unit[v / 2 * 64 + byte] >> 4 * (v % 2) & 15; };
    const auto pair = [&](std::int64_t at) { return unit[at + v / 4 * 64 + byte] >> 2 * (v % 4) & 3; };
    const auto single = [&](std::int64_t at) { return unit[at + byte] >> v & 1; };
    switch (bits) {
        case 1:
            return single(0);
        case 2:
            return pair(0);
        case 3:
            return pair(0) | single(128) << 2;
        case 4:
            return nibble();
        case 5:
            return nibble() | single(256) << 4;
        case 6:
            return nibble() | pair(256) << 4;
        default:
            return unit[v * 64 + byte];
    }
}

int lattice_code(BlockFormat format, const std::uint8_t* unit, std::int64_t input, int column) {
    const LatticeLayout layout = lattice_layout(format);
    const auto bit = [&](std::int64_t at, std::int64_t i) { return unit[at + i / 8] >> i % 8 & 1; };
    const std::int64_t run = input / layout.values;
    int place = unit[16 * run + column];
    for (std::int64_t b = 0; b < layout.high_bits; ++b)
        place |= bit(layout.high() + 2 * (run * layout.high_bits + b), column) << (8 + b);
    const int value = lattice_point(format, place, static_cast<int>(input % layout.values));
    if (layout.shifted) return value - (bit(layout.signs() + 2 * run, column) ? 2 : 0) - 128 + lattice_zero;
    return lattice_zero + (bit(layout.signs() + 8 * (input / 4), 4 * column + input % 4) ? -value : value);
}

int code_of(const PackedHeader& h, const std::uint8_t* widths, const std::uint8_t* codes, std::int64_t input,
            int column) {
    if (h.kind == PackedKind::lattice)
        return lattice_code(h.points, codes + input / unit_inputs * lattice_layout(h.points).bytes(),
                            input % unit_inputs, column);
    std::int64_t v = input / 4;
    const std::int64_t byte = 4 * column + input % 4;
    if (h.kind == PackedKind::ternary) {
        std::uint8_t rest = codes[v / 5 * 64 + byte];
        for (std::int64_t i = 0; i < v % 5; ++i) rest = static_cast<std::uint8_t>(3 * rest);
        return 3 * rest >> 8;
    }
    if (widths) {
        for (; v >= 8; v -= 8) codes += *widths++ * 64;
        return plane_code(*widths, codes, v, byte) + h.zero - (1 << (*widths - 1));
    }
    const int code = plane_code(h.bits, codes + v / 8 * 64 * h.bits, v % 8, byte);
    return h.has_lut ? h.lut[code] : code;
}

void unpack_codes_row(const PackedMatrix& matrix, const std::byte* panel, int column, float* out) {
    const PackedHeader& h = matrix.header();
    const std::int32_t* const order = matrix.order();
    for (std::int64_t first = 0; first < h.cols; first += span_inputs) {
        const SpanPlace place = matrix.place(first / span_inputs);
        const std::byte* const span = panel + place.offset;
        const std::int64_t count = std::min(span_inputs, h.cols - first);
        const std::int64_t step = std::min(h.group, span_inputs);
        for (std::int64_t at = 0; at < count; at += step) {
            const GroupScale g = group_scale(h, place.layout, span, at / step, column);
            for (std::int64_t i = at; i < std::min(at + step, count); ++i) {
                const int code = code_of(h, place.widths, reinterpret_cast<const std::uint8_t*>(span), i, column);
                const float value = g.scale * (static_cast<float>(code) - g.zero);
                out[order ? order[first + i] : first + i] = h.minimum == MinKind::stored ? value + g.minimum : value;
            }
        }
    }
}

void unpack_float_row(const PackedMatrix& matrix, const std::byte* panel, int column, float* out) {
    const PackedHeader& h = matrix.header();
    const auto* const scales = reinterpret_cast<const float*>(panel);
    const bool scaled = h.scale != ScaleKind::none;
    const std::byte* const data = panel + (scaled ? (h.cols + h.group - 1) / h.group * 64 : 0);
    const auto* const bytes = reinterpret_cast<const std::uint8_t*>(data);
    const auto* const words = reinterpret_cast<const std::uint16_t*>(data);
    const auto value = [&](std::int64_t k) {
        const std::int64_t i = 16 * k + column;
        switch (h.kind) {
            case PackedKind::f32:
                return reinterpret_cast<const float*>(data)[i];
            case PackedKind::bf16:
                return bf16_to_float(words[i]);
            case PackedKind::f16:
                return f16_to_float(words[i]);
            case PackedKind::f8_e4m3:
                return e4m3_to_float(bytes[i]);
            case PackedKind::f8_e5m2:
                return e5m2_to_float(bytes[i]);
            default:
                return h.table[bytes[16 * (k / 2) + column] >> 4 * (k % 2) & 15];
        }
    };
    for (std::int64_t k = 0; k < h.cols; ++k) out[k] = scaled ? scales[k / h.group * 16 + column] * value(k) : value(k);
}

std::int64_t units_of(const PackedHeader& h) { return (h.cols + unit_inputs - 1) / unit_inputs; }

// Where each span of a panel begins and the last one ends.
std::vector<std::int64_t> panel_starts(const PackedHeader& h, const std::uint8_t* widths) {
    std::vector<std::int64_t> out{0};
    for (std::int64_t unit = 0; unit < units_of(h); unit += 8)
        out.push_back(out.back() + span_layout(h, std::min<std::int64_t>(8, units_of(h) - unit), widths + unit).bytes);
    return out;
}

void require(bool holds, const char* what) {
    if (!holds)
        throw std::invalid_argument(std::string("this packed matrix is damaged or of another version: ") + what);
}

}  // namespace

SpanLayout span_layout(const PackedHeader& h, std::int64_t units, const std::uint8_t* widths) {
    std::int64_t codes = units * 64 * static_cast<std::int64_t>(h.bits);
    if (widths) codes = 64 * std::accumulate(widths, widths + units, std::int64_t{0});
    if (h.kind == PackedKind::ternary) codes = (8 * units + 4) / 5 * 64;
    if (h.kind == PackedKind::lattice) codes = units * lattice_layout(h.points).bytes();
    const std::int64_t group = std::min(h.group, span_inputs), groups = (units * unit_inputs + group - 1) / group;
    const std::int64_t scales = groups * (h.scale == ScaleKind::odd_nibbles ? 8 : 16 * stored_bytes(h.scale));
    std::int64_t minimums = 0;
    if (h.minimum == MinKind::zeros) minimums = groups * 16;
    if (h.minimum == MinKind::stored && h.scale != ScaleKind::two_level_nibbles) minimums = scales;
    if (h.minimum == MinKind::fractions) minimums = scales;
    std::int64_t supers = two_level(h) ? (h.minimum == MinKind::stored ? 64 : 32) : 0;
    if (h.scale == ScaleKind::squares) supers = 4 * groups;
    const std::int64_t at = codes + scales + minimums;
    return {codes, codes + scales, at, up_to(at + supers, h.kind == PackedKind::lattice ? 32 : 64)};
}

void lay_out(PackedHeader& h, bool has_order, const std::uint8_t* widths) {
    constexpr char magic[4] = {'P', 'N', 'S', 'K'};
    std::memcpy(&h.magic, magic, 4);
    h.version = packed_version;
    if (integer_kind(h.kind)) {
        const std::int64_t units = (h.cols + unit_inputs - 1) / unit_inputs, whole = units / 8;
        h.span_bytes = span_layout(h, 8).bytes;
        h.panel_bytes = up_to(whole * h.span_bytes + (units % 8 ? span_layout(h, units % 8).bytes : 0), 64);
        if (widths) h.panel_bytes = panel_starts(h, widths).back();
    } else {
        h.span_bytes = 0;
        const std::int64_t tiles = h.scale == ScaleKind::none ? 0 : (h.cols + h.group - 1) / h.group;
        h.panel_bytes = up_to(tiles * 64 + (h.cols + h.cols % 2) * 16 * value_bits(h.kind) / 8, 64);
    }
    h.data_bytes = h.experts * ((h.rows + panel_rows - 1) / panel_rows) * h.panel_bytes;
    h.order_offset = has_order ? h.data_bytes : 0;
    if (has_order) h.data_bytes += up_to(4 * h.cols, 64);
    h.widths_offset = widths ? h.data_bytes : 0;
    if (widths) h.data_bytes += up_to(units_of(h), 64);
}

std::int64_t PackedMatrix::segment_unit() const {
    if (order() || widths()) return 0;
    if (header_.kind == PackedKind::lattice || header_.kind == PackedKind::ternary || two_level(header_) ||
        header_.scale == ScaleKind::squares)
        return span_inputs;
    if (integer()) return std::max(unit_inputs, header_.group);
    constexpr std::int64_t chunk = 64;  // of inputs, that kernels of float kinds sum together
    return header_.scale == ScaleKind::none || header_.group >= header_.cols ? chunk : std::lcm(chunk, header_.group);
}

void PackedMatrix::cut(const std::vector<std::int64_t>& ends) {
    const std::int64_t unit = segment_unit();
    const auto fits = [&] {
        if (ends.empty() || ends.size() > static_cast<std::size_t>(most_segments) || ends.back() != header_.cols)
            return false;
        for (std::size_t i = 0; i < ends.size(); ++i)
            if (ends[i] <= (i ? ends[i - 1] : 0) || (i + 1 < ends.size() && (unit == 0 || ends[i] % unit != 0)))
                return false;
        return true;
    };
    if (!fits())
        throw std::invalid_argument("segments of " + std::to_string(header_.cols) + " inputs are 1 to " +
                                    std::to_string(most_segments) + ", end at multiples of " + std::to_string(unit) +
                                    " (0: nowhere) and the last at the inputs' end.");
    header_.segments = static_cast<std::uint32_t>(ends.size());
    std::copy(ends.begin(), ends.end(), header_.segment_ends);
}

void PackedMatrix::put_expert(std::int64_t expert, const std::byte* at) {
    if (expert < 0 || expert >= experts())
        throw std::invalid_argument("there is no expert " + std::to_string(expert) + " among " +
                                    std::to_string(experts()) + ".");
    if (!at || reinterpret_cast<std::uintptr_t>(at) % 64)
        throw std::invalid_argument("an expert's data are aligned to 64 bytes.");
    if (places_.empty())
        for (std::int64_t e = 0; e < experts(); ++e) places_.push_back(data_ + e * expert_bytes());
    places_[static_cast<std::size_t>(expert)] = at;
}

SpanPlace PackedMatrix::place(std::int64_t span) const {
    const std::int64_t units = std::min<std::int64_t>(8, units_of(header_) - 8 * span);
    const std::uint8_t* const own = widths() ? widths() + 8 * span : nullptr;
    return {own ? starts_[static_cast<std::size_t>(span)] : span * header_.span_bytes, units, own,
            span_layout(header_, units, own)};
}

PackedMatrix::PackedMatrix(const PackedHeader& header, const std::uint8_t* widths) : header_(header) {
    HugeMemory memory = huge_memory(static_cast<std::size_t>(header.data_bytes));
    data_ = own_ = memory.bytes.get();
    owner_ = std::move(memory.bytes);
    huge_pages_ = memory.huge_pages;
    if (widths) {
        starts_ = panel_starts(header, widths);
        std::memcpy(own_ + header.widths_offset, widths, static_cast<std::size_t>(units_of(header)));
    }
}

PackedMatrix::PackedMatrix(const PackedHeader& header, const std::byte* data, std::shared_ptr<void> owner)
    : header_(header), data_(data), owner_(std::move(owner)) {
    constexpr std::int64_t most = std::int64_t{1} << 40;
    const auto sane = [](std::int64_t size) { return size > 0 && size < most; };
    require(header.version == packed_version && header.kind <= PackedKind::lattice &&
                header.scale <= ScaleKind::squares && header.minimum <= MinKind::fractions,
            "kind");
    require(sane(header.rows) && sane(header.cols) && sane(header.experts) && sane(header.group), "sizes");
    require(header.rows * 4 < most * 64 / header.cols / header.experts, "sizes");
    require(header.bits <= 8 && header.bits != 7 && header.has_lut <= 1, "bits");
    require(!integer() || (header.group >= 16 && header.group <= span_inputs &&
                           std::has_single_bit(static_cast<std::uint64_t>(header.group))),
            "group");
    const bool lattice = header.kind == PackedKind::lattice;
    require(lattice ? is_lattice(header.points) && header.group <= unit_inputs && header.cols % span_inputs == 0
                    : header.scale != ScaleKind::odd_nibbles,
            "lattice");
    PackedHeader expected = header;
    if (header.widths_offset) {
        require(header.widths_offset > 0 && header.widths_offset + units_of(header) <= header.data_bytes, "widths");
        require(std::all_of(widths(), widths() + units_of(header), [](int w) { return w >= 1 && w <= 8 && w != 7; }),
                "widths");
        starts_ = panel_starts(header, widths());
    }
    lay_out(expected, header.order_offset != 0, widths());
    require(std::memcmp(&expected, &header, sizeof(header)) == 0, "layout");
    require(reinterpret_cast<std::uintptr_t>(data) % 64 == 0, "alignment");
    if (header.segments) {
        require(header.segments <= static_cast<std::uint32_t>(most_segments), "segments");
        cut({header.segment_ends, header.segment_ends + header.segments});
    }
    if (const std::int32_t* const inputs = order())
        require(std::all_of(inputs, inputs + header.cols, [&](auto k) { return k >= 0 && k < header.cols; }), "order");
}

std::string PackedMatrix::kind() const {
    static constexpr const char* kinds[] = {
        "", "ternary codes", "fp32", "bf16", "fp16", "fp8 e4m3", "fp8 e5m2", "4-bit table", "points of a lattice"};
    static constexpr const char* scales[] = {"",     "fp32",      "fp16",      "bf16",      "e8m0",
                                             "e4m3", "two-level", "two-level", "two-level", "squared"};
    const auto at = [](auto value) { return static_cast<std::size_t>(value); };
    std::string out =
        header_.kind == PackedKind::codes ? std::to_string(header_.bits) + "-bit codes" : kinds[at(header_.kind)];
    if (const auto* const bits = widths())
        out = std::to_string(*std::min_element(bits, bits + units_of(header_))) + "- to " + out;
    if (header_.has_lut) out += " of a table";
    if (header_.scale == ScaleKind::none) return out;
    out += ", group " + std::to_string(std::min(header_.group, header_.cols)) + ", " + scales[at(header_.scale)] +
           " scales";
    if (header_.minimum == MinKind::zeros) out += " and zero points";
    if (header_.minimum == MinKind::fractions) out += " and fractional zero points";
    if (header_.minimum == MinKind::stored) out += " and minimums";
    return order() ? out + ", ordered" : out;
}

void unpack_row(const PackedMatrix& matrix, std::int64_t row, float* out) {
    const std::int64_t within = row % matrix.rows();
    const std::byte* const panel = matrix.panel(row / matrix.rows(), within / panel_rows);
    const int column = static_cast<int>(within % panel_rows);
    (matrix.integer() ? unpack_codes_row : unpack_float_row)(matrix, panel, column, out);
}

}  // namespace penstock
