// Panels of float kinds: where their scales and values lie, and how values are read.
#pragma once

#include <algorithm>

#include "packing/packed.h"
#include "vec/bytes.h"

namespace penstock::PENSTOCK_ISA {

// Sixteen weights of input k, of a panel's data.
template <PackedKind kind>
static inline vec::F32x16 load_weights(const std::byte* data, std::int64_t k,
                                       [[maybe_unused]] const vec::Table16& table) {
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
static inline void each_scale(const PackedHeader& header, std::int64_t first, std::int64_t end, F&& use) {
    while (first < end) {
        const std::int64_t tile = first / header.group, stop = std::min(end, (tile + 1) * header.group);
        use(first, stop, tile);
        first = stop;
    }
}

}  // namespace penstock::PENSTOCK_ISA
