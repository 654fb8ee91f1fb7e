#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace penstock {

namespace generic {
extern const OpTable op_table;
}
#ifdef PENSTOCK_HAVE_AVX2
namespace avx2 {
extern const OpTable op_table;
}
#endif
#ifdef PENSTOCK_HAVE_AVX512
namespace avx512 {
extern const OpTable op_table;
}
#endif
#ifdef PENSTOCK_HAVE_AVX512_BF16
namespace avx512_bf16 {
extern const OpTable op_table;
}
#endif

namespace {

struct Isa {
    std::string_view name;
    const OpTable* table;  // null if this binary was built without it
    std::vector<std::string_view> needs;
};

#ifdef PENSTOCK_HAVE_AVX2
constexpr const OpTable* avx2_table = &avx2::op_table;
#else
constexpr const OpTable* avx2_table = nullptr;
#endif
#ifdef PENSTOCK_HAVE_AVX512
constexpr const OpTable* avx512_table = &avx512::op_table;
#else
constexpr const OpTable* avx512_table = nullptr;
#endif
#ifdef PENSTOCK_HAVE_AVX512_BF16
constexpr const OpTable* avx512_bf16_table = &avx512_bf16::op_table;
#else
constexpr const OpTable* avx512_bf16_table = nullptr;
#endif

bool has(std::string_view name, std::span<const Feature> features) {
    return std::ranges::any_of(features, [&](const Feature& f) { return f.name == name && f.usable; });
}

std::vector<Isa> ordered_isas() {
    std::vector<Isa> out{
        {"generic", &generic::op_table, {}},
        {"avx2", avx2_table, {"avx2", "fma", "f16c"}},
        {"avx512", avx512_table, {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}},
        {"avx512_bf16",
         avx512_bf16_table,
         {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}},
        {"amx", nullptr, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "amx_tile", "amx_int8", "amx_bf16"}},
    };
    // Processors with AMX compute bfloat16 pairs in vector registers at half the rate of float32 products.
    if (has("amx_tile", cpu_features())) std::swap(out[2], out[3]);
    return out;
}

const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = ordered_isas();
    return all;
}

std::string join(const std::vector<std::string_view>& names) {
    std::string out;
    for (const auto name : names) out += (out.empty() ? "" : ", ") + std::string(name);
    return out;
}

std::vector<std::string_view> missing(const Isa& isa, std::span<const Feature> features) {
    std::vector<std::string_view> out;
    for (const auto need : isa.needs)
        if (!has(need, features)) out.push_back(need);
    return out;
}

const Isa* find(std::string_view name) {
    const auto at = std::ranges::find(isas(), name, &Isa::name);
    return at == isas().end() ? nullptr : &*at;
}

const OpTable* best() {
    const OpTable* out = &generic::op_table;
    for (const Isa& isa : isas())
        if (isa.table && missing(isa, cpu_features()).empty()) out = isa.table;
    return out;
}

std::atomic<const OpTable*>& current() {
    static std::atomic<const OpTable*> table{best()};
    return table;
}

}  // namespace

std::vector<std::string_view> known_isas() {
    std::vector<std::string_view> out;
    for (const Isa& isa : isas()) out.push_back(isa.name);
    return out;
}

std::vector<std::string_view> built_isas() {
    std::vector<std::string_view> out;
    for (const Isa& isa : isas())
        if (isa.table) out.push_back(isa.name);
    return out;
}

Verdict judge(std::string_view name, std::span<const Feature> features) {
    const Isa* isa = find(name);
    const std::string quoted = '"' + std::string(name) + '"';
    if (!isa)
        return {Refusal::unknown, "instruction set " + quoted + " is not one of auto, " + join(known_isas()) + "."};
    if (!isa->table)
        return {Refusal::not_built, "this build of penstock has no ops for instruction set " + quoted + "; it has " +
                                        join(built_isas()) + ". Choose one of those or auto."};
    if (const auto lacking = missing(*isa, features); !lacking.empty())
        return {Refusal::cpu_lacks, "this machine cannot run instruction set " + quoted +
                                        ": the processor or the operating system lacks " + join(lacking) +
                                        ". Choose auto."};
    return {Refusal::none, ""};
}

const OpTable& ops() { return *current().load(std::memory_order_acquire); }

Verdict select_isa(std::string_view name) {
    if (name == "auto") {
        current().store(best(), std::memory_order_release);
        return {Refusal::none, ""};
    }
    Verdict verdict = judge(name, cpu_features());
    if (verdict.refusal == Refusal::none) current().store(find(name)->table, std::memory_order_release);
    return verdict;
}

}  // namespace penstock
