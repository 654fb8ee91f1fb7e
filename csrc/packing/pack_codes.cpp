// Packs integers with scales: GGUF blocks, affine groups and codebooks whose values are multiples of a power of two.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "packing/packed.h"
#include "packing/small_floats.h"
#include "program/team.h"

namespace penstock {
namespace {

using std::int64_t;
using std::uint32_t;
using std::uint8_t;

// 256 inputs of one row; of the arrays what the header's group and kinds name is read. Minimums are negated, or
// fractional zero points.
struct ScheduledTokens {
    uint8_t codes[256];
    float scale[16], minimum[16];
    uint8_t zeros[16];
    float factor[16];  // of squared scales
    std::int16_t sub_scale[16], sub_min[16];
    float super_scale, super_min;
};

using Fill = std::function<void(int64_t row, int64_t span, int64_t count, ScheduledTokens& out)>;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

void store_scale(ScaleKind kind, float value, std::byte* at, int64_t i) {
    auto* const bytes = reinterpret_cast<uint8_t*>(at);
    auto* const words = reinterpret_cast<std::uint16_t*>(at);
    bool exact = std::isfinite(value);
    switch (kind) {
        case ScaleKind::f32:
            reinterpret_cast<float*>(at)[i] = value;
            break;
        case ScaleKind::bf16:
            exact = exact && exact_bf16(value, words[i]);
            break;
        case ScaleKind::e8m0:
            exact = exact && exact_e8m0(value, bytes[i]);
            break;
        case ScaleKind::e4m3:
            exact = exact && exact_e4m3(value, bytes[i]);
            break;
        default:
            exact = exact && exact_f16(value, words[i]);
            break;
    }
    if (!exact) refuse("a scale is " + std::to_string(value) + ": it must be finite. The weights are damaged.");
}

// Four codes of one row, a byte each, of each of the unit's eight vectors, into the bit planes of codes.h.
void store_planes(uint32_t bits, const uint32_t* word, int column, uint8_t* unit) {
    const auto put = [&](int64_t at, uint32_t value) { std::memcpy(unit + at + 4 * column, &value, 4); };
    const auto nibbles = [&] {
        for (int j = 0; j < 4; ++j) put(64 * j, (word[2 * j] & 0x0f0f0f0f) | (word[2 * j + 1] & 0x0f0f0f0f) << 4);
    };
    const auto pairs = [&](int64_t at, int low) {
        for (int j = 0; j < 2; ++j) {
            uint32_t value = 0;
            for (int i = 0; i < 4; ++i) value |= (word[4 * j + i] >> low & 0x03030303) << 2 * i;
            put(at + 64 * j, value);
        }
    };
    const auto singles = [&](int64_t at, int low) {
        uint32_t value = 0;
        for (int i = 0; i < 8; ++i) value |= (word[i] >> low & 0x01010101) << i;
        put(at, value);
    };
    switch (bits) {
        case 1:
            return singles(0, 0);
        case 2:
            return pairs(0, 0);
        case 3:
            return pairs(0, 0), singles(128, 2);
        case 4:
            return nibbles();
        case 5:
            return nibbles(), singles(256, 4);
        case 6:
            return nibbles(), pairs(256, 4);
        default:
            for (int v = 0; v < 8; ++v) put(64 * v, word[v]);
    }
}

// Five digits, first the most significant, as the least fraction of 256 that has them.
void store_ternary(const uint8_t* row, int64_t units, int column, uint8_t* codes) {
    for (int64_t v = 0; v < 8 * units; v += 5)
        for (int i = 0; i < 4; ++i) {
            uint32_t digits = 0;
            for (int64_t j = v; j < v + 5; ++j) digits = 3 * digits + (j < 8 * units ? row[4 * j + i] : 0);
            codes[v / 5 * 64 + 4 * column + i] = static_cast<uint8_t>((digits * 256 + 242) / 243);
        }
}

void store_scales(const PackedHeader& h, const SpanLayout& layout, int64_t groups, const ScheduledTokens& row,
                  int column, std::byte* span) {
    if (h.scale == ScaleKind::two_level || h.scale == ScaleKind::two_level_nibbles) {
        const bool has_min = h.minimum == MinKind::stored, nibbles = h.scale == ScaleKind::two_level_nibbles;
        for (int64_t g = 0; g < groups; ++g) {
            const int sub = nibbles ? row.sub_scale[g] | row.sub_min[g] << 4 : row.sub_scale[g];
            span[layout.scales + 16 * g + column] = static_cast<std::byte>(sub);
            if (has_min && !nibbles) span[layout.minimums + 16 * g + column] = static_cast<std::byte>(row.sub_min[g]);
        }
        store_scale(ScaleKind::f16, row.super_scale, span + layout.supers, column);
        if (has_min) store_scale(ScaleKind::f16, row.super_min, span + layout.supers + 32, column);
        return;
    }
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t i = 16 * g + column;
        if (h.scale == ScaleKind::squares) {
            span[layout.scales + i] = static_cast<std::byte>(row.sub_scale[g]);
            std::memcpy(span + layout.supers + 4 * g, row.factor + g, 4);
            continue;
        }
        store_scale(h.scale, row.scale[g], span + layout.scales, i);
        if (h.minimum == MinKind::stored || h.minimum == MinKind::fractions)
            store_scale(h.scale, row.minimum[g], span + layout.minimums, i);
        if (h.minimum == MinKind::zeros) span[layout.minimums + i] = static_cast<std::byte>(row.zeros[g]);
    }
}

void pack_panel(const PackedMatrix& matrix, int64_t first_row, int64_t rows, const Fill& fill, std::byte* panel) {
    const PackedHeader& h = matrix.header();
    const int64_t group = std::min(h.group, span_inputs);
    ScheduledTokens row;
    for (int64_t first = 0; first < h.cols; first += span_inputs) {
        const SpanPlace place = matrix.place(first / span_inputs);
        std::byte* const span = panel + place.offset;
        auto* const codes = reinterpret_cast<uint8_t*>(span);
        const int64_t count = std::min(span_inputs, h.cols - first);
        for (int r = 0; r < rows; ++r) {
            std::memset(row.codes + count, 0, static_cast<std::size_t>(256 - count));
            fill(first_row + r, first / span_inputs, count, row);
            if (h.kind == PackedKind::ternary) {
                store_ternary(row.codes, place.units, r, codes);
            } else {
                uint8_t* unit = codes;
                for (int64_t u = 0; u < place.units; ++u) {
                    const uint32_t bits = place.widths ? place.widths[u] : h.bits;
                    const int less = place.widths ? h.zero - (1 << (bits - 1)) : 0;
                    for (int i = 0; i < 32; ++i)
                        row.codes[32 * u + i] = static_cast<uint8_t>(row.codes[32 * u + i] - less);
                    uint32_t words[8];
                    std::memcpy(words, row.codes + 32 * u, sizeof(words));
                    store_planes(bits, words, r, unit);
                    unit += 64 * bits;
                }
            }
            store_scales(h, place.layout, (count + group - 1) / group, row, r, span);
        }
    }
}

Packed pack(PackedHeader& h, const std::int32_t* order, const Fill& fill, const uint8_t* widths = nullptr) {
    lay_out(h, order != nullptr, widths);
    auto out = std::make_unique<PackedMatrix>(h, widths);
    const int64_t panels = out->panels();
    parallel_for(h.experts * panels, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t expert = i / panels, first = i % panels * panel_rows;
            pack_panel(*out, expert * h.rows + first, std::min(panel_rows, h.rows - first), fill,
                       out->writable() + i * h.panel_bytes);
        }
    });
    if (order) std::memcpy(out->writable() + h.order_offset, order, static_cast<std::size_t>(h.cols) * 4);
    return out;
}

PackedHeader start(const char* source, int64_t rows, int64_t cols, int64_t experts, int64_t file_bytes) {
    if (rows <= 0 || cols <= 0 || experts <= 0 || rows % experts)
        refuse(std::to_string(rows) + " rows of " + std::to_string(cols) + " inputs are not " +
               std::to_string(experts) + " matrices of equal, positive sizes.");
    PackedHeader h{};
    h.kind = PackedKind::codes;
    h.rows = rows / experts;
    h.cols = cols;
    h.experts = experts;
    h.factor = 1.0f;
    h.file_bytes = file_bytes;
    std::strncpy(h.source, source, sizeof(h.source) - 1);
    return h;
}

// Values of a table as unsigned bytes, and what has to be subtracted from them.
void set_lut(PackedHeader& h, const int* values, int count) {
    const int least = std::min(0, *std::min_element(values, values + count));
    for (int i = 0; i < count; ++i) h.lut[i] = static_cast<uint8_t>(values[i] - least);
    h.zero = -least;
    h.has_lut = 1;
}

// The smallest kind that stores all these numbers exactly. Throws where one is not finite.
ScaleKind smallest_kind(std::initializer_list<ScaleKind> allowed, const float* values, int64_t count,
                        const char* what) {
    const auto fits = [&](ScaleKind kind, float value) {
        std::uint16_t word;
        uint8_t byte;
        switch (kind) {
            case ScaleKind::f16:
                return exact_f16(value, word);
            case ScaleKind::bf16:
                return exact_bf16(value, word);
            case ScaleKind::e8m0:
                return value > 0 && exact_e8m0(value, byte);
            case ScaleKind::e4m3:
                return exact_e4m3(value, byte);
            default:
                return true;
        }
    };
    for (int64_t i = 0; i < count; ++i)
        if (!std::isfinite(values[i]))
            refuse(std::string(what) + " " + std::to_string(i) + " is " + std::to_string(values[i]) +
                   ": it must be finite. The weights are damaged.");
    for (const ScaleKind kind : allowed)
        if (std::all_of(values, values + count, [&](float value) { return fits(kind, value); })) return kind;
    return ScaleKind::f32;
}

float nearest_e4m3(float value) {
    const float size = std::fabs(value), step = std::ldexp(1.0f, std::max(std::ilogb(size), -6) - 3);
    return std::copysign(std::min(448.0f, std::nearbyint(size / step) * step), value);
}

// The number whose products with e4m3 numbers these all are, rounded once (NVFP4's scale of a whole tensor), or 0.
float common_factor(const float* values, int64_t count) {
    const float most = *std::max_element(values, values + count);
    const auto explains = [&](float factor) {
        return std::isnormal(factor) && std::all_of(values, values + count, [&](float value) {
                   return value == 0 || nearest_e4m3(value / factor) * factor == value;
               });
    };
    for (int code = 0x7e; code > 0 && most > 0; --code) {
        const float guess = most / e4m3_to_float(static_cast<uint8_t>(code));
        for (const float factor : {guess, std::nextafter(guess, 0.0f), std::nextafter(guess, INFINITY)})
            if (explains(factor)) return factor;
    }
    return 0;
}

// A group the kernels know that divides `group`.
int64_t usable_group(int64_t group, int64_t cols) {
    if (group <= 0 || cols % group)
        refuse("a group of " + std::to_string(group) + " inputs does not divide rows of " + std::to_string(cols) + ".");
    if (group == cols) return span_inputs;
    if (group % 16)
        refuse("groups of " + std::to_string(group) + " inputs have no packing; a group must be a multiple of 16.");
    for (const int64_t size : {256, 128, 64, 32, 16})
        if (group % size == 0) return size;
    return 16;
}

// Scales of the groups of one span of a row whose stored group is `from` inputs and whose packed group is h.group.
template <class Use>
void each_group(const PackedHeader& h, int64_t from, int64_t span, int64_t count, Use&& use) {
    const int64_t group = std::min(h.group, span_inputs);
    for (int64_t at = 0, g = 0; at < count; at += group, ++g) use(g, (span * span_inputs + at) / from);
}

// The bits that each unit's codes need about the zero point, of inputs sorted by importance (EXL2 sorts them so); none
// where all need as many.
std::vector<uint8_t> code_widths(const AffineSource& s) {
    if (!s.order || s.zeros || s.fractions || s.minimums || s.zero != 1 << (s.bits - 1)) return {};
    const int64_t units = (s.cols + unit_inputs - 1) / unit_inputs;
    std::vector<uint8_t> out(static_cast<std::size_t>(units));
    parallel_for(units, 4, [&](int64_t begin, int64_t end) {
        for (int64_t u = begin; u < end; ++u) {
            int least = s.zero, most = s.zero - 1;
            for (int64_t row = 0; row < s.rows; ++row)
                for (int64_t k = u * unit_inputs; k < std::min(s.cols, (u + 1) * unit_inputs); ++k) {
                    least = std::min<int>(least, s.codes[row * s.cols + k]);
                    most = std::max<int>(most, s.codes[row * s.cols + k]);
                }
            int bits = 1;
            while (least < s.zero - (1 << (bits - 1)) || most >= s.zero + (1 << (bits - 1))) ++bits;
            out[static_cast<std::size_t>(u)] = static_cast<uint8_t>(bits == 7 ? 8 : bits);
        }
    });
    return std::all_of(out.begin(), out.end(), [&](int bits) { return bits == out[0]; }) ? std::vector<uint8_t>() : out;
}

// The number whose products with squares of 1 to 16 these sixteen or fewer numbers, `step` apart, all are, or 0.
float square_factor(const float* values, int64_t count, int64_t step) {
    float most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, values[i * step]);
    for (int root = 16; root > 0; --root) {
        const float factor = most / static_cast<float>(root * root);
        bool all = std::isnormal(factor);
        for (int64_t i = 0; i < count && all; ++i) {
            const float other = std::nearbyint(std::sqrt(std::max(0.0f, values[i * step]) / factor));
            all = other >= 1 && other * other * factor == values[i * step];
        }
        if (all) return factor;
    }
    return 0;
}

// square_factor() of the scales of each panel and group, [panels][groups of a row]; none where one has none.
std::vector<float> square_factors(const AffineSource& s) {
    const int64_t a_row = s.cols / s.group, rows = s.rows / s.experts, panels = (rows + panel_rows - 1) / panel_rows;
    std::vector<float> out;
    for (int64_t i = 0; i < s.experts * panels; ++i)
        for (int64_t g = 0; g < a_row; ++g) {
            const int64_t first = i % panels * panel_rows, row = i / panels * rows + first;
            out.push_back(square_factor(s.scales + row * a_row + g, std::min(panel_rows, rows - first), a_row));
            if (out.back() == 0) return {};
        }
    return out;
}

PackedHeader block_header(BlockFormat format, int64_t rows, int64_t cols, int64_t experts) {
    const BlockLayout& layout = block_layout(format);
    const CodeInfo& info = code_info(format);
    if (cols % layout.elements)
        refuse("rows of " + std::to_string(cols) + " inputs are not whole blocks of " + layout.name + " (" +
               std::to_string(layout.elements) + ").");
    PackedHeader h = start(layout.name, rows, cols, experts, rows * (cols / layout.elements) * layout.bytes);
    h.bits = static_cast<uint32_t>(info.bits);
    h.zero = info.zero;
    h.group = info.group;
    h.factor = info.factor;
    if (is_lattice(format)) h.points = format;
    h.scale = info.two_level ? ScaleKind::two_level : ScaleKind::f16;
    h.minimum = info.has_min ? MinKind::stored : MinKind::none;
    if (info.lut && !is_lattice(format)) {
        int values[16];
        std::copy_n(info.lut, 16, values);
        set_lut(h, values, 1 << info.bits);
    }
    switch (format) {
        case BlockFormat::q2_k:
            h.scale = ScaleKind::two_level_nibbles;
            break;
        case BlockFormat::q8_k:
            h.scale = ScaleKind::f32;
            break;
        case BlockFormat::mxfp4:
            h.scale = ScaleKind::e8m0;
            break;
        case BlockFormat::nvfp4:
            h.scale = ScaleKind::e4m3;
            h.factor = 0.5f;
            break;
        case BlockFormat::tq1_0:
            h.kind = PackedKind::ternary;
            break;
        case BlockFormat::q1_0: {
            const int values[2] = {0, 2};
            h.bits = 1;
            set_lut(h, values, 2);
            h.zero = 1;
            break;
        }
        default:
            break;
    }
    return h;
}

}  // namespace

Packed pack_blocks(BlockFormat format, int64_t rows, int64_t cols, int64_t experts, const uint8_t* blocks) {
    const BlockLayout& layout = block_layout(format);
    if (format == BlockFormat::f16 || format == BlockFormat::bf16) {
        const PackedKind kind = format == BlockFormat::f16 ? PackedKind::f16 : PackedKind::bf16;
        return pack_plain({kind, rows, cols, experts, reinterpret_cast<const std::byte*>(blocks), nullptr, 1, 1});
    }
    PackedHeader h = block_header(format, rows, cols, experts);
    if (is_lattice(format)) return pack_lattice(h, blocks);
    const CodeInfo& info = code_info(format);
    const int64_t row_bytes = cols / layout.elements * layout.bytes, groups = layout.elements / info.group;
    const float halved = format == BlockFormat::nvfp4 ? 2.0f : 1.0f;
    return pack(h, nullptr, [&](int64_t row, int64_t span, int64_t count, ScheduledTokens& out) {
        CodeBlock block[8];
        const int64_t blocks_in_span = count / layout.elements;
        const uint8_t* const at = blocks + row * row_bytes + span * (span_inputs / layout.elements) * layout.bytes;
        decode_codes(format, at, blocks_in_span, block);
        for (int64_t b = 0; b < blocks_in_span; ++b) {
            std::memcpy(out.codes + b * layout.elements, block[b].codes, static_cast<std::size_t>(layout.elements));
            for (int64_t g = 0; g < groups; ++g) {
                out.scale[b * groups + g] =
                    (format == BlockFormat::nvfp4 ? block[b].scale[g] : block[b].super_scale) * halved;
                out.minimum[b * groups + g] = -block[b].super_min;
                out.sub_scale[b * groups + g] = block[b].sub_scale[g];
                out.sub_min[b * groups + g] = block[b].sub_min[g];
            }
            out.super_scale = block[b].super_scale;
            out.super_min = -block[b].super_min;
        }
        if (format == BlockFormat::q1_0)
            for (int64_t i = 0; i < count; ++i) out.codes[i] /= 2;
    });
}

Packed pack_affine(const AffineSource& s) {
    if (s.bits < 1 || s.bits > 8)
        refuse("codes of " + std::to_string(s.bits) + " bits have no packing; 1 to 8 bits have.");
    const int64_t groups = s.rows * (s.cols / std::max<int64_t>(1, s.group));
    PackedHeader h = start("affine", s.rows, s.cols, s.experts, (s.rows * s.cols * s.bits + 7) / 8 + 2 * groups);
    h.bits = s.bits == 7 ? 8 : static_cast<uint32_t>(s.bits);
    h.zero = s.zero;
    h.group = usable_group(s.group, s.cols);
    const auto small = {ScaleKind::f16, ScaleKind::bf16};
    h.scale = smallest_kind(small, s.scales, groups, "scale");
    h.minimum = s.zeros       ? MinKind::zeros
                : s.fractions ? MinKind::fractions
                : s.minimums  ? MinKind::stored
                              : MinKind::none;
    const float* const minimums = s.fractions ? s.fractions : s.minimums;
    if (minimums && smallest_kind(small, minimums, groups, s.fractions ? "zero point" : "minimum") != h.scale)
        h.scale = ScaleKind::f32;
    const int64_t a_row = s.cols / s.group, panels = (h.rows + panel_rows - 1) / panel_rows;
    const std::vector<uint8_t> widths = code_widths(s);
    std::vector<float> factors;
    if (h.scale == ScaleKind::f32 && s.order && h.minimum == MinKind::none) factors = square_factors(s);
    if (!factors.empty()) h.scale = ScaleKind::squares;
    const auto fill = [&](int64_t row, int64_t span, int64_t count, ScheduledTokens& out) {
        const uint8_t* const codes = s.codes + row * s.cols + span * span_inputs;
        std::copy_n(codes, count, out.codes);
        if (s.bits < 8 && std::any_of(codes, codes + count, [&](int code) { return code >> s.bits; }))
            refuse("a code of row " + std::to_string(row) + " does not fit in " + std::to_string(s.bits) + " bits.");
        each_group(h, s.group, span, count, [&](int64_t g, int64_t from) {
            out.scale[g] = s.scales[row * a_row + from];
            out.minimum[g] = minimums ? minimums[row * a_row + from] : 0.0f;
            out.zeros[g] = s.zeros ? s.zeros[row * a_row + from] : 0;
            if (factors.empty()) return;
            const int64_t panel = row / h.rows * panels + row % h.rows / panel_rows;
            out.factor[g] = factors[static_cast<std::size_t>(panel * a_row + from)];
            out.sub_scale[g] = static_cast<std::int16_t>(std::nearbyint(std::sqrt(out.scale[g] / out.factor[g])) - 1);
        });
    };
    return pack(h, s.order, fill, widths.empty() ? nullptr : widths.data());
}

Packed pack_integer_codebook(const CodebookSource& s, const int* values, float step) {
    const int64_t a_row = s.cols / s.group, groups = s.rows * a_row;
    PackedHeader h = start("codebook", s.rows, s.cols, s.experts, s.rows * s.cols / 2 + groups);
    h.bits = 4;
    h.group = usable_group(s.group, s.cols);
    h.factor = step;
    set_lut(h, values, 16);
    h.scale =
        smallest_kind({ScaleKind::e8m0, ScaleKind::e4m3, ScaleKind::f16, ScaleKind::bf16}, s.scales, groups, "scale");
    const float common = h.scale == ScaleKind::f32 ? common_factor(s.scales, groups) : 0.0f;
    if (common > 0) {
        h.scale = ScaleKind::e4m3;
        h.factor = common * step;
    }
    const auto stored = [&](float scale) { return common > 0 ? nearest_e4m3(scale / common) : scale; };
    return pack(h, nullptr, [&](int64_t row, int64_t span, int64_t count, ScheduledTokens& out) {
        std::copy_n(s.codes + row * s.cols + span * span_inputs, count, out.codes);
        for (int64_t i = 0; i < count; ++i)
            if (out.codes[i] > 15) refuse("a code of row " + std::to_string(row) + " is not below 16.");
        each_group(h, s.group, span, count,
                   [&](int64_t g, int64_t from) { out.scale[g] = stored(s.scales[row * a_row + from]); });
    });
}

}  // namespace penstock
