// Packs floating-point values, with a scale a tile or none, and codebooks of arbitrary values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "packing/packed.h"
#include "program/team.h"

namespace penstock {

// pack_codes.cpp: table[i] = step · values[i]
Packed pack_integer_codebook(const CodebookSource& source, const int* values, float step);

namespace {

using std::int64_t;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

PackedHeader start(const char* source, PackedKind kind, int64_t rows, int64_t cols, int64_t experts) {
    if (rows <= 0 || cols <= 0 || experts <= 0 || rows % experts)
        refuse(std::to_string(rows) + " rows of " + std::to_string(cols) + " inputs are not " +
               std::to_string(experts) + " matrices of equal, positive sizes.");
    PackedHeader h{};
    h.kind = kind;
    h.rows = rows / experts;
    h.cols = cols;
    h.experts = experts;
    h.factor = 1.0f;
    h.group = cols;
    std::strncpy(h.source, source, sizeof(h.source) - 1);
    return h;
}

// Calls fill(first row, rows, panel) for all panels, in parallel.
template <class Fill>
Packed pack(PackedHeader& h, Fill&& fill) {
    lay_out(h, false);
    auto out = std::make_unique<PackedMatrix>(h);
    const int64_t panels = out->panels();
    parallel_for(h.experts * panels, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % panels * panel_rows;
            fill(i / panels * h.rows + first, std::min(panel_rows, h.rows - first),
                 out->writable() + i * h.panel_bytes);
        }
    });
    return out;
}

void check_scale(float scale) {
    if (!std::isfinite(scale))
        refuse("a scale is " + std::to_string(scale) + ": it must be finite. The weights are damaged.");
}

template <class T>
void transpose(const std::byte* data, int64_t row, int64_t rows, int64_t cols, std::byte* to) {
    for (int64_t r = 0; r < rows; ++r) {
        const std::byte* const from = data + (row + r) * cols * static_cast<int64_t>(sizeof(T));
        std::byte* const at = to + r * static_cast<int64_t>(sizeof(T));
        for (int64_t k = 0; k < cols; ++k)
            std::memcpy(at + k * 16 * static_cast<int64_t>(sizeof(T)), from + k * static_cast<int64_t>(sizeof(T)),
                        sizeof(T));
    }
}

// A codebook whose values are small integers times a power of two can be multiplied as integers.
bool integer_table(const float* table, int* values, float& step) {
    for (int power = 0; power <= 4; ++power) {
        step = std::ldexp(1.0f, -power);
        bool whole = true;
        for (int i = 0; i < 16 && whole; ++i) {
            const float value = table[i] / step;
            whole = std::fabs(value) <= 127.0f && value == std::nearbyint(value);
            if (whole) values[i] = static_cast<int>(value);
        }
        if (whole) return true;
    }
    return false;
}

}  // namespace

Packed pack_plain(const PlainSource& s) {
    static constexpr const char* names[] = {"", "", "f32", "bf16", "f16", "f8_e4m3", "f8_e5m2"};
    PackedHeader h = start(names[static_cast<int>(s.kind)], s.kind, s.rows, s.cols, s.experts);
    const int64_t size = s.kind == PackedKind::f32                                 ? 4
                         : s.kind == PackedKind::bf16 || s.kind == PackedKind::f16 ? 2
                                                                                   : 1;
    const int64_t tile_rows = s.scales ? s.tile_rows : s.rows, tile_cols = s.scales ? s.tile_cols : s.cols;
    if (tile_rows <= 0 || tile_cols <= 0) refuse("tiles of a scale must have positive sizes.");
    h.group = std::min(tile_cols, s.cols);
    h.scale = s.scales ? ScaleKind::f32 : ScaleKind::none;
    const int64_t tiles = (s.cols + h.group - 1) / h.group;
    h.file_bytes = s.rows * s.cols * size + (s.scales ? (s.rows + tile_rows - 1) / tile_rows * tiles * 4 : 0);
    return pack(h, [&](int64_t row, int64_t rows, std::byte* panel) {
        if (s.scales) {
            auto* const scales = reinterpret_cast<float*>(panel);
            for (int64_t t = 0; t < tiles; ++t)
                for (int64_t r = 0; r < rows; ++r) {
                    scales[16 * t + r] = s.scales[(row + r) / tile_rows * tiles + t];
                    check_scale(scales[16 * t + r]);
                }
            panel += tiles * 64;
        }
        if (size == 4) return transpose<float>(s.data, row, rows, s.cols, panel);
        if (size == 2) return transpose<std::uint16_t>(s.data, row, rows, s.cols, panel);
        if (s.kind == PackedKind::f8_e4m3)
            for (const std::byte *at = s.data + row * s.cols, *end = at + rows * s.cols; at < end; ++at)
                if ((*at & std::byte{0x7f}) == std::byte{0x7f})
                    refuse("a weight is NaN (e4m3 code 0x7f). The weights are damaged.");
        transpose<std::uint8_t>(s.data, row, rows, s.cols, panel);
    });
}

Packed pack_codebook(const CodebookSource& s) {
    if (s.group <= 0 || s.cols % s.group)
        refuse("a group of " + std::to_string(s.group) + " inputs does not divide rows of " + std::to_string(s.cols) +
               ".");
    int values[16];
    float step;
    if (s.group % 16 == 0 && integer_table(s.table, values, step)) return pack_integer_codebook(s, values, step);
    PackedHeader h = start("codebook", PackedKind::table, s.rows, s.cols, s.experts);
    const int64_t groups = s.cols / s.group;
    h.group = s.group;
    h.scale = ScaleKind::f32;
    h.file_bytes = s.rows * (s.cols / 2 + 4 * groups);
    std::copy_n(s.table, 16, h.table);
    return pack(h, [&](int64_t row, int64_t rows, std::byte* panel) {
        auto* const scales = reinterpret_cast<float*>(panel);
        auto* const nibbles = reinterpret_cast<std::uint8_t*>(panel + groups * 64);
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t g = 0; g < groups; ++g) check_scale(scales[16 * g + r] = s.scales[(row + r) * groups + g]);
            const std::uint8_t* const codes = s.codes + (row + r) * s.cols;
            for (int64_t k = 0; k < s.cols; ++k) {
                if (codes[k] > 15) refuse("a code of row " + std::to_string(row + r) + " is not below 16.");
                nibbles[16 * (k / 2) + r] =
                    static_cast<std::uint8_t>(nibbles[16 * (k / 2) + r] | codes[k] << 4 * (k % 2));
            }
        }
    });
}

}  // namespace penstock
