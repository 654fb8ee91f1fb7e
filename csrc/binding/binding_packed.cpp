// Packed weights for Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/bindings.h"
#include "ops/ops.h"
#include "packing/packed.h"
#include "program/machine_limits.h"

namespace nb = nanobind;

namespace penstock {
namespace {

template <class T>
using Flat = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::int64_t length(std::size_t size) { return static_cast<std::int64_t>(size); }

void require(bool holds, const std::string& otherwise) {
    if (!holds) throw nb::value_error(otherwise.c_str());
}

void require_experts(std::int64_t rows, std::int64_t experts) {
    require(experts > 0 && rows % experts == 0,
            std::to_string(rows) + " rows do not divide into " + std::to_string(experts) + " experts.");
}

template <class A>
void require_shape(const A& array, std::int64_t rows, std::int64_t cols, const char* name) {
    require(length(array.shape(0)) == rows && length(array.shape(1)) == cols,
            std::string(name) + " is not of shape [" + std::to_string(rows) + ", " + std::to_string(cols) + "].");
}

Packed blocks(const std::string& format, std::int64_t rows, std::int64_t cols, Flat<std::uint8_t> data,
              std::int64_t experts) {
    const auto* at = std::ranges::find(block_layouts, format, &BlockLayout::name);
    require(at != std::end(block_layouts), "block format \"" + format + "\" is not known.");
    require_experts(rows, experts);
    require(
        rows > 0 && cols > 0 && cols % at->elements == 0,
        "rows of " + std::to_string(cols) + " values are not whole blocks of " + std::to_string(at->elements) + ".");
    require(length(data.shape(0)) == rows * (cols / at->elements) * at->bytes, "the data have another size.");
    const auto kind = static_cast<BlockFormat>(at - std::begin(block_layouts));
    nb::gil_scoped_release release;
    return pack_blocks(kind, rows, cols, experts, data.data());
}

Packed affine(Table<std::uint8_t> codes, int bits, std::int64_t group, Table<float> scales, int zero,
              std::optional<Table<std::uint8_t>> zeros, std::optional<Table<float>> fractions,
              std::optional<Table<float>> minimums, std::optional<Flat<std::int32_t>> order, std::int64_t experts) {
    const std::int64_t rows = length(codes.shape(0)), cols = length(codes.shape(1));
    require_experts(rows, experts);
    require(group > 0 && cols % group == 0,
            "a group of " + std::to_string(group) + " does not divide rows of " + std::to_string(cols) + ".");
    require_shape(scales, rows, cols / group, "scales");
    if (zeros) require_shape(*zeros, rows, cols / group, "zeros");
    if (fractions) require_shape(*fractions, rows, cols / group, "zeros");
    if (minimums) require_shape(*minimums, rows, cols / group, "minimums");
    if (order) {
        require(length(order->shape(0)) == cols, "order is not of the length of a row.");
        for (std::int64_t i = 0; i < cols; ++i)
            require(order->data()[i] >= 0 && order->data()[i] < cols, "order names an input that does not exist.");
    }
    const AffineSource source{rows,
                              cols,
                              experts,
                              group,
                              bits,
                              zero,
                              codes.data(),
                              scales.data(),
                              zeros ? zeros->data() : nullptr,
                              fractions ? fractions->data() : nullptr,
                              minimums ? minimums->data() : nullptr,
                              order ? order->data() : nullptr};
    nb::gil_scoped_release release;
    return pack_affine(source);
}

Packed codebook(Table<std::uint8_t> codes, Flat<float> table, std::int64_t group, Table<float> scales,
                std::int64_t experts) {
    const std::int64_t rows = length(codes.shape(0)), cols = length(codes.shape(1));
    require_experts(rows, experts);
    require(length(table.shape(0)) == 16, "the table does not have 16 values.");
    require(group > 0 && cols % group == 0,
            "a group of " + std::to_string(group) + " does not divide rows of " + std::to_string(cols) + ".");
    require_shape(scales, rows, cols / group, "scales");
    const CodebookSource source{rows, cols, experts, group, codes.data(), table.data(), scales.data()};
    nb::gil_scoped_release release;
    return pack_codebook(source);
}

struct PlainFormat {
    const char* name;
    PackedKind kind;
    std::int64_t bytes;
};
constexpr PlainFormat plain_formats[] = {{"f32", PackedKind::f32, 4},
                                         {"bf16", PackedKind::bf16, 2},
                                         {"f16", PackedKind::f16, 2},
                                         {"f8_e4m3", PackedKind::f8_e4m3, 1},
                                         {"f8_e5m2", PackedKind::f8_e5m2, 1}};

Packed plain(const std::string& format, std::int64_t rows, std::int64_t cols, Flat<std::uint8_t> data,
             std::optional<Table<float>> scales, std::int64_t tile_rows, std::int64_t tile_cols, std::int64_t experts) {
    const auto* at = std::ranges::find(plain_formats, format, &PlainFormat::name);
    require(at != std::end(plain_formats), "float format \"" + format + "\" is not known.");
    require_experts(rows, experts);
    require(rows > 0 && cols > 0 && length(data.shape(0)) == rows * cols * at->bytes, "the data have another size.");
    require(tile_rows > 0 && tile_cols > 0, "a tile has no rows or no columns.");
    if (scales)
        require_shape(*scales, (rows + tile_rows - 1) / tile_rows, (cols + tile_cols - 1) / tile_cols, "scales");
    const PlainSource source{at->kind,
                             rows,
                             cols,
                             experts,
                             reinterpret_cast<const std::byte*>(data.data()),
                             scales ? scales->data() : nullptr,
                             tile_rows,
                             tile_cols};
    nb::gil_scoped_release release;
    return pack_plain(source);
}

Packed from_memory(nb::bytes header, std::uintptr_t address, nb::object owner) {
    require(header.size() == sizeof(PackedHeader), "a header has " + std::to_string(sizeof(PackedHeader)) + " bytes.");
    PackedHeader parsed;
    std::memcpy(&parsed, header.c_str(), sizeof(parsed));
    std::shared_ptr<void> keep(owner.release().ptr(), [](void* object) {
        nb::gil_scoped_acquire acquire;
        nb::steal(static_cast<PyObject*>(object));
    });
    return std::make_unique<PackedMatrix>(parsed, reinterpret_cast<const std::byte*>(address), std::move(keep));
}

void unpack(const PackedMatrix& matrix, Result<float> out) {
    const std::int64_t rows = matrix.rows() * matrix.experts();
    require_shape(out, rows, matrix.cols(), "out");
    nb::gil_scoped_release release;
    parallel_for(rows, 16, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) unpack_row(matrix, row, out.data() + row * matrix.cols());
    });
}

}  // namespace

void bind_packed(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<PackedMatrix>(m, "PackedMatrix", "A matrix in the layout the linear kernels read.")
        .def_static("pack_blocks", &blocks, "format"_a, "rows"_a, "cols"_a, "data"_a.noconvert(), "experts"_a = 1)
        .def_static("pack_affine", &affine, "codes"_a.noconvert(), "bits"_a, "group"_a, "scales"_a.noconvert(),
                    "zero"_a = 0, "zeros"_a.noconvert() = nb::none(), "fractions"_a.noconvert() = nb::none(),
                    "minimums"_a.noconvert() = nb::none(), "order"_a.noconvert() = nb::none(), "experts"_a = 1)
        .def_static("pack_codebook", &codebook, "codes"_a.noconvert(), "table"_a.noconvert(), "group"_a,
                    "scales"_a.noconvert(), "experts"_a = 1)
        .def_static("pack_plain", &plain, "format"_a, "rows"_a, "cols"_a, "data"_a.noconvert(),
                    "scales"_a.noconvert() = nb::none(), "tile_rows"_a = 1, "tile_cols"_a = 1, "experts"_a = 1)
        .def_static("from_memory", &from_memory, "header"_a, "address"_a, "owner"_a,
                    "A matrix whose data another object keeps in memory.")
        .def("unpack", &unpack, "out"_a.noconvert(), "Its values, [experts * rows, cols] float32.")
        .def("cut", &PackedMatrix::cut, "ends"_a,
             "Sums inputs in segments that end there, each from zero, added in order.")
        .def_prop_ro("segment_unit", &PackedMatrix::segment_unit, "Segments are multiples of it; 0: there is only one.")
        .def_prop_ro("segments",
                     [](const PackedMatrix& p) {
                         std::vector<std::int64_t> ends;
                         for (int i = 0; i < p.segments(); ++i) ends.push_back(p.segment(i).end);
                         return ends;
                     })
        .def_prop_ro("rows", &PackedMatrix::rows, "Rows of one expert.")
        .def_prop_ro("cols", &PackedMatrix::cols)
        .def_prop_ro("experts", &PackedMatrix::experts)
        .def_prop_ro("nbytes", &PackedMatrix::bytes)
        .def_prop_ro("expert_bytes", &PackedMatrix::expert_bytes)
        .def_prop_ro("writable", [](PackedMatrix& p) { return p.writable() != nullptr; })
        .def(
            "expert_address",
            [](const PackedMatrix& p, std::int64_t expert) {
                require(expert >= 0 && expert < p.experts(), "there is no expert " + std::to_string(expert) + ".");
                return reinterpret_cast<std::uintptr_t>(p.expert_data(expert));
            },
            "expert"_a, "Where the data of an expert lie.")
        .def(
            "put_expert",
            [](PackedMatrix& p, std::int64_t expert, std::uintptr_t address) {
                p.put_expert(expert, reinterpret_cast<const std::byte*>(address));
            },
            "expert"_a, "address"_a, "The data of an expert lie there from now on; whoever calls this keeps them.")
        .def_prop_ro("file_bytes", [](const PackedMatrix& p) { return p.header().file_bytes; })
        .def_prop_ro("kind", &PackedMatrix::kind)
        .def_prop_ro("huge_pages", &PackedMatrix::huge_pages)
        .def_prop_ro("header",
                     [](const PackedMatrix& p) {
                         return nb::bytes(reinterpret_cast<const char*>(&p.header()), sizeof(PackedHeader));
                     })
        .def_prop_ro("data", [](nb::handle self) {
            const auto& p = nb::cast<const PackedMatrix&>(self);
            return nb::ndarray<nb::numpy, const std::uint8_t>(p.data(), {static_cast<std::size_t>(p.bytes())}, self);
        });
    m.def(
        "measure_limit",
        [](const std::string& what, std::int64_t bytes) {
            constexpr const char* names[] = {"int8", "bf16", "fp32", "read"};
            const auto* at = std::ranges::find(names, what);
            require(at != std::end(names), "limit \"" + what + "\" is not one of int8, bf16, fp32, read.");
            nb::gil_scoped_release release;
            return measure_limit(static_cast<Limit>(at - std::begin(names)), bytes);
        },
        "what"_a, "bytes"_a = 1 << 30,
        "Operations (or bytes read) a second that all threads reach; 0: no such instruction.");
}

}  // namespace penstock
