// The check of matrix units before they are used: it accepts equal products and notices small differences.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "vec/dispatch.h"
#include "vec/tile_check.h"

using namespace penstock;

#ifdef __x86_64__
namespace penstock::amx_emulated {
void tile_product(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units, float* sums);
}
#endif

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

float value(std::uint16_t bits) {
    const auto out = std::bit_cast<float>(std::uint32_t{bits} << 16);
    return std::fabs(out) < 0x1p-126f ? 0.0f : out;
}
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// One multiply-add at a time, as the processor's manual writes it. `chained`: in one chain instead of two, as VDPBF16PS
// does.
template <bool flush, bool chained>
void scalar_product(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units, float* sums) {
    const auto keep = [](float x) { return flush ? flushed(x) : x; };
    for (int m = 0; m < rows; ++m)
        for (int n = 0; n < 16; ++n) {
            float sum = 0;
            for (int u = 0; u < units; ++u) {
                float half[2] = {};
                for (int k = 0; k < 32; ++k) {
                    float& at = half[chained ? 0 : k % 2];
                    at = keep(std::fma(value(activations[(m * units + u) * 32 + k]),
                                       value(weights[u * 512 + k / 2 * 32 + 2 * n + k % 2]), at));
                }
                sum = keep(sum + keep(half[0] + half[1]));
            }
            sums[16 * m + n] = sum;
        }
}

}  // namespace

int main() {
    require(same_products(scalar_product<true, false>, scalar_product<true, false>), "equal products are equal");
    require(!same_products(scalar_product<true, false>, scalar_product<true, true>), "another order is noticed");
    require(!same_products(scalar_product<true, false>, scalar_product<false, false>), "subnormal sums are noticed");
#ifdef __x86_64__
    if (usable("amx_emulated").refusal == Refusal::none)
        require(same_products(amx_emulated::tile_product, scalar_product<true, false>),
                "the emulation is the manual's arithmetic");
#endif
    std::printf("tiles passed\n");
}
