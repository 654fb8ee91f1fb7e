// Decode steps for Python: scheduled tokens are read where they lie, tables are given by address.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "binding/bindings.h"
#include "program/decode_rows.h"

namespace nb = nanobind;

namespace penstock {
namespace {

// Where a field lies in `core.protocol.ScheduledTokens`, a named tuple; `layout` in Python compares them.
enum Field : Py_ssize_t { slot, start, tokens, prompt_tokens, draft_tokens, sample, new_blocks, fields };
constexpr const char* field_names[] = {"slot",         "start",  "tokens",    "prompt_tokens",
                                       "draft_tokens", "sample", "new_blocks"};

PyObject* item(PyObject* tuple, Py_ssize_t index) {
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) <= index)
        throw nb::type_error("scheduled tokens are tuples of a slot, its tokens and its new blocks.");
    return PyTuple_GetItem(tuple, index);
}

std::int64_t number(PyObject* value) {
    const long long found = PyLong_AsLongLong(value);
    if (found == -1 && PyErr_Occurred()) throw nb::python_error();
    return found;
}

// One token that is known, and its logits are wanted.
bool decodes(PyObject* span) {
    PyObject* const ids = item(span, tokens);
    return PyTuple_Check(ids) && PyTuple_Size(ids) == 1 && item(span, sample) == Py_True &&
           number(PyTuple_GetItem(ids, 0)) >= 0;
}

std::int64_t fill(DecodeRows& step, nb::tuple spans, bool fast) {
    const auto rows = static_cast<Py_ssize_t>(spans.size());
    if (rows == 0 || rows > step.most()) return 0;
    for (Py_ssize_t r = 0; r < rows; ++r)
        if (!decodes(PyTuple_GetItem(spans.ptr(), r))) return 0;
    step.begin(rows);
    for (Py_ssize_t r = 0; r < rows; ++r) {
        PyObject* const span = PyTuple_GetItem(spans.ptr(), r);
        const std::int64_t at = number(item(span, slot));
        PyObject* const groups = item(span, new_blocks);
        if (!PyTuple_Check(groups)) throw nb::type_error("new blocks are a tuple for each cache group.");
        for (Py_ssize_t g = 0; g < PyTuple_Size(groups); ++g) {
            PyObject* const blocks = PyTuple_GetItem(groups, g);
            for (Py_ssize_t b = 0; PyTuple_Check(blocks) && b < PyTuple_Size(blocks); ++b)
                step.append(static_cast<std::size_t>(g), at, number(PyTuple_GetItem(blocks, b)));
        }
        step.add({at, number(item(span, start)), number(item(item(span, tokens), 0)),
                  number(item(span, prompt_tokens)) > 0});
    }
    step.finish(fast);
    return rows;
}

DecodeRows* make(const std::vector<std::pair<std::uintptr_t, std::uintptr_t>>& tables, std::int64_t slots,
                 std::int64_t width, std::int64_t block_size) {
    std::vector<DecodeRows::Table> given;
    for (const auto& [blocks, used] : tables)
        given.push_back({reinterpret_cast<std::int32_t*>(blocks), reinterpret_cast<std::int64_t*>(used)});
    return new DecodeRows(std::move(given), slots, width, block_size);
}

}  // namespace

void bind_decode(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<DecodeRows>(m, "DecodeRows", "A step in which every row computes one token and wants its logits.")
        .def(nb::new_(&make), "tables"_a, "slots"_a, "width"_a, "block_size"_a,
             "tables: addresses of (blocks [slots, width] int32, used [slots] int64), one pair a cache group.")
        .def("fill", &fill, "spans"_a, "fast"_a,
             "Enters scheduled tokens and their new blocks; how many rows, 0 where it is another kind of step.")
        .def(
            "run", [](const DecodeRows& step, Program& body, Program& head) { step.run(body, head); }, "body"_a,
            "head"_a, nb::call_guard<nb::gil_scoped_release>(), "The forward pass, and logits of its results.");
    nb::list names;
    for (const char* name : field_names) names.append(name);
    m.attr("scheduled_fields") = nb::tuple(names);
}

}  // namespace penstock
