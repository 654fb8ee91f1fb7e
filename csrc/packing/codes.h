// The codes of integer kinds, and how they become bytes a dot product takes.
//
// A unit is 32 inputs of 16 rows: eight vectors of 64 bytes, byte 4 c + i of vector v being the code of row c and input
// 4 v + i. It is stored as bit planes: low planes hold the low bits of several vectors in one,
//     nibbles (4, 5, 6 bits)   4 vectors, the low half of vector j is 2 j, the high half 2 j + 1
//     pairs (2, 3, 6 bits)     2 vectors, bits 2 i and 2 i + 1 of vector j are 4 j + i
//     single (1, 3, 5 bits)    1 vector, bit i is i
// one after the other, low bits first. Eight bits are stored as they are. Ternary codes: five vectors in one, as the
// fraction of 256 whose ternary digits they are (ceil(256 n / 243)).
#pragma once

#include <algorithm>

#include "packing/lattice_codes.h"
#include "packing/packed.h"
#include "vec/bytes.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// What the kernels need of a panel's 256 inputs besides its codes, for `panels` panels side by side.
struct SpanScales {
    alignas(64) float scale[16][64];
    alignas(64) float minimum[16][64];  // negated: added to the products
};

template <int v>
static inline vec::Bytes64 nibble(const std::uint8_t* planes) {
    return vec::mask(vec::shift_right<4 * (v % 2)>(vec::load64(planes + v / 2 * 64)), 15);
}
// Two bits of vector v, moved `up`.
template <int v, int up>
static inline vec::Bytes64 pair(const std::uint8_t* planes) {
    return vec::mask(vec::shift_right<2 * (v % 4) - up>(vec::load64(planes + v / 4 * 64)), 3 << up);
}
template <int v, int up>
static inline vec::Bytes64 single(const std::uint8_t* plane) {
    return vec::mask(vec::shift_right<v - up>(vec::load64(plane)), 1 << up);
}

template <int bits, int v>
static inline vec::Bytes64 code_vector(const std::uint8_t* unit) {
    if constexpr (bits == 8) return vec::load64(unit + v * 64);
    if constexpr (bits == 6) return nibble<v>(unit) | pair<v, 4>(unit + 256);
    if constexpr (bits == 5) return nibble<v>(unit) | single<v, 4>(unit + 256);
    if constexpr (bits == 4) return nibble<v>(unit);
    if constexpr (bits == 3) return pair<v, 0>(unit) | single<v, 2>(unit + 128);
    if constexpr (bits == 2) return pair<v, 0>(unit);
    return single<v, 0>(unit);
}

// Codes of so many bits, a byte each, or what a table has for them, up to `most`.
template <int bits, bool has_lut, int greatest = (1 << bits) - 1>
class PlaneCodes {
public:
    static constexpr std::int64_t unit_bytes = 64 * bits;
    static constexpr int most = greatest;
    static constexpr bool streamed = !has_lut || bits == 4;  // tables of fewer bits are rare
    static constexpr int group = 0;                          // any

    PlaneCodes(const PackedHeader& header, const std::uint8_t* codes, std::int64_t)
        : codes_(codes), lut_(vec::repeat16(header.lut)) {}

    // Calls use(integral_constant<v>, bytes) for the eight vectors of unit u, in order.
    template <class F>
    [[gnu::always_inline]] inline void each(std::int64_t u, F&& use) const {
        const std::uint8_t* const unit = codes_ + u * unit_bytes;
        const auto one = [&]<int v>(std::integral_constant<int, v> index) __attribute__((always_inline)) {
            const vec::Bytes64 codes = code_vector<bits, v>(unit);
            if constexpr (has_lut)
                use(index, vec::lookup(lut_, codes));
            else
                use(index, codes);
        };
        [&]<int... v>(std::integer_sequence<int, v...>) __attribute__((always_inline)) {
            (one(std::integral_constant<int, v>{}), ...);
        }(std::make_integer_sequence<int, 8>{});
    }

private:
    const std::uint8_t* codes_;
    vec::Bytes64 lut_;
};

// Codes of `units` units as bytes: vector v of unit u goes to out + (8 u + v) * stride.
template <class Codes>
static inline void unpack_units(const PackedHeader& header, const std::uint8_t* codes, std::int64_t units,
                                std::int64_t stride, std::uint8_t* out) {
    const Codes source(header, codes, units);
    for (std::int64_t u = 0; u < units; ++u)
        source.each(u, [&](auto v, vec::Bytes64 bytes) { vec::store64(out + (8 * u + v) * stride, bytes); });
}

// Ternary digits come out one after the other by multiplying with 3: the carry out of eight bits is the next one.
static inline void unpack_ternary(const std::uint8_t* codes, std::int64_t units, std::int64_t stride,
                                  std::uint8_t* out) {
    for (std::int64_t v = 0; v < 8 * units; v += 5) {
        vec::Bytes64 rest = vec::load64(codes + v / 5 * 64);
        for (std::int64_t i = v; i < std::min(v + 5, 8 * units); ++i) {
            vec::store64(out + i * stride, vec::at_least(rest, 86) + vec::at_least(rest, 171));
            rest = rest + rest + rest;
        }
    }
}

// What a matrix's codes are at most.
static inline int greatest_code(const PackedHeader& header) {
    if (header.has_lut) return *std::max_element(header.lut, header.lut + 16);
    if (header.kind == PackedKind::ternary) return 2;
    if (header.kind == PackedKind::lattice) return greatest_point;
    return (1 << header.bits) - 1;
}

template <class F>
static inline auto with_plane_codes(std::uint32_t bits, F&& use) {
    switch (bits) {
        case 1:
            return use.template operator()<PlaneCodes<1, false>>();
        case 2:
            return use.template operator()<PlaneCodes<2, false>>();
        case 3:
            return use.template operator()<PlaneCodes<3, false>>();
        case 4:
            return use.template operator()<PlaneCodes<4, false>>();
        case 5:
            return use.template operator()<PlaneCodes<5, false>>();
        case 6:
            return use.template operator()<PlaneCodes<6, false>>();
        default:
            return use.template operator()<PlaneCodes<8, false>>();
    }
}

// Calls use.template operator()<Codes>(), Codes being what reads a unit of the matrix, or `otherwise` for ternary
// codes.
template <class F>
static inline auto with_codes(const PackedHeader& header, F&& use, auto otherwise) {
    using enum BlockFormat;
    if (header.kind == PackedKind::ternary) return otherwise;
    if (header.kind == PackedKind::lattice) switch (header.points) {
            case iq2_xxs:
                return use.template operator()<LatticePoints<iq2_xxs>>();
            case iq2_xs:
                return use.template operator()<LatticePoints<iq2_xs>>();
            case iq2_s:
                return use.template operator()<LatticePoints<iq2_s>>();
            case iq3_xxs:
                return use.template operator()<LatticePoints<iq3_xxs>>();
            case iq3_s:
                return use.template operator()<LatticePoints<iq3_s>>();
            case iq1_s:
                return use.template operator()<LatticePoints<iq1_s>>();
            default:
                return use.template operator()<LatticePoints<iq1_m>>();
        }
    if (header.has_lut) switch (header.bits) {
            case 1:
                return use.template operator()<PlaneCodes<1, true, 255>>();
            case 2:
                return use.template operator()<PlaneCodes<2, true, 255>>();
            case 3:
                return use.template operator()<PlaneCodes<3, true, 255>>();
            default:
                if (greatest_code(header) < 32) return use.template operator()<PlaneCodes<4, true, 31>>();
                return use.template operator()<PlaneCodes<4, true, 255>>();
        }
    return with_plane_codes(header.bits, use);
}

using UnpackUnits = void (*)(const PackedHeader&, const std::uint8_t*, std::int64_t, std::int64_t, std::uint8_t*);

// Units of different widths, about the zero of the widest.
static inline void unpack_widths(const PackedHeader& header, const std::uint8_t* codes, const SpanPlace& place,
                                 std::int64_t stride, std::uint8_t* out) {
    for (std::int64_t u = 0; u < place.units; ++u, out += 8 * stride) {
        const std::uint32_t bits = place.widths[u];
        std::uint8_t less[16];
        __builtin_memset(less, header.zero - (1 << (bits - 1)), 16);
        with_plane_codes(bits, [&]<class Codes>() {
            Codes(header, codes, 1).each(0, [&](auto v, vec::Bytes64 bytes) {
                vec::store64(out + v * stride, bytes + vec::repeat16(less));
            });
        });
        codes += 64 * bits;
    }
}

// The codes of one panel's span as bytes: inputs 4 v … 4 v + 3 of the sixteen rows go to out + v * stride.
static inline void unpack_codes(const PackedHeader& header, const std::byte* span, const SpanPlace& place,
                                std::int64_t stride, std::uint8_t* out) {
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(span);
    if (place.widths) return unpack_widths(header, codes, place, stride, out);
    const auto choose = []<class Codes>() -> UnpackUnits { return unpack_units<Codes>; };
    const UnpackUnits unpack = with_codes(header, choose, UnpackUnits{nullptr});
    unpack ? unpack(header, codes, place.units, stride, out) : unpack_ternary(codes, place.units, stride, out);
}

// Sixteen stored numbers of a one-level scale kind.
static inline vec::F32x16 load_scales(ScaleKind kind, const std::byte* at) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(at);
    switch (kind) {
        case ScaleKind::f32:
            return vec::load16(reinterpret_cast<const float*>(at));
        case ScaleKind::bf16:
            return vec::load16_bf16(reinterpret_cast<const std::uint16_t*>(at));
        case ScaleKind::e8m0:
            return vec::load16_e8m0(bytes);
        case ScaleKind::e4m3:
            return vec::load16_e4m3(bytes);
        default:
            return vec::load16_f16(reinterpret_cast<const std::uint16_t*>(at));
    }
}

static inline std::int64_t scale_bytes(ScaleKind kind) {
    switch (kind) {
        case ScaleKind::f32:
            return 4;
        case ScaleKind::f16:
        case ScaleKind::bf16:
            return 2;
        default:
            return 1;
    }
}

// s of scales (s + 1)² times the group's.
static inline void squared_scales(const std::byte* roots, const std::byte* supers, std::int64_t groups, int column,
                                  SpanScales& out) {
    for (std::int64_t g = 0; g < groups; ++g) {
        float super;
        __builtin_memcpy(&super, supers + 4 * g, 4);
        const vec::F32x16 root =
            vec::load16_u8(reinterpret_cast<const std::uint8_t*>(roots) + 16 * g) + vec::splat16(1.0f);
        vec::store(out.scale[g] + column, root * root * vec::splat16(super));
    }
}

// s of scales 2 s + 1, for an even number of groups.
static inline void odd_scales(const std::byte* nibbles, const std::uint16_t* supers, float factor, std::int64_t groups,
                              int column, SpanScales& out) {
    const vec::F32x16 super = vec::load16_f16(supers) * vec::splat16(factor);
    for (std::int64_t g = 0; g < groups; g += 2) {
        const auto* const pairs = reinterpret_cast<const std::uint8_t*>(nibbles + 8 * g);
        alignas(16) std::int8_t low[16], high[16];
        for (int i = 0; i < 16; ++i) {
            low[i] = static_cast<std::int8_t>((pairs[i] & 15) * 2 + 1);
            high[i] = static_cast<std::int8_t>((pairs[i] >> 4) * 2 + 1);
        }
        vec::store(out.scale[g] + column, vec::load16_i8(low) * super);
        vec::store(out.scale[g + 1] + column, vec::load16_i8(high) * super);
    }
}

// Scales and negated minimums of the groups of one panel's span, out.scale[group][column + 0 … 15].
static inline void group_scales(const PackedMatrix& matrix, const SpanLayout& layout, const std::byte* span,
                                std::int64_t groups, int column, SpanScales& out) {
    const PackedHeader& header = matrix.header();
    const vec::F32x16 factor = vec::splat16(header.factor);
    const std::byte *scales = span + layout.scales, *minimums = span + layout.minimums;
    if (header.scale == ScaleKind::squares) return squared_scales(scales, span + layout.supers, groups, column, out);
    if (header.scale == ScaleKind::odd_nibbles)
        return odd_scales(scales, reinterpret_cast<const std::uint16_t*>(span + layout.supers), header.factor, groups,
                          column, out);
    if (header.scale == ScaleKind::two_level || header.scale == ScaleKind::two_level_nibbles) {
        const auto* supers = reinterpret_cast<const std::uint16_t*>(span + layout.supers);
        const vec::F32x16 super = vec::load16_f16(supers) * factor;
        const bool has_min = header.minimum != MinKind::none;
        const vec::F32x16 super_min = has_min ? vec::load16_f16(supers + 16) : vec::splat16(0.0f);
        for (std::int64_t g = 0; g < groups; ++g) {
            const auto* sub = reinterpret_cast<const std::int8_t*>(scales + 16 * g);
            const auto* sub_min = reinterpret_cast<const std::int8_t*>(minimums + 16 * g);
            alignas(16) std::int8_t low[16], high[16];
            if (header.scale == ScaleKind::two_level_nibbles) {
                for (int i = 0; i < 16; ++i) low[i] = sub[i] & 15, high[i] = sub[i] >> 4 & 15;
                sub = low, sub_min = high;
            }
            vec::store(out.scale[g] + column, vec::load16_i8(sub) * super);
            if (has_min) vec::store(out.minimum[g] + column, vec::load16_i8(sub_min) * super_min);
        }
        return;
    }
    const std::int64_t step = 16 * scale_bytes(header.scale);
    for (std::int64_t g = 0; g < groups; ++g) {
        const vec::F32x16 scale = load_scales(header.scale, scales + step * g) * factor;
        vec::store(out.scale[g] + column, scale);
        if (header.minimum == MinKind::stored)
            vec::store(out.minimum[g] + column, load_scales(header.scale, minimums + step * g));
        if (header.minimum == MinKind::zeros) {
            const auto* zeros = reinterpret_cast<const std::uint8_t*>(minimums + 16 * g);
            vec::store(out.minimum[g] + column, vec::splat16(0.0f) - scale * vec::load16_u8(zeros));
        }
        if (header.minimum == MinKind::fractions)  // exact but for fp32 ones
            vec::store(out.minimum[g] + column,
                       vec::splat16(0.0f) - scale * load_scales(header.scale, minimums + step * g));
    }
}

}  // namespace penstock::PENSTOCK_ISA
