#include "program/machine_limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "program/huge_memory.h"
#include "program/team.h"
#include "vec/cpu_features.h"
#include "vec/dispatch.h"

namespace penstock {
namespace {

constexpr int tries = 9;
constexpr std::int64_t rounds = 2'000'000;  // about ten milliseconds
constexpr std::int64_t piece = 1 << 20;

bool has(std::string_view feature) {
    return std::ranges::any_of(cpu_features(), [&](const Feature& f) { return f.name == feature && f.usable; });
}

template <class F>
double best_rate(F&& amount) {
    double out = 0;
    for (int i = 0; i < tries; ++i) {
        const auto start = std::chrono::steady_clock::now();
        const auto done = static_cast<double>(amount());
        out = std::max(out, done / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return out;
}

}  // namespace

double measure_limit(Limit limit, std::int64_t bytes) {
    if (limit == Limit::bf16 && !has("avx512_bf16")) return 0;
    if (limit != Limit::read)
        return best_rate([&] {
            std::atomic<std::int64_t> done = 0;
            parallel_for(num_threads() * 4, 1, [&](std::int64_t begin, std::int64_t end) {
                for (std::int64_t i = begin; i < end; ++i) done += ops().run_limit(limit, rounds);
            });
            return done.load();
        });
    const std::int64_t pieces = std::max<std::int64_t>(1, bytes / piece);
    const HugeMemory memory = huge_memory(static_cast<std::size_t>(pieces * piece));
    parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
        std::memset(memory.bytes.get() + begin * piece, 1, static_cast<std::size_t>((end - begin) * piece));
    });
    std::atomic<std::uint64_t> seen = 0;
    return best_rate([&] {
        parallel_for(pieces, 1, [&](std::int64_t begin, std::int64_t end) {
            seen |= ops().read_memory(memory.bytes.get() + begin * piece, (end - begin) * piece);
        });
        return pieces * piece;
    });
}

}  // namespace penstock
