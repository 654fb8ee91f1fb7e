// Matrix units: eight tiles of up to 16 rows of 64 bytes. Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights.
//
// Own inline assembly: the intrinsics of gcc 12 name 8 of the 64 configuration bytes as read, and not the memory of
// tiles.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace penstock::PENSTOCK_ISA::vec {

// Tiles of a thread for as long as this lives: `rows` (1 to 16) rows of sums and of activations, 16 of weights.
class Tiles {
public:
    explicit Tiles(int rows) {
        alignas(64) std::uint8_t config[64] = {1};  // palette; bytes of a row from 16 on, rows from 48 on
        for (int t = 0; t < 8; ++t) {
            config[16 + 2 * t] = 64;
            config[48 + t] = static_cast<std::uint8_t>(t < 6 ? rows : 16);
        }
        asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
    }
    ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    // Rows `stride` bytes apart.
    template <int t>
    void load(const void* from, std::int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    void store(void* to, std::int64_t stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(t) : "memory");
    }
    template <int t>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(t) : "memory");
    }
    // sums[m][n] += products of activations[m] and weights[.][n], pairs of bfloat16
    template <int sums, int activations, int weights>
    void multiply() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(activations), "i"(weights) : "memory");
    }
};

// Two vectors of floats rounded to bfloat16, to nearest, ties to even; `low` comes first. Subnormal numbers become
// zero.
static inline __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

}  // namespace penstock::PENSTOCK_ISA::vec
