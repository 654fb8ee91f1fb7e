#include "vec/dispatch.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "vec/tile_check.h"

namespace penstock {

#ifdef PENSTOCK_HAVE_GENERIC
namespace generic {
extern const OpTable op_table;
}
#endif
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
#ifdef PENSTOCK_HAVE_AMX_EMULATED
namespace amx_emulated {
extern const OpTable op_table;
void tile_product(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units, float* sums);
}  // namespace amx_emulated
#endif
#ifdef PENSTOCK_HAVE_AMX
namespace amx {
extern const OpTable op_table;
void tile_product(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units, float* sums);
}  // namespace amx
#endif

namespace {

struct Isa {
    std::string_view name;
    const OpTable* table;  // null if this binary was built without it
    std::vector<std::string_view> needs;
    bool forced_only = false;
    bool (*computes_rightly)() = nullptr;  // asked before it is used, where the processor has it; null: not doubted
};

#ifdef PENSTOCK_HAVE_GENERIC
constexpr const OpTable* generic_table = &generic::op_table;
#else
constexpr const OpTable* generic_table = nullptr;
#endif
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

#ifdef PENSTOCK_HAVE_AMX_EMULATED
constexpr const OpTable* amx_emulated_table = &amx_emulated::op_table;
#else
constexpr const OpTable* amx_emulated_table = nullptr;
#endif
#ifdef PENSTOCK_HAVE_AMX
constexpr const OpTable* amx_table = &amx::op_table;
bool tiles_compute_rightly() {
    static const bool right = same_products(amx::tile_product, amx_emulated::tile_product);
    return right;
}
#else
constexpr const OpTable* amx_table = nullptr;
constexpr bool (*tiles_compute_rightly)() = nullptr;
#endif

bool has(std::string_view name, std::span<const Feature> features) {
    return std::ranges::any_of(features, [&](const Feature& f) { return f.name == name && f.usable; });
}

std::vector<Isa> ordered_isas() {
    using Names = std::vector<std::string_view>;
    const Names avx2{"avx2", "fma", "f16c"};
    const auto more = [](Names names, const Names& others) {
        names.insert(names.end(), others.begin(), others.end());
        return names;
    };
    const Names avx512 = more(avx2, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"});
    const Names avx512_bf16 = more(avx512, {"avx512_bf16"});
    std::vector<Isa> out{
        {"amx_emulated", amx_emulated_table, avx512, true},
        {"generic", generic_table, {}},
        {"avx2", avx2_table, avx2},
        {"avx512", avx512_table, avx512},
        {"avx512_bf16", avx512_bf16_table, avx512_bf16},
        {"amx", amx_table, more(avx512_bf16, {"amx_tile", "amx_bf16", "os_grants_amx"}), false, tiles_compute_rightly},
    };
    // Processors with AMX compute bfloat16 pairs in vector registers at half the rate of float32 products.
    if (has("amx_tile", cpu_features())) std::swap(out[3], out[4]);
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

}  // namespace

Verdict usable(std::string_view name) {
    Verdict verdict = judge(name, cpu_features());
    if (verdict.refusal != Refusal::none) return verdict;
    const Isa* isa = find(name);
    if (isa->computes_rightly && !isa->computes_rightly())
        return {Refusal::wrong,
                "a test product of instruction set \"" + std::string(name) +
                    "\" differs from what its instructions are documented to compute: this processor, or "
                    "what emulates it, is not to be trusted with it. Choose auto."};
    return verdict;
}

namespace {

// Null if this machine can run none, which whoever loads the library asks first: refusal().
const OpTable* best() {
    const OpTable* out = nullptr;
    for (const Isa& isa : isas())
        if (!isa.forced_only && usable(isa.name).refusal == Refusal::none) out = isa.table;
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
    Verdict verdict = usable(name);
    if (verdict.refusal == Refusal::none) current().store(find(name)->table, std::memory_order_release);
    return verdict;
}

}  // namespace penstock
