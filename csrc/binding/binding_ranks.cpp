// Groups of ranks for Python, and the ops that exchange with the others of a group.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "binding/attention_inputs.h"
#include "binding/bindings.h"
#include "binding/plain_op.h"
#include "ops/attention_plan.h"
#include "packing/packed.h"
#include "program/rank_group.h"

namespace nb = nanobind;

namespace penstock {
namespace {

void require(bool holds, const std::string& otherwise) {
    if (!holds) throw nb::value_error(otherwise.c_str());
}

// What the system refuses is an OSError in Python.
template <class F>
auto asked(F&& system) {
    try {
        return system();
    } catch (const std::system_error& error) {
        PyErr_SetString(PyExc_OSError, error.what());
        throw nb::python_error();
    }
}

void shared_linear(Program& p, const PackedMatrix* matrix, Value x, RankGroup& group, std::int64_t first,
                   std::int64_t total, std::int64_t width, Value bias, Value residual, Value out,
                   const std::string& extent) {
    const std::int64_t own = matrix ? matrix->segments() : 0;
    require(total >= 1 && total <= most_segments && first >= 0 && first + own <= total,
            "segments " + std::to_string(first) + " to " + std::to_string(first + own) + " of " +
                std::to_string(total) + " are no run of up to " + std::to_string(most_segments) + ".");
    require(!matrix || matrix->rows() == width, "the weight and the width of the output differ.");
    p.join(group);
    const Extent e = extent_of(extent);
    p.add({"shared_linear",
           [=, &group](const Frame& f, Worker& w) {
               ops().shared_linear({matrix, f.at<float>(x), f.count(e), &group, first, total, width, f.at<float>(bias),
                                    f.at<float>(residual), f.at<float>(out), f.scratch(), f.kinds(e)},
                                   w);
           },
           {x, bias, residual},
           {out},
           [=](std::int64_t rows) { return matrix ? linear_scratch(&matrix, 1, rows) : 0; },
           e});
}

void gather_columns(Program& p, Value x, std::vector<std::int64_t> widths, RankGroup& group, Value out,
                    const std::string& extent, int first, int end) {
    require(
        static_cast<int>(widths.size()) == group.count(),
        std::to_string(widths.size()) + " widths are given to a group of " + std::to_string(group.count()) + " ranks.");
    require(0 <= first && first <= end && end <= group.count(),
            "ranks " + std::to_string(first) + " to " + std::to_string(end) + " are none of the group's.");
    p.join(group);
    const Extent e = extent_of(extent);
    p.add({"gather_columns",
           [=, widths = std::move(widths), &group](const Frame& f, Worker& w) {
               ops().gather_columns({f.at<float>(x), f.count(e), &group, widths.data(), f.at<float>(out), first, end},
                                    w);
           },
           {x},
           {out},
           nullptr,
           e});
}

void shared_embedding(Program& p, const PackedMatrix* table, std::int64_t width, float scale, std::int64_t first,
                      RankGroup& group, Value out, const std::string& lookup) {
    require(!table || table->cols() == width, "the table and the width of the output differ.");
    require(width * 4 <= group.slot_bytes(), "a row has " + std::to_string(width) + " numbers, and ranks share " +
                                                 std::to_string(group.slot_bytes()) + " bytes at a time.");
    require(first >= 0, "a table's first row is " + std::to_string(first) + ", below 0.");
    p.join(group);
    p.add({"shared_embedding",
           [=, &group, rows = lookup_of(lookup)](const Frame& f, Worker& w) {
               ops().shared_embedding(
                   {table, f.step.*rows, f.step.tokens, width, scale, first, &group, f.at<float>(out)}, w);
           },
           {},
           {out},
           nullptr});
}

// Heads of this rank are [first, first + own) of `heads`, those of all ranks that share contexts with it.
void shared_attention(Program& p, Value query, int plan, std::size_t group, std::int64_t window, bool chunked,
                      const KvBuffers& kv, RankGroup& ranks, std::int64_t heads, std::int64_t first, std::int64_t own,
                      float scale, Value sinks, float cap, Value slopes, Value out) {
    const KvLayout& l = kv.layout;
    require(l.ranks > 1 && ranks.rank() % l.ranks == l.place && ranks.rank() - l.place + l.ranks <= ranks.count(),
            "rank " + std::to_string(ranks.rank()) + " of " + std::to_string(ranks.count()) +
                " is not the one that has part " + std::to_string(l.place) + " of " + std::to_string(l.ranks) +
                " of its contexts.");
    require(first >= 0 && own >= 1 && first + own <= heads,
            "a rank's heads are none of those that share its contexts.");
    require(least_room(l, heads) <= ranks.slot_bytes(), "attention leaves " + std::to_string(least_room(l, heads)) +
                                                            " bytes for a context's turn, and ranks share " +
                                                            std::to_string(ranks.slot_bytes()) +
                                                            " at a time; make the group with larger slots.");
    p.join(ranks);
    p.add({"shared_attention",
           [=, layout = kv.layout, keys = kv.keys, values = kv.values, &ranks](const Frame& f, Worker& w) {
               const AttentionArgs all{f.at<float>(query),
                                       &f.plan(plan),
                                       rows_of(f, group, window, chunked),
                                       layout,
                                       f.at<std::byte>(keys),
                                       f.at<std::byte>(values),
                                       heads,
                                       scale,
                                       f.at<float>(sinks),
                                       cap,
                                       f.at<float>(out),
                                       f.at<float>(slopes)};
               ops().shared_attention({all, &ranks, first, own}, w);
           },
           {query, sinks, slopes},
           {out},
           nullptr});
}

}  // namespace

void bind_shared_ops(nb::class_<Program>& program) {
    program
        .def("shared_linear", &shared_linear, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg(), nb::arg(), nb::arg())
        .def("gather_columns", &gather_columns)
        .def("shared_attention", &shared_attention)
        .def("shared_embedding", &shared_embedding, nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg(), nb::arg());
}

void bind_rank_group(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<RankGroup>(m, "RankGroup", "Ranks that compute one model together.")
        .def(
            "__init__",
            [](RankGroup* self, int descriptor, int rank) {
                new (self) RankGroup(asked([&] { return RankGroup::map(descriptor); }), rank);
            },
            "descriptor"_a, "rank"_a)
        .def_static(
            "make",
            [](int descriptor, int count, std::int64_t slot_bytes) {
                asked([&] { RankGroup::make(descriptor, count, slot_bytes); });
            },
            "descriptor"_a, "count"_a, "slot_bytes"_a)
        .def_prop_ro("rank", &RankGroup::rank)
        .def_prop_ro("count", &RankGroup::count)
        .def_prop_ro("slot_bytes", &RankGroup::slot_bytes)
        .def_prop_ro("stopped", &RankGroup::stopped)
        .def_prop_ro("exchanged_seconds", &RankGroup::exchanged_seconds)
        .def("stop", &RankGroup::stop)
        .def(
            "pass_on",
            [](RankGroup& group, std::uintptr_t own, std::int64_t bytes, int from, std::uintptr_t out) {
                nb::gil_scoped_release release;
                group.check();
                group.pass(reinterpret_cast<const std::byte*>(own), bytes, from, reinterpret_cast<std::byte*>(out));
            },
            "own"_a, "bytes"_a, "from_rank"_a, "out"_a)
        .def(
            "gather",
            [](RankGroup& group, std::uintptr_t own, std::int64_t bytes, std::uintptr_t out) {
                nb::gil_scoped_release release;
                group.check();
                group.gather(reinterpret_cast<const std::byte*>(own), bytes, reinterpret_cast<std::byte*>(out));
            },
            "own"_a, "bytes"_a, "out"_a);
}

}  // namespace penstock
