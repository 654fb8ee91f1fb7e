// Parts of values, adapters, and the ops of a program that take any number of values or an adapter's table.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "binding/bindings.h"
#include "binding/plain_op.h"
#include "ops/adapter_table.h"
#include "packing/packed.h"
#include "program/program.h"
#include "vec/dispatch.h"

namespace nb = nanobind;

namespace penstock {
namespace {

void weighted_sum(Program& p, Value base, const std::vector<Value>& x, Part weights, std::int64_t size, Value out,
                  const std::string& extent) {
    const Extent e = extent_of(extent);
    if (x.size() > WeightedSumArgs::most) throw nb::value_error("too many terms in a weighted sum.");
    std::vector<Value> inputs = x;
    inputs.insert(inputs.end(), {base, weights.value});
    p.add({"weighted_sum",
           [=](const Frame& f, Worker& w) {
               WeightedSumArgs args{f.at<float>(base), {}, static_cast<int>(x.size()), weights.at(f), f.count(e), size,
                                    f.at<float>(out)};
               for (std::size_t i = 0; i < x.size(); ++i) args.x[i] = f.at<float>(x[i]);
               ops().weighted_sum(args, w);
           },
           std::move(inputs),
           {out},
           nullptr});
}

void adapter(Program& p, Value x, const AdapterTable& table, std::int64_t width, std::int64_t offset, Value bias,
             Value residual, Value out, const std::string& extent) {
    const Extent e = extent_of(extent);
    p.add({"adapter",
           [=, &table](const Frame& f, Worker& w) {
               const TokenAdapters of = f.adapters(e);
               ops().adapter({f.at<float>(x), table.inputs, &table, of.slot, of.scale, of.count, of.index, f.count(e),
                              width, offset, f.at<float>(out), reinterpret_cast<float*>(f.scratch()), 1, 1, nullptr,
                              f.at<float>(bias), f.at<float>(residual)},
                             w);
           },
           {x, out, bias, residual},
           {out},
           [&table](std::int64_t rows) { return adapter_scratch(table.most_rank, rows); },
           e});
}

// Adapters of a table: what a number's row is changed by.
void table_adapter(Program& p, const AdapterTable& table, float scale, Value out) {
    p.add({"table_adapter",
           [=, &table](const Frame& f, Worker& w) {
               TokenAdapters of = f.adapters(Extent::tokens);
               AdapterArgs args{nullptr,       0,        &table,           of.slot,
                                of.scale,      of.count, of.index,         f.count(Extent::tokens),
                                table.outputs, 0,        f.at<float>(out), reinterpret_cast<float*>(f.scratch())};
               args.numbers = f.step.token_ids;
               args.factor = scale;
               ops().adapter(args, w);
           },
           {out},
           {out},
           [&table](std::int64_t rows) { return adapter_scratch(table.most_rank, rows); },
           Extent::tokens});
}

FloatType float_type(const std::string& name) {
    if (name == "float32") return FloatType::f32;
    if (name == "bfloat16") return FloatType::bf16;
    if (name == "float16") return FloatType::f16;
    throw nb::value_error(
        ("adapters of type \"" + name + "\" are not served: float32, bfloat16, float16 are.").c_str());
}

}  // namespace

void bind_adapters(nb::module_& m, nb::class_<Program>& program) {
    using namespace nb::literals;
    nb::class_<Part>(m, "Part", "Some columns of a value.")
        .def("__init__", [](Part* self, Value value, std::int64_t offset, std::int64_t stride) {
            new (self) Part{value, offset, stride};
        });
    nb::class_<AdapterTable>(m, "AdapterTable", "The low-rank adapters of one weight, by slot.")
        .def(nb::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>(), "slots"_a, "inputs"_a,
             "outputs"_a, "most_rank"_a, "experts"_a)
        .def("set", [](AdapterTable& table, std::int64_t slot, std::uintptr_t down, std::uintptr_t up,
                       std::int64_t rank, float scale, const std::string& type, std::uintptr_t columns) {
            table.set(slot, {reinterpret_cast<const void*>(down), reinterpret_cast<const void*>(up), rank, scale,
                             float_type(type), reinterpret_cast<const float*>(columns)});
        });
    nb::class_<AdapterUse>(m, "AdapterUse", "The adapters of some columns of a product.")
        .def("__init__", [](AdapterUse* self, const AdapterTable& table, std::int64_t offset) {
            new (self) AdapterUse{&table, offset};
        });
    program.def("weighted_sum", &weighted_sum).def("adapter", &adapter).def("table_adapter", &table_adapter);
}

}  // namespace penstock
