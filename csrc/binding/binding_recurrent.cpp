// Ops of a program over what belongs to rows (recurrent states and adapters) and over parts of activations.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "binding/bindings.h"
#include "ops/adapter_table.h"
#include "program/program.h"
#include "vec/dispatch.h"

namespace nb = nanobind;

namespace penstock {
namespace {

using Value = Program::Value;

// Some columns of a value, as ops take them; Program::none for an absent input.
struct Part {
    Value value;
    std::int64_t offset, stride;  // in elements

    Columns at(const Frame& f) const {
        return value == Program::none ? Columns{} : Columns{f.at<const float>(value) + offset, stride};
    }
};

StateRows rows_of(const Frame& f) {
    return {f.step.query_start, f.step.context_len, f.step.state_slot, f.step.rows};
}

void short_conv(Program& p, Part x, Part before, Part after, Value weight, Value bias, std::int64_t taps,
                std::int64_t channels, bool silu, Value state, Value out) {
    if (taps < 2 || taps > 4)
        throw std::invalid_argument("a convolution over " + std::to_string(taps) + " tokens is not served: 2 to 4 are.");
    p.add({"short_conv", [=](const Frame& f, Worker& w) {
               ops().short_conv({x.at(f), before.at(f), after.at(f), f.at<float>(weight), f.at<float>(bias), taps, channels,
                                 silu, rows_of(f), f.at<float>(state), f.at<float>(out)},
                                w);
           },
           {x.value, before.value, after.value, weight, bias, state},
           {out},
           nullptr});
}

void selective_scan(Program& p, Part x, Part dt, Part b, Part c, Part gate, Value a, Value dt_bias, Value skip,
                    bool per_channel, float least, float most, std::int64_t heads, std::int64_t groups,
                    std::int64_t size, std::int64_t states, Value state, Value out) {
    p.add({"selective_scan", [=](const Frame& f, Worker& w) {
               ops().selective_scan({x.at(f), dt.at(f), b.at(f), c.at(f), gate.at(f), f.at<float>(a), f.at<float>(dt_bias),
                                     f.at<float>(skip), per_channel, least, most, heads, groups, size, states, rows_of(f),
                                     f.at<float>(state), f.at<float>(out)},
                                    w);
           },
           {x.value, dt.value, b.value, c.value, gate.value, a, dt_bias, skip, state},
           {out},
           nullptr});
}

void delta_rule(Program& p, Part q, Part k, Part v, Part step, Part beta, Value a, Value bias, float eps,
                std::int64_t heads, std::int64_t key_heads, std::int64_t key_dim, std::int64_t value_dim, bool tiled,
                Value state, Value out) {
    p.add({"delta_rule", [=](const Frame& f, Worker& w) {
               ops().delta_rule({q.at(f), k.at(f), v.at(f), step.at(f), beta.at(f), f.at<float>(a), f.at<float>(bias), eps,
                                 heads, key_heads, key_dim, value_dim, rows_of(f), f.at<float>(state), f.at<float>(out),
                                 tiled},
                                w);
           },
           {q.value, k.value, v.value, step.value, beta.value, a, bias, state},
           {out},
           nullptr});
}

void gated_norm(Program& p, Part x, Part gate, Value weight, std::int64_t size, std::int64_t group, float eps,
                bool gate_first, Value out, bool some_tokens) {
    const Extent e = some_tokens ? Extent::logit_rows : Extent::tokens;
    p.add({"gated_norm", [=](const Frame& f, Worker& w) {
               ops().gated_norm({x.at(f), gate.at(f), f.at<float>(weight), f.count(e), size, group, eps, gate_first,
                                 f.at<float>(out)},
                                w);
           },
           {x.value, gate.value, weight},
           {out},
           nullptr});
}

void multiply(Program& p, Value x, Part y, std::int64_t size, Value out, bool some_tokens) {
    const Extent e = some_tokens ? Extent::logit_rows : Extent::tokens;
    p.add({"multiply", [=](const Frame& f, Worker& w) {
               ops().multiply({f.at<float>(x), y.at(f), f.count(e), size, f.at<float>(out)}, w);
           },
           {x, y.value},
           {out},
           nullptr});
}

void weighted_sum(Program& p, Value base, const std::vector<Value>& x, Part weights, std::int64_t size, Value out,
                  bool some_tokens) {
    const Extent e = some_tokens ? Extent::logit_rows : Extent::tokens;
    if (x.size() > WeightedSumArgs::most) throw nb::value_error("too many terms in a weighted sum.");
    std::vector<Value> inputs = x;
    inputs.insert(inputs.end(), {base, weights.value});
    p.add({"weighted_sum", [=](const Frame& f, Worker& w) {
               WeightedSumArgs args{f.at<float>(base), {}, static_cast<int>(x.size()), weights.at(f), f.count(e), size,
                                    f.at<float>(out)};
               for (std::size_t i = 0; i < x.size(); ++i) args.x[i] = f.at<float>(x[i]);
               ops().weighted_sum(args, w);
           },
           std::move(inputs),
           {out},
           nullptr});
}

void statistical_topk(Program& p, Part x, std::int64_t size, float deviations, Value out, bool some_tokens) {
    const Extent e = some_tokens ? Extent::logit_rows : Extent::tokens;
    p.add({"statistical_topk", [=](const Frame& f, Worker& w) {
               ops().statistical_topk({x.at(f), f.count(e), size, deviations, f.at<float>(out)}, w);
           },
           {x.value},
           {out},
           nullptr});
}

void adapter(Program& p, Value x, const AdapterTable& table, std::int64_t width, std::int64_t offset, Value out,
             bool some_tokens) {
    const Extent e = some_tokens ? Extent::logit_rows : Extent::tokens;
    p.add({"adapter", [=, &table](const Frame& f, Worker& w) {
               ops().adapter({f.at<float>(x), &table, f.step.query_start, f.step.adapter_slot,
                              some_tokens ? f.step.logit_index : nullptr, f.step.rows, f.count(e), width, offset,
                              f.at<float>(out), reinterpret_cast<float*>(f.scratch())},
                             w);
           },
           {x, out},
           {out},
           [&table](std::int64_t rows) { return rows * table.most_rank * static_cast<std::int64_t>(sizeof(float)); },
           e});
}

FloatType float_type(const std::string& name) {
    if (name == "float32") return FloatType::f32;
    if (name == "bfloat16") return FloatType::bf16;
    if (name == "float16") return FloatType::f16;
    throw nb::value_error(("adapters of type \"" + name + "\" are not served: float32, bfloat16, float16 are.").c_str());
}

}  // namespace

void bind_recurrent(nb::module_& m, nb::class_<Program>& program) {
    using namespace nb::literals;
    nb::class_<Part>(m, "Part", "Some columns of a value.").def(
        "__init__", [](Part* self, Value value, std::int64_t offset, std::int64_t stride) {
            new (self) Part{value, offset, stride};
        });
    nb::class_<AdapterTable>(m, "AdapterTable", "The low-rank adapters of one weight, by slot.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), "slots"_a, "inputs"_a, "outputs"_a,
             "most_rank"_a)
        .def("set",
             [](AdapterTable& table, std::int64_t slot, std::uintptr_t down, std::uintptr_t up, std::int64_t rank,
                float scale, const std::string& type) {
                 table.set(slot, {reinterpret_cast<const void*>(down), reinterpret_cast<const void*>(up), rank, scale,
                                  float_type(type)});
             });
    program.def("short_conv", &short_conv)
        .def("selective_scan", &selective_scan)
        .def("delta_rule", &delta_rule)
        .def("gated_norm", &gated_norm)
        .def("multiply", &multiply)
        .def("weighted_sum", &weighted_sum)
        .def("statistical_topk", &statistical_topk)
        .def("adapter", &adapter);
}

}  // namespace penstock
