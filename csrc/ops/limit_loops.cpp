// Loops that reach a limit of one core: registers alone, or reading memory.
#include <cstring>

#include "ops/ops.h"
#include "program/machine_limits.h"
#include "vec/bytes.h"

namespace penstock::PENSTOCK_ISA {

// Assembly, as a compiler would move the work out of the loop; enough sums to hide every latency.
#define PENSTOCK_LOOP(zero, body, ...) \
    asm volatile(zero "1:\n" body "dec %0\njnz 1b\n" : "+r"(rounds)::"cc", __VA_ARGS__)
#define PENSTOCK_12(op, a, b)                                                                                          \
    op " %%" a ", %%" b "0\n" op " %%" a ", %%" b "1\n" op " %%" a ", %%" b "2\n" op " %%" a ", %%" b "3\n" op " %%" a \
       ", %%" b "4\n" op " %%" a ", %%" b "5\n" op " %%" a ", %%" b "6\n" op " %%" a ", %%" b "7\n" op " %%" a         \
       ", %%" b "8\n" op " %%" a ", %%" b "9\n" op " %%" a ", %%" b "10\n" op " %%" a ", %%" b "11\n"
#define PENSTOCK_CLOBBERED \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm14", "xmm15"

std::int64_t run_limit([[maybe_unused]] Limit limit, [[maybe_unused]] std::int64_t rounds) {
    [[maybe_unused]] const std::int64_t done = rounds * 12;
#if defined(__AVX512F__)
#define PENSTOCK_ZERO "vpxord %%zmm14, %%zmm14, %%zmm14\nvpxord %%zmm15, %%zmm15, %%zmm15\n"
    if (limit == Limit::int8) {
        PENSTOCK_LOOP(PENSTOCK_ZERO, PENSTOCK_12("vpdpbusd", "zmm14, %%zmm15", "zmm"), PENSTOCK_CLOBBERED);
        return done * 128;
    }
    if (limit == Limit::bf16) {
        PENSTOCK_LOOP(PENSTOCK_ZERO, PENSTOCK_12("vdpbf16ps", "zmm14, %%zmm15", "zmm"), PENSTOCK_CLOBBERED);
        return done * 64;
    }
    PENSTOCK_LOOP(PENSTOCK_ZERO, PENSTOCK_12("vfmadd231ps", "zmm14, %%zmm15", "zmm"), PENSTOCK_CLOBBERED);
    return done * 32;
#elif defined(__AVX2__)
#define PENSTOCK_ZERO "vxorps %%ymm14, %%ymm14, %%ymm14\nvxorps %%ymm15, %%ymm15, %%ymm15\n"
    if (limit == Limit::int8) {  // products of bytes, summed in 16 bits
#define PENSTOCK_BYTES(sum) "vpmaddubsw %%ymm14, %%ymm15, %%ymm13\nvpaddw %%ymm13, %%ymm" sum ", %%ymm" sum "\n"
        PENSTOCK_LOOP(PENSTOCK_ZERO,
                      PENSTOCK_BYTES("0") PENSTOCK_BYTES("1") PENSTOCK_BYTES("2") PENSTOCK_BYTES("3")
                          PENSTOCK_BYTES("4") PENSTOCK_BYTES("5") PENSTOCK_BYTES("6") PENSTOCK_BYTES("7")
                              PENSTOCK_BYTES("8") PENSTOCK_BYTES("9") PENSTOCK_BYTES("10") PENSTOCK_BYTES("11"),
                      PENSTOCK_CLOBBERED, "xmm13");
        return done * 64;
    }
    if (limit != Limit::fp32) return 0;
    PENSTOCK_LOOP(PENSTOCK_ZERO, PENSTOCK_12("vfmadd231ps", "ymm14, %%ymm15", "ymm"), PENSTOCK_CLOBBERED);
    return done * 16;
#else
    return 0;
#endif
}

// Something of all bytes, a multiple of 256.
std::uint64_t read_memory(const std::byte* from, std::int64_t bytes) {
    const auto* const at = reinterpret_cast<const std::uint8_t*>(from);
    vec::Bytes64 sum[4] = {vec::load64(at), vec::load64(at), vec::load64(at), vec::load64(at)};
    for (std::int64_t i = 0; i < bytes; i += 256)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            vec::prefetch(at + i + 64 * j + 4096);
            sum[j] = sum[j] | vec::load64(at + i + 64 * j);
        }
    std::uint8_t lanes[64];
    vec::store64(lanes, (sum[0] | sum[1]) | (sum[2] | sum[3]));
    std::uint64_t out;
    std::memcpy(&out, lanes, sizeof(out));
    return out;
}

}  // namespace penstock::PENSTOCK_ISA
