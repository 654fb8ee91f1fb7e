#include "vec/cpu_features.h"

#include <array>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace penstock {
namespace {

#if defined(__x86_64__)

struct Registers {
    std::uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(std::uint32_t leaf, std::uint32_t subleaf) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
    return r;
}

// XCR0: the register files the operating system saves when it switches threads (Intel SDM volume 1, 13.3).
std::uint64_t saved_registers(bool os_uses_xsave) {
    if (!os_uses_xsave) return 0;
    std::uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return std::uint64_t{high} << 32 | low;
}

// Linux gives a process room for tiles when it asks (arch_prctl, ARCH_REQ_XCOMP_PERM); its threads inherit that.
bool ask_for_tiles() {
#if defined(__linux__)
    constexpr long request = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return true;
#endif
}

auto detect() {
    const auto bit = [](std::uint32_t value, int at) { return (value >> at & 1) != 0; };
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0), more = seven.eax >= 1 ? cpuid(7, 1) : Registers{};
    const std::uint64_t saved = saved_registers(bit(one.ecx, 27));
    const auto saves = [&](std::uint64_t mask) { return (saved & mask) == mask; };
    const bool ymm = saves(0x6);        // XMM, YMM
    const bool zmm = saves(0xe6);       // and opmask, upper halves of ZMM0-15, ZMM16-31
    const bool tiles = saves(0x60000);  // TILECFG, TILEDATA
    const bool amx = tiles && bit(seven.edx, 24);
    return std::to_array<Feature>({
        {"sse4_2", bit(one.ecx, 20)},
        {"os_ymm", ymm},
        {"os_zmm", zmm},
        {"os_amx", tiles},
        {"avx", ymm && bit(one.ecx, 28)},
        {"f16c", ymm && bit(one.ecx, 29)},
        {"fma", ymm && bit(one.ecx, 12)},
        {"avx2", ymm && bit(seven.ebx, 5)},
        {"avx_vnni", ymm && bit(more.eax, 4)},
        {"avx512f", zmm && bit(seven.ebx, 16)},
        {"avx512bw", zmm && bit(seven.ebx, 30)},
        {"avx512cd", zmm && bit(seven.ebx, 28)},
        {"avx512dq", zmm && bit(seven.ebx, 17)},
        {"avx512vl", zmm && bit(seven.ebx, 31)},
        {"avx512_vbmi", zmm && bit(seven.ecx, 1)},
        {"avx512_vbmi2", zmm && bit(seven.ecx, 6)},
        {"avx512_vnni", zmm && bit(seven.ecx, 11)},
        {"avx512_bf16", zmm && bit(more.eax, 5)},
        {"avx512_fp16", zmm && bit(seven.edx, 23)},
        {"amx_tile", amx},
        {"os_grants_amx", amx && ask_for_tiles()},
        {"amx_int8", tiles && bit(seven.edx, 25)},
        {"amx_bf16", tiles && bit(seven.edx, 22)},
        {"amx_fp16", tiles && bit(more.eax, 21)},
    });
}

#elif defined(__aarch64__) && defined(__linux__)

auto detect() {
    const unsigned long caps = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);
    return std::to_array<Feature>({
        {"neon", (caps >> 1 & 1) != 0},
        {"fp16", (caps >> 10 & 1) != 0},
        {"dotprod", (caps >> 20 & 1) != 0},
        {"sve", (caps >> 22 & 1) != 0},
        {"sve2", (more >> 1 & 1) != 0},
        {"i8mm", (more >> 13 & 1) != 0},
        {"bf16", (more >> 14 & 1) != 0},
        {"sme", (more >> 23 & 1) != 0},
    });
}

#else

auto detect() { return std::array<Feature, 0>{}; }

#endif

}  // namespace

std::span<const Feature> cpu_features() {
    static const auto features = detect();
    return features;
}

}  // namespace penstock
