// AVX-512 with dot products of bfloat16 pairs.
#pragma once

#include "wide_avx512.h"

#define PENSTOCK_BF16_DOTS 1

namespace penstock::PENSTOCK_ISA::vec {

struct Bf16x32 {
    __m512i v;
};

static inline Bf16x32 load_pairs(const std::uint16_t* from) { return {_mm512_loadu_si512(from)}; }
// The first of each pair if `first`, the second if `second`; zero bits elsewhere.
static inline Bf16x32 load_pairs(const std::uint16_t* from, bool first, bool second) {
    const std::uint32_t bits = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
    return {_mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(static_cast<int>(bits)))};
}
// One pair in all lanes.
static inline Bf16x32 splat_pair(const std::uint16_t* from) {
    int bits;
    __builtin_memcpy(&bits, from, 4);
    return {_mm512_set1_epi32(bits)};
}
// c + a b over each lane's pair. Subnormal numbers count as zero.
static inline F32x16 dot(Bf16x32 a, Bf16x32 b, F32x16 c) {
    return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
}

}  // namespace penstock::PENSTOCK_ISA::vec
