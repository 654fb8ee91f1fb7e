// Programs for Python: values are small integers, memory is given by address and checked by the caller.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "binding/attention_inputs.h"
#include "binding/bindings.h"
#include "binding/plain_op.h"
#include "ops/adapter_table.h"
#include "ops/kv_layout.h"
#include "packing/packed.h"
#include "program/program.h"
#include "program/rank_group.h"
#include "vec/dispatch.h"

namespace nb = nanobind;

namespace penstock {
namespace {

using Parts = std::vector<const PackedMatrix*>;
using Uses = std::vector<AdapterUse>;

std::int64_t most_rank(const Uses& uses) {
    std::int64_t most = 0;
    for (const AdapterUse& use : uses) most = std::max(most, use.table->most_rank);
    return most;
}

template <class T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

std::int64_t length(std::size_t size) { return static_cast<std::int64_t>(size); }

// Steps are filled in from Python between runs; addresses are of arrays that live until the run is over.
struct BoundInputs : StepInputs {
    void set(std::int64_t new_tokens, std::int64_t new_rows, std::uintptr_t ids, std::uintptr_t places,
             std::uintptr_t starts, std::uintptr_t lengths) {
        tokens = new_tokens;
        rows = new_rows;
        token_ids = pointer<const std::int64_t>(ids);
        positions = pointer<const std::int64_t>(places);
        query_start = pointer<const std::int32_t>(starts);
        context_len = pointer<const std::int32_t>(lengths);
    }
    void set_group(std::size_t group, std::uintptr_t table, std::int64_t width, std::uintptr_t slot,
                   std::uintptr_t lengths) {
        if (groups.size() <= group) groups.resize(group + 1);
        groups[group] = {pointer<const std::int32_t>(table), width, pointer<const std::int64_t>(slot),
                         pointer<const std::int32_t>(lengths)};
    }
    void set_states(std::uintptr_t states, std::uintptr_t after) {
        state_slot = pointer<const std::int64_t>(states);
        state_after = pointer<const std::int64_t>(after);
    }
    void set_adapters(std::uintptr_t slots, std::uintptr_t scales, std::int64_t count) {
        if (count < 0 || count > AdapterArgs::most)
            throw nb::value_error(("a token has up to " + std::to_string(AdapterArgs::most) + " adapters, not " +
                                   std::to_string(count) + ".")
                                      .c_str());
        adapter_slot = pointer<const std::int64_t>(slots);
        adapter_scale = pointer<const float>(scales);
        adapters = count;
    }
    void set_masks(std::uintptr_t kinds, std::uintptr_t ranges) {
        masks = pointer<const MaskKind>(kinds);
        spans = pointer<const std::int32_t>(ranges);
    }
    void set_injected(std::int64_t count, std::uintptr_t places, std::uintptr_t values) {
        injected = count;
        injected_rows = pointer<const std::int64_t>(places);
        injected_values = pointer<const float>(values);
    }
    void set_types(std::uintptr_t types) { token_types = pointer<const std::int64_t>(types); }
    // Level fast: the first prompt_tokens[r] tokens of row r are of kind prompt; logit rows never are.
    void set_kinds(std::uintptr_t prompt_tokens) {
        const auto* const prompts = pointer<const std::int32_t>(prompt_tokens);
        kind_rows.clear();
        for (const bool generated : {false, true}) {
            for (std::int64_t r = 0; r < rows; ++r) {
                const std::int32_t middle = query_start[r] + prompts[r];
                for (std::int32_t t = generated ? middle : query_start[r],
                                  end = generated ? query_start[r + 1] : middle;
                     t < end; ++t)
                    kind_rows.push_back(t);
            }
            if (!generated) token_kinds.prompt = length(kind_rows.size());
        }
        if (length(kind_rows.size()) != tokens)
            throw nb::value_error("prompt tokens and rows do not make up the step.");
        token_kinds.rows = kind_rows.data();
        kinds = &token_kinds;
        logit_kinds = &none_of_prompt;
    }
    void set_all_generated() { kinds = logit_kinds = &none_of_prompt; }
    void set_logits(std::int64_t count, std::uintptr_t index) {
        logit_rows = count;
        logit_index = pointer<const std::int64_t>(index);
    }

private:
    static constexpr RowKinds none_of_prompt{nullptr, 0};
    std::vector<std::int32_t> kind_rows;
    RowKinds token_kinds{};
};

void embedding(Program& p, const PackedMatrix& table, float scale, Value out, const std::string& lookup) {
    p.add({"embedding",
           [=, &table, rows = lookup_of(lookup)](const Frame& f, Worker& w) {
               ops().embedding({&table, f.step.*rows, f.step.tokens, scale, f.at<float>(out)}, w);
           },
           {},
           {out},
           nullptr});
}

// Scratch of an op and what follows it there, each from a multiple of 64 bytes on.
std::int64_t whole(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The products of a gated layer, changed by adapters, and then their activations: what `linear` does in one pass.
void adapted_gates(LinearArgs args, const Uses& uses, const TokenAdapters& of, std::byte* products, Worker& w) {
    float* const out = args.out;
    const Activation act = args.activation;
    std::int64_t width = 0;
    for (int i = 0; i < args.num_parts; ++i) width += args.parts[i]->rows();
    args.activation = Activation::none;
    args.out = reinterpret_cast<float*>(products);
    ops().linear(args, w);
    auto* const low = reinterpret_cast<float*>(products + whole(args.tokens * width * 4));
    for (const AdapterUse& use : uses)
        ops().adapter({args.x, args.parts[0]->cols(), use.table, of.slot, of.scale, of.count, of.index, args.tokens,
                       width, use.offset, args.out, low, 1, 1, nullptr, args.bias},
                      w);
    ops().gate_up({args.out, args.tokens, width / 2, act, args.alpha, args.limit, out}, w);
}

void linear(Program& p, Parts parts, Value x, Value bias, Value residual, int activation, float alpha, float limit,
            Value out, const std::string& extent, Uses uses) {
    const Extent e = extent_of(extent);
    const auto act = static_cast<Activation>(activation);
    auto own = [parts](std::int64_t rows) {
        return whole(linear_scratch(parts.data(), static_cast<int>(parts.size()), rows));
    };
    std::int64_t width = 0;
    for (const PackedMatrix* part : parts) width += part->rows();
    auto scratch = [own, width, rank = most_rank(uses)](std::int64_t rows) {
        return own(rows) + (rank ? whole(rows * width * 4) + adapter_scratch(rank, rows) : 0);
    };
    p.add({"linear",
           [=, parts = std::move(parts), uses = std::move(uses)](const Frame& f, Worker& w) {
               const LinearArgs args{parts.data(),
                                     static_cast<int>(parts.size()),
                                     f.at<float>(x),
                                     f.count(e),
                                     f.at<float>(bias),
                                     f.at<float>(residual),
                                     act,
                                     alpha,
                                     limit,
                                     f.at<float>(out),
                                     f.scratch(),
                                     f.kinds(e)};
               if (uses.empty() || !f.step.adapter_slot) return ops().linear(args, w);
               adapted_gates(args, uses, f.adapters(e), f.scratch() + own(f.count(e)), w);
           },
           {x, bias, residual},
           {out},
           std::move(scratch),
           e});
}

// A rank's run of experts, and what the slots of a token take of the memory that ranks share.
void check_shared(Program& p, RankGroup& group, std::int64_t first, std::int64_t count, std::int64_t token_bytes) {
    constexpr std::int64_t most = 1 << 16;
    if (first < 0 || count < 1 || first + count > most)
        throw nb::value_error(("a rank has experts " + std::to_string(first) + " to " + std::to_string(first + count) +
                               "; it has to have one at least, below " + std::to_string(most) + ".")
                                  .c_str());
    if (token_bytes > group.slot_bytes())
        throw nb::value_error(("a token's experts give " + std::to_string(token_bytes) + " bytes, and ranks share " +
                               std::to_string(group.slot_bytes()) + " at a time; make the group with larger slots.")
                                  .c_str());
    p.join(group);
}

void experts(Program& p, Value x, Value weights, Value ids, std::int64_t top_k, const PackedMatrix& gate,
             const PackedMatrix& up, const PackedMatrix& down, Value gate_up_bias, Value down_bias, Value residual,
             int activation, float alpha, float limit, Value out, const std::string& extent, Uses gate_up_uses,
             Uses down_uses, RankGroup* group, std::int64_t first, std::uintptr_t table, std::uintptr_t counts,
             std::int64_t num_experts) {
    if (group) check_shared(p, *group, first, gate.experts(), top_k * down.rows() * 4);
    if (table && (!group || group->count() < 2 || num_experts < gate.experts()))
        throw nb::value_error("a table of experts is for a group of several ranks, and names all experts.");
    const ExpertPlaces places{reinterpret_cast<std::int32_t*>(table), reinterpret_cast<std::int64_t*>(counts),
                              num_experts};
    const Extent e = extent_of(extent);
    const auto act = static_cast<Activation>(activation);
    const std::int64_t rank = std::max(most_rank(gate_up_uses), most_rank(down_uses));
    p.add({"experts",
           [=, &gate, &up, &down, of_gate_up = std::move(gate_up_uses), of_down = std::move(down_uses)](const Frame& f,
                                                                                                        Worker& w) {
               ops().experts({f.at<float>(x),
                              f.at<float>(weights),
                              f.at<std::int64_t>(ids),
                              f.count(e),
                              top_k,
                              &gate,
                              &up,
                              &down,
                              f.at<float>(gate_up_bias),
                              f.at<float>(down_bias),
                              f.at<float>(residual),
                              act,
                              alpha,
                              limit,
                              f.at<float>(out),
                              f.scratch(),
                              f.step.kinds,
                              of_gate_up,
                              of_down,
                              f.adapters(e),
                              group,
                              first,
                              places},
                             w);
           },
           {x, weights, ids, gate_up_bias, down_bias, residual},
           {out},
           [=, &gate, &up, &down](std::int64_t rows) { return experts_scratch(gate, up, down, rows, top_k, rank); },
           e});
}

void position_scales(Program& p, float length, float weight, std::int64_t offset, Value out) {
    p.add({"position_scales",
           [=](const Frame& f, Worker& w) {
               ops().position_scales({f.step.positions, f.step.tokens, offset, length, weight, f.at<float>(out)}, w);
           },
           {},
           {out},
           nullptr});
}

void take_rows(Program& p, Value x, std::int64_t size, Value out) {
    p.add({"take_rows",
           [=](const Frame& f, Worker& w) {
               ops().take_rows({f.at<float>(x), f.step.logit_index, f.step.logit_rows, size, f.at<float>(out)}, w);
           },
           {x},
           {out},
           nullptr});
}

// x takes in the step's rows of a level: the first replaces, others are added.
void inject(Program& p, Value x, std::int64_t level, std::int64_t size) {
    p.add({"inject",
           [=](const Frame& f, Worker& w) {
               const float* const values = f.step.injected_values + level * f.step.injected * size;
               ops().inject({f.at<float>(x), f.step.injected_rows, values, f.step.injected, size, level > 0}, w);
           },
           {x},
           {x},
           nullptr});
}

void rope_tables(Program& p, Value frequencies, std::int64_t half, float factor, Value axes, Value cos, Value sin) {
    p.add({"rope_tables",
           [=](const Frame& f, Worker& w) {
               ops().rope_tables({f.step.positions, f.at<float>(frequencies), f.step.tokens, half, factor,
                                  f.at<float>(cos), f.at<float>(sin), f.at<std::int32_t>(axes)},
                                 w);
           },
           {frequencies, axes},
           {cos, sin},
           nullptr});
}

void rope_write(Program& p, Value qkv, Value cos, Value sin, std::int64_t rotary_dim, std::size_t group,
                std::int64_t heads, Value qk_norm, float eps, int norm, const KvBuffers& kv, Value query) {
    const auto how = static_cast<HeadNorm>(norm);
    p.add({"rope_write",
           [=, layout = kv.layout, keys = kv.keys, values = kv.values](const Frame& f, Worker& w) {
               ops().rope_write(
                   {f.at<float>(qkv), f.at<float>(cos), f.at<float>(sin), rotary_dim, f.step.groups[group].slot,
                    f.step.tokens, heads, f.at<float>(qk_norm), eps, layout, f.at<std::byte>(keys),
                    f.at<std::byte>(values), f.at<float>(query), how, reinterpret_cast<float*>(f.scratch())},
                   w);
           },
           {qkv, cos, sin, qk_norm},
           {query},
           [](std::int64_t rows) { return rows * std::int64_t{2 * sizeof(float)}; }});
}

// The rotary tables of an op; none where `rotary_dim` is 0.
struct BoundRotation {
    Value cos, sin;
    std::int64_t size;
    bool interleaved;
    Rotation at(const Frame& f) const { return {f.at<float>(cos), f.at<float>(sin), size, interleaved}; }
};

void latent_write(Program& p, Value x, Value norm, float eps, Value cos, Value sin, std::int64_t rotary_dim,
                  bool interleaved, std::size_t group, const KvBuffers& kv) {
    const BoundRotation rotation{cos, sin, rotary_dim, interleaved};
    p.add({"latent_write",
           [=, layout = kv.layout, keys = kv.keys](const Frame& f, Worker& w) {
               ops().latent_write({f.at<float>(x), f.at<float>(norm), eps, rotation.at(f), f.step.groups[group].slot,
                                   f.step.tokens, layout, f.at<std::byte>(keys)},
                                  w);
           },
           {x, norm, cos, sin},
           {},
           nullptr});
}

void head_linear(Program& p, Value x, const PackedMatrix& weight, Value cos, Value sin, std::int64_t rotary_dim,
                 bool interleaved, Value out, const std::string& extent, Uses uses) {
    const Extent e = extent_of(extent);
    const BoundRotation rotation{cos, sin, rotary_dim, interleaved};
    const std::int64_t rank = most_rank(uses), heads = weight.experts();
    p.add({"head_linear",
           [=, &weight, uses = std::move(uses)](const Frame& f, Worker& w) {
               ops().head_linear({f.at<float>(x), &weight, f.count(e), rotation.at(f), f.at<float>(out), f.scratch()},
                                 w);
               const TokenAdapters of = f.adapters(e);
               for (const AdapterUse& use : uses)
                   ops().adapter({f.at<float>(x), weight.cols() + rotary_dim, use.table, of.slot, of.scale, of.count,
                                  of.index, f.count(e), weight.rows() + rotary_dim, use.offset, f.at<float>(out),
                                  reinterpret_cast<float*>(f.scratch()), heads},
                                 w);
           },
           {x, cos, sin},
           {out},
           [=, &weight](std::int64_t rows) {
               return std::max(head_linear_scratch(weight, rotary_dim > 0, rows), adapter_scratch(rank, rows * heads));
           },
           e});
}

// `room`: bytes that ranks leave for each other at a time, where contexts lie with several.
int plan_attention(Program& p, std::size_t group, std::int64_t window, bool chunked, const KvLayout& layout,
                   std::int64_t heads, std::int64_t room) {
    const int plan = p.add_plan();
    p.add({"plan_attention",
           [=](const Frame& f, Worker& w) {
               AttentionRows rows = rows_of(f, group, window, chunked);
               rows.room = room;
               ops().attention_plan(rows, layout, heads, f.plan(plan), w);
           },
           {},
           {},
           nullptr});
    return plan;
}

void attention(Program& p, Value query, int plan, std::size_t group, std::int64_t window, bool chunked,
               const KvBuffers& kv, std::int64_t heads, float scale, Value sinks, float cap, Value slopes, Value out) {
    p.add({"attention",
           [=, layout = kv.layout, keys = kv.keys, values = kv.values](const Frame& f, Worker& w) {
               ops().attention({f.at<float>(query), &f.plan(plan), rows_of(f, group, window, chunked), layout,
                                f.at<std::byte>(keys), f.at<std::byte>(values), heads, scale, f.at<float>(sinks), cap,
                                f.at<float>(out), f.at<float>(slopes)},
                               w);
           },
           {query, sinks, slopes},
           {out},
           nullptr});
}

// A figure of each op beside its name.
std::vector<std::pair<std::string, double>> by_op(const Program& program, const std::vector<double>& figures) {
    std::vector<std::pair<std::string, double>> out;
    for (std::size_t i = 0; i < figures.size(); ++i) out.emplace_back(program.ops()[i].name, figures[i]);
    return out;
}

constexpr const char* kv_type_names[] = {"float32", "bfloat16", "float16", "fp8", "int8", "int4"};

KvLayout make_layout(const std::string& type, std::int64_t block_size, std::int64_t heads, std::int64_t key_dim,
                     std::int64_t value_dim, bool latent) {
    for (int i = 0; i < 6; ++i)
        if (type == kv_type_names[i])
            return kv_layout(static_cast<KvType>(i), block_size, heads, key_dim, value_dim, latent);
    throw nb::value_error(
        ("KV type \"" + type + "\" is not one of float32, bfloat16, float16, fp8, int8, int4.").c_str());
}

KvLayout layout_of_rank(KvLayout layout, std::int64_t place, std::int64_t ranks) {
    if (ranks < 1 || place < 0 || place >= ranks || (ranks > 1 && layout.block_size % kv_run != 0))
        throw nb::value_error(("rank " + std::to_string(place) + " of " + std::to_string(ranks) + " cannot have " +
                               std::to_string(layout.block_size) + " positions of a block: several have runs of " +
                               std::to_string(kv_run) + ".")
                                  .c_str());
    layout.place = place;
    layout.ranks = ranks;
    return layout;
}

}  // namespace

void bind_program(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<KvLayout>(m, "KvLayout", "How keys and values lie in a block.")
        .def(nb::new_(&make_layout), "type"_a, "block_size"_a, "heads"_a, "key_dim"_a, "value_dim"_a,
             "latent"_a = false)
        .def_ro("block_size", &KvLayout::block_size)
        .def_ro("heads", &KvLayout::heads)
        .def_ro("key_dim", &KvLayout::key_dim)
        .def_ro("value_dim", &KvLayout::value_dim)
        .def_ro("latent", &KvLayout::latent)
        .def_ro("key_block_bytes", &KvLayout::key_block_bytes)
        .def_ro("value_block_bytes", &KvLayout::value_block_bytes)
        .def("of_rank", &layout_of_rank, "place"_a, "ranks"_a,
             "The same of blocks that lie with several ranks, block_size being what each has of one.")
        .def_prop_ro("type", [](const KvLayout& l) { return kv_type_names[static_cast<int>(l.type)]; })
        .def_prop_ro("key_tile_bytes", [](const KvLayout& l) { return key_tile_bytes(l); })
        .def_prop_ro("key_code_bytes", [](const KvLayout& l) { return key_code_bytes(l); });
    nb::class_<KvBuffers>(m, "KvBuffers")
        .def("__init__", [](KvBuffers* self, const KvLayout& layout, Value keys, Value values) {
            new (self) KvBuffers{layout, keys, values};
        });
    nb::class_<BoundInputs>(m, "StepInputs", "What a run works on.")
        .def(nb::init<>())
        .def("set", &BoundInputs::set, "tokens"_a, "rows"_a, "token_ids"_a, "positions"_a, "query_start"_a,
             "context_len"_a)
        .def("set_group", &BoundInputs::set_group, "group"_a, "block_table"_a, "table_width"_a, "slot"_a,
             "context_len"_a = 0)
        .def("set_states", &BoundInputs::set_states, "state_slot"_a, "state_after"_a)
        .def("set_adapters", &BoundInputs::set_adapters, "slots"_a, "scales"_a, "count"_a)
        .def("set_masks", &BoundInputs::set_masks, "masks"_a, "spans"_a)
        .def("set_injected", &BoundInputs::set_injected, "count"_a, "rows"_a, "values"_a)
        .def("set_types", &BoundInputs::set_types, "token_types"_a)
        .def("set_kinds", &BoundInputs::set_kinds, "prompt_tokens"_a)
        .def("set_all_generated", &BoundInputs::set_all_generated)
        .def("set_logits", &BoundInputs::set_logits, "logit_rows"_a, "logit_index"_a);
    nb::class_<Program> program(m, "Program", "A recorded list of ops over an arena.");
#define PENSTOCK_PLAIN(name, Args) bind_plain_op<&OpTable::name, Args>(program, #name);
#define PENSTOCK_OTHER(name, Args)
    PENSTOCK_MODEL_OPS(PENSTOCK_PLAIN, PENSTOCK_OTHER, PENSTOCK_OTHER)
#undef PENSTOCK_PLAIN
#undef PENSTOCK_OTHER
    bind_adapters(m, program);
    bind_shared_ops(program);
    program.def(nb::init<>())
        .def("activation", [](Program& p, std::int64_t row_bytes,
                              const std::string& extent) { return p.activation(row_bytes, extent_of(extent)); })
        .def("constant", [](Program& p, std::uintptr_t memory) { return p.constant(pointer<const void>(memory)); })
        .def("keep", &Program::keep)
        .def("embedding", &embedding)
        .def("linear", &linear)
        .def("experts", &experts, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), "group"_a.none() = nb::none(), "first"_a = 0, "table"_a = 0, "counts"_a = 0,
             "num_experts"_a = 0)
        .def("position_scales", &position_scales)
        .def("take_rows", &take_rows)
        .def("inject", &inject)
        .def("rope_tables", &rope_tables)
        .def("rope_write", &rope_write)
        .def("latent_write", &latent_write)
        .def("head_linear", &head_linear)
        .def("plan_attention", &plan_attention, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), "room"_a = 0)
        .def("attention", &attention)
        .def("finish", &Program::finish, "max_tokens"_a, "max_logit_rows"_a)
        .def(
            "run", [](Program& p, const BoundInputs& step) { p.run(step); }, nb::call_guard<nb::gil_scoped_release>())
        .def("measure", &Program::measure, "From now on every run adds to `seconds` and `waited`.")
        .def_prop_ro("seconds", [](const Program& p) { return by_op(p, p.seconds()); })
        .def_prop_ro("waited", [](const Program& p) { return by_op(p, p.waited()); })
        .def_prop_ro("num_ops", &Program::num_ops)
        .def_prop_ro("arena_bytes", &Program::arena_bytes)
        .def("address",
             [](const Program& p, Value value) { return reinterpret_cast<std::uintptr_t>(p.address(value)); })
        .def("floats", [](nb::handle self, Value value, std::size_t rows, std::size_t width) {
            auto& p = nb::cast<Program&>(self);
            return nb::ndarray<nb::numpy, float>(p.address(value), {rows, width}, self);
        });
}

}  // namespace penstock
