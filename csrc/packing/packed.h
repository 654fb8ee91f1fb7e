// Weights in the order the linear kernels read them: panels of 16 output rows, each with all its inputs one after the
// other, in one flat region that can be written to a file and mapped back as it is.
//
// Integer kinds. Inputs come in spans of 256 (the last one shorter, whole units of 32). A span of n units is
//     codes      n · 64 · bits bytes: per unit the bit planes, high planes last; see codes.h (lattice:
//     lattice_layout.h) scales     one-level: [groups of the span][16] numbers of `scale`; two-level: [groups][16]
//     int8; odd nibbles:
//                [groups / 2][16] bytes of two s, low first, for scales 2 s + 1; squares: [groups][16] uint8 of s for
//                scales (s + 1)² times the group's
//     minimums   the same, if any (zeros: [groups][16] uint8; two-level: [groups][16] int8); fractions are zero points
//     in
//                the kind of the scales
//     supers     two-level: [16] fp16 scales, then [16] fp16 minimums if any; squares: [groups] fp32
// padded to 64 bytes (lattice: 32). Longer groups than a span repeat their scale in every span, others are cut into
// known sizes. Float kinds: [tiles of K][16] float scales if any, then [K][16] values; table kind: nibbles, two inputs
// a byte. Behind the panels: `order`, if any; then `widths`, if any: the bits of each unit's codes, which are those of
// the others about the same zero, less zero - 2^(bits - 1).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/model_ops.h"
#include "packing/canonical.h"
#include "packing/lattice_layout.h"

namespace penstock {

inline constexpr std::uint32_t packed_version = 3;  // of the layout; greater with every change
inline constexpr std::int64_t panel_rows = 16;
inline constexpr std::int64_t span_inputs = 256;
inline constexpr std::int64_t unit_inputs = 32;

enum class PackedKind : std::uint32_t { codes, ternary, f32, bf16, f16, f8_e4m3, f8_e5m2, table, lattice };
enum class ScaleKind : std::uint32_t {
    none,
    f32,
    f16,
    bf16,
    e8m0,
    e4m3,
    two_level,
    two_level_nibbles,
    odd_nibbles,
    squares
};
enum class MinKind : std::uint32_t { none, zeros, stored, fractions };

// Whether a kind's weights are integers with scales, multiplied by quantised activations.
constexpr bool integer_kind(PackedKind kind) {
    return kind == PackedKind::codes || kind == PackedKind::ternary || kind == PackedKind::lattice;
}

// Little-endian, 256 bytes, no pointers.
struct PackedHeader {
    std::uint32_t magic, version;
    PackedKind kind;
    ScaleKind scale;
    MinKind minimum;
    std::uint32_t bits;       // of a code
    std::uint32_t has_lut;    // codes are indices of lut
    std::int32_t zero;        // subtracted from every code (or from every value of lut)
    std::int64_t rows, cols;  // of one expert
    std::int64_t experts;
    std::int64_t group;  // inputs of one scale: integer kinds 16, 32, 64, 128 or 256
    std::int64_t panel_bytes, span_bytes, data_bytes, order_offset;  // order_offset: 0 if there is none
    std::int64_t file_bytes;                                         // of the matrix in the format it came from
    float factor;                                                    // times every scale
    std::uint8_t lut[16];
    float table[16];
    char source[16];             // name of the format it came from
    BlockFormat points;          // lattice: whose grid the codes are places of
    std::int64_t widths_offset;  // 0 if all codes have `bits`
    std::uint32_t segments;      // 0 for one
    std::int32_t segment_ends[8];
    std::uint8_t unused[4];
};
static_assert(sizeof(PackedHeader) == 256);

// Bytes an integer kind's span of `units` units takes (units · 32 inputs), and where its parts begin.
struct SpanLayout {
    std::int64_t scales, minimums, supers, bytes;
};
SpanLayout span_layout(const PackedHeader& header, std::int64_t units, const std::uint8_t* widths = nullptr);

// Fills in magic, version and all sizes in bytes and places from the rest.
void lay_out(PackedHeader& header, bool has_order, const std::uint8_t* widths = nullptr);

// Inputs [first, end).
struct InputRange {
    std::int64_t first, end;
};
inline constexpr int most_segments = 8;

// One span of every panel.
struct SpanPlace {
    std::int64_t offset, units;  // in bytes from the panel; units of inputs
    const std::uint8_t* widths;  // of the units, or null
    SpanLayout layout;
};

class PackedMatrix {
public:
    // Data of header.data_bytes, zeros but for the widths. Throws std::bad_alloc.
    explicit PackedMatrix(const PackedHeader& header, const std::uint8_t* widths = nullptr);
    // Data that `owner` keeps alive, 64-byte aligned, as data() once gave it. Throws std::invalid_argument with a
    // sentence if the header is not one of this version or disagrees with itself.
    PackedMatrix(const PackedHeader& header, const std::byte* data, std::shared_ptr<void> owner);

    const PackedHeader& header() const { return header_; }
    std::int64_t rows() const { return header_.rows; }  // of one expert
    std::int64_t cols() const { return header_.cols; }
    std::int64_t experts() const { return header_.experts; }
    std::int64_t panels() const { return (header_.rows + panel_rows - 1) / panel_rows; }  // of one expert
    std::int64_t bytes() const { return header_.data_bytes; }
    bool integer() const { return integer_kind(header_.kind); }
    bool huge_pages() const { return huge_pages_; }
    std::string kind() const;  // for people: "4-bit codes, group 32, two-level scales and minimums"

    const std::byte* data() const { return data_; }
    const std::byte* panel(std::int64_t expert, std::int64_t index) const {
        return expert_data(expert) + index * header_.panel_bytes;
    }
    std::int64_t expert_bytes() const { return panels() * header_.panel_bytes; }
    const std::byte* expert_data(std::int64_t expert) const {
        return places_.empty() ? data_ + expert * expert_bytes() : places_[static_cast<std::size_t>(expert)];
    }
    // The data of an expert lie elsewhere from now on: expert_bytes() of this packing, 64-byte aligned, that whoever
    // calls this keeps. While nothing reads the matrix. Throws std::invalid_argument if there is no such expert.
    void put_expert(std::int64_t expert, const std::byte* at);
    const std::int32_t* order() const {  // [K] or null
        return header_.order_offset ? reinterpret_cast<const std::int32_t*>(data_ + header_.order_offset) : nullptr;
    }
    const std::uint8_t* widths() const {  // [units of K] or null
        return header_.widths_offset ? reinterpret_cast<const std::uint8_t*>(data_ + header_.widths_offset) : nullptr;
    }
    SpanPlace place(std::int64_t span) const;

    // Inputs are summed in segments, each from zero, which are added in their order.
    int segments() const { return std::max(1, static_cast<int>(header_.segments)); }
    InputRange segment(int index) const {
        if (header_.segments == 0) return {0, header_.cols};
        return {index ? header_.segment_ends[index - 1] : 0, header_.segment_ends[index]};
    }
    // Of how many inputs each segment but the last has to be a multiple, so that a part of them has the same sums when
    // it is packed alone; 0 where inputs are in another order.
    std::int64_t segment_unit() const;
    // Where segments end, the last at cols(). Throws std::invalid_argument if that is no multiple of segment_unit().
    void cut(const std::vector<std::int64_t>& ends);
    std::byte* writable() { return own_; }  // null if the data is another's

private:
    PackedHeader header_;
    std::byte* own_ = nullptr;
    const std::byte* data_;
    std::shared_ptr<void> owner_;
    std::vector<std::int64_t> starts_;      // of the spans, if widths differ
    std::vector<const std::byte*> places_;  // of the experts, if one was put elsewhere
    bool huge_pages_ = false;
};

// Packers; `experts` matrices of rows / experts rows each lie one after the other. They use the team and throw
// std::invalid_argument, whose text names the value and what is allowed, where there is no packing.
using Packed = std::unique_ptr<PackedMatrix>;

Packed pack_blocks(BlockFormat format, std::int64_t rows, std::int64_t cols, std::int64_t experts,
                   const std::uint8_t* blocks);

// The same of a lattice format: `header` has sizes, group, factor and points.
Packed pack_lattice(const PackedHeader& header, const std::uint8_t* blocks);

struct AffineSource {  // as Affine of kernels/canonical.py
    std::int64_t rows, cols, experts, group;
    int bits, zero;
    const std::uint8_t* codes;
    const float* scales;
    const std::uint8_t* zeros;  // or null
    const float* fractions;     // zero points that are no integers, or null
    const float* minimums;      // or null
    const std::int32_t* order;  // or null
};
Packed pack_affine(const AffineSource& source);

struct CodebookSource {
    std::int64_t rows, cols, experts, group;
    const std::uint8_t* codes;
    const float* table;  // [16]
    const float* scales;
};
Packed pack_codebook(const CodebookSource& source);

struct PlainSource {
    PackedKind kind;  // a float kind
    std::int64_t rows, cols, experts;
    const std::byte* data;
    const float* scales;  // or null
    std::int64_t tile_rows, tile_cols;
};
Packed pack_plain(const PlainSource& source);

// Row `row` (0 to experts · rows) as floats: the reference decode, bit for bit.
void unpack_row(const PackedMatrix& matrix, std::int64_t row, float* out);

// Bytes of scratch that linear() needs for at most `tokens` tokens, and experts() for tokens of top_k experts each.
std::int64_t linear_scratch(const PackedMatrix* const* parts, int num_parts, std::int64_t tokens);
std::int64_t head_linear_scratch(const PackedMatrix& weight, bool rotates, std::int64_t tokens);
std::int64_t experts_scratch(const PackedMatrix& gate, const PackedMatrix& up, const PackedMatrix& down,
                             std::int64_t tokens, std::int64_t top_k, std::int64_t most_rank = 0);
// What adapters of up to that rank take for rows beside the op that they change.
std::int64_t adapter_scratch(std::int64_t most_rank, std::int64_t rows);

// The ops themselves are in every instruction set's table (ops.h):
//     void linear(const LinearArgs&, Worker&);      parts of equal K; with an activation either gates then ups, an even
//                                                   number of parts, or one part whose first half of rows is gates and
//                                                   a multiple of 16; at most 16 parts
//     void experts(const ExpertsArgs&, Worker&);
//     void head_linear(const HeadLinearArgs&, Worker&);
//     void embedding(const EmbeddingArgs&, Worker&);

}  // namespace penstock
