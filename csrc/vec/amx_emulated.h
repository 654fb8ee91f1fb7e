// The tiles of amx.h in memory, with the same bits: for tests on processors without matrix units.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock::PENSTOCK_ISA::vec {

class Tiles {
public:
    explicit Tiles(int rows) : rows_(rows) {}
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int t>
    void load(const void* from, std::int64_t stride) {
        for (int r = 0; r < rows_of(t); ++r)
            std::memcpy(tile_[t][r], static_cast<const std::byte*>(from) + r * stride, 64);
    }
    template <int t>
    void store(void* to, std::int64_t stride) const {
        for (int r = 0; r < rows_of(t); ++r) std::memcpy(static_cast<std::byte*>(to) + r * stride, tile_[t][r], 64);
    }
    template <int t>
    void zero() {
        std::memset(tile_[t], 0, sizeof(tile_[t]));
    }
    // TDPBF16PS (Intel SDM volume 2): fused products of the first halves of all pairs, and of the second halves, start
    // at zero; their sum is added to what was there. Every step rounds to nearest and takes and gives subnormals as
    // zero.
    template <int sums, int activations, int weights>
    void multiply() {
        const std::uint32_t before = _mm_getcsr(), flush = 0x9fc0;  // exceptions masked, FTZ, DAZ
        asm volatile("ldmxcsr %0" : : "m"(flush) : "memory");
        const __m512i second = _mm512_set1_epi32(-0x10000);
        for (int m = 0; m < rows_; ++m) {
            __m512 first_sum = _mm512_setzero_ps(), second_sum = _mm512_setzero_ps();
            for (int k = 0; k < 16; ++k) {
                const __m512i a = _mm512_set1_epi32(static_cast<int>(tile_[activations][m][k]));
                const __m512i b = _mm512_load_si512(tile_[weights][k]);
                first_sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)),
                                            _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), first_sum);
                second_sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, second)),
                                             _mm512_castsi512_ps(_mm512_and_si512(b, second)), second_sum);
            }
            const __m512 sum = _mm512_add_ps(_mm512_load_ps(tile_[sums][m]), _mm512_add_ps(first_sum, second_sum));
            _mm512_store_ps(tile_[sums][m], sum);
        }
        asm volatile("ldmxcsr %0" : : "m"(before) : "memory");
    }

private:
    int rows_of(int tile) const { return tile < 6 ? rows_ : 16; }

    int rows_;
    alignas(64) std::uint32_t tile_[8][16][16];
};

// VCVTNE2PS2BF16 (Intel SDM volume 2).
static inline __m512i bf16_bits(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i out = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmpgt_epu32_mask(size, _mm512_set1_epi32(0x7f800000));
    out = _mm512_mask_or_epi32(out, nan, bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 tiny = _mm512_cmplt_epu32_mask(size, _mm512_set1_epi32(0x00800000));
    return _mm512_srli_epi32(_mm512_mask_xor_epi32(out, tiny, bits, size), 16);
}
static inline __m512i to_bf16(__m512 low, __m512 high) {
    const __m256i first = _mm512_cvtepi32_epi16(bf16_bits(low)), second = _mm512_cvtepi32_epi16(bf16_bits(high));
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

}  // namespace penstock::PENSTOCK_ISA::vec
