// Packs the lattice formats: the same points, signs and scales, by field and sixteen rows at a time.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "packing/canonical.h"
#include "packing/lattice_fields.h"
#include "packing/lattice_layout.h"
#include "packing/packed.h"
#include "program/team.h"

namespace penstock {
namespace {

using namespace PENSTOCK_ISA;
using std::int64_t;

void set_bit(std::uint8_t* bits, int64_t i, u32 value) { bits[i / 8] = static_cast<u8>(bits[i / 8] | value << i % 8); }

void store_unit(const LatticeLayout& layout, const LatticeFields& fields, int row, u8* unit) {
    for (int64_t run = 0; run < layout.runs(); ++run) {
        const u32 point = fields.point[run];
        unit[16 * run + row] = static_cast<u8>(point);
        for (int64_t b = 0; b < layout.high_bits; ++b)
            set_bit(unit + layout.high() + 2 * (run * layout.high_bits + b), row, point >> (8 + b) & 1);
    }
    u8* const signs = unit + layout.signs();
    if (layout.shifted)
        for (int i = 0; i < 4; ++i) set_bit(signs + 2 * i, row, fields.signs >> i & 1);
    else
        for (int i = 0; i < 32; ++i) set_bit(signs + 8 * (i / 4), 4 * row + i % 4, fields.signs >> i & 1);
}

template <BlockFormat Format>
void store_block(const u8* block, const PackedHeader& h, int row, std::byte* span) {
    constexpr LatticeLayout layout = lattice_layout(Format);
    const SpanLayout at = span_layout(h, 8);
    auto* const bytes = reinterpret_cast<u8*>(span);
    for (int u = 0; u < 8; ++u) {
        const LatticeFields fields = lattice_fields<Format>(block, u);
        store_unit(layout, fields, row, bytes + u * layout.bytes());
        if (h.group == 16) {
            bytes[at.scales + 16 * u + row] = static_cast<u8>(fields.scales[0] | fields.scales[1] << 4);
        } else {
            u8& pair = bytes[at.scales + u / 2 * 16 + row];
            pair = static_cast<u8>(pair | fields.scales[0] << u % 2 * 4);
        }
    }
    const u32 scale = block_scale_bits<Format>(block);
    if (!std::isfinite(half_bits(scale)))
        throw std::invalid_argument("a scale is not finite. The weights are damaged.");
    const auto word = static_cast<std::uint16_t>(scale);
    std::memcpy(bytes + at.supers + 2 * row, &word, 2);
}

using StoreBlock = void (*)(const u8*, const PackedHeader&, int, std::byte*);

StoreBlock store_of(BlockFormat format) {
    switch (format) {
        case BlockFormat::iq2_xxs:
            return store_block<BlockFormat::iq2_xxs>;
        case BlockFormat::iq2_xs:
            return store_block<BlockFormat::iq2_xs>;
        case BlockFormat::iq2_s:
            return store_block<BlockFormat::iq2_s>;
        case BlockFormat::iq3_xxs:
            return store_block<BlockFormat::iq3_xxs>;
        case BlockFormat::iq3_s:
            return store_block<BlockFormat::iq3_s>;
        case BlockFormat::iq1_s:
            return store_block<BlockFormat::iq1_s>;
        default:
            return store_block<BlockFormat::iq1_m>;
    }
}

}  // namespace

Packed pack_lattice(const PackedHeader& start, const std::uint8_t* blocks) {
    PackedHeader h = start;
    h.kind = PackedKind::lattice;
    h.scale = ScaleKind::odd_nibbles;
    h.bits = 0;
    h.zero = lattice_zero;
    lay_out(h, false);
    auto out = std::make_unique<PackedMatrix>(h);
    const StoreBlock store = store_of(h.points);
    const int64_t panels = out->panels(), spans = h.cols / span_inputs, block_bytes = block_layout(h.points).bytes;
    parallel_for(h.experts * panels, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % panels * panel_rows, rows = std::min(panel_rows, h.rows - first);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t s = 0; s < spans; ++s)
                    store(blocks + ((i / panels * h.rows + first + r) * spans + s) * block_bytes, h,
                          static_cast<int>(r), out->writable() + i * h.panel_bytes + s * h.span_bytes);
        }
    });
    return out;
}

}  // namespace penstock
