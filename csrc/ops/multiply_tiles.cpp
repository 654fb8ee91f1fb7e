// Products in matrix units: weights become bfloat16 tiles a span at a time and meet all rows of a task while they are
// in the first-level cache. Sums run over spans, in each over units of 32 inputs, whatever the number of rows.
#include <algorithm>

#include "ops/multiply.h"
#include "ops/segment_sums.h"
#include "ops/weight_tiles.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::int64_t row_bytes = 2 * span_inputs;  // of a row's span

// A task's rows, cut into blocks of one or two tiles, all of the same height: tiles are set up once. The last block may
// have rows that nobody asked for.
struct Blocks {
    int height, tiles;
    std::int64_t count;

    explicit Blocks(std::int64_t rows) : count((rows + row_step - 1) / row_step) {
        const std::int64_t each = (rows + count - 1) / count;
        tiles = each > 16 ? 2 : 1;
        height = static_cast<int>((each + tiles - 1) / tiles);
    }
    std::int64_t rows() const { return count * tiles * height; }
};

// What one call works on.
struct Space {
    WeightTiles weights[2];
    CodeSpan codes;
    float* sums;          // [rows of the blocks][64]
    std::byte* gathered;  // [rows of the blocks] spans, where rows do not lie one after the other
};

Space& take_space(std::int64_t rows, bool gather) {
    const std::size_t sums = static_cast<std::size_t>(rows * task_columns) * sizeof(float);
    const std::size_t spans = gather ? static_cast<std::size_t>(rows * row_bytes) : 0;
    std::byte* const memory = thread_memory(3, sizeof(Space) + sums + spans);
    auto& space = *reinterpret_cast<Space*>(memory);
    space.sums = reinterpret_cast<float*>(memory + sizeof(Space));
    space.gathered = memory + sizeof(Space) + sums;
    return space;
}

// Units of a span.
struct UnitRange {
    std::int64_t first, count;
};

// sums += rows · weights over units of a span, `high` tiles of rows times `wide` panels
template <int high, int wide>
void multiply_block(vec::Tiles& tiles, int height, const std::byte* rows, const WeightTiles* weights, UnitRange units,
                    bool fresh, float* sums) {
    constexpr std::int64_t sum_bytes = task_columns * sizeof(float), weight_bytes = 64;
    float* const lower = sums + height * task_columns;
    const std::byte* const lower_rows = rows + height * row_bytes;
    if (fresh) {
        tiles.zero<0>();
        if constexpr (wide == 2) tiles.zero<1>();
        if constexpr (high == 2) tiles.zero<2>();
        if constexpr (high == 2 && wide == 2) tiles.zero<3>();
    } else {
        tiles.load<0>(sums, sum_bytes);
        if constexpr (wide == 2) tiles.load<1>(sums + 16, sum_bytes);
        if constexpr (high == 2) tiles.load<2>(lower, sum_bytes);
        if constexpr (high == 2 && wide == 2) tiles.load<3>(lower + 16, sum_bytes);
    }
    for (std::int64_t u = units.first; u < units.first + units.count; ++u) {
        tiles.load<6>(weights[0].pairs[u], weight_bytes);
        tiles.load<4>(rows + 64 * u, row_bytes);
        tiles.multiply<0, 4, 6>();
        if constexpr (wide == 2) {
            tiles.load<7>(weights[1].pairs[u], weight_bytes);
            tiles.multiply<1, 4, 7>();
        }
        if constexpr (high == 2) {
            tiles.load<5>(lower_rows + 64 * u, row_bytes);
            tiles.multiply<2, 5, 6>();
            if constexpr (wide == 2) tiles.multiply<3, 5, 7>();
        }
    }
    tiles.store<0>(sums, sum_bytes);
    if constexpr (wide == 2) tiles.store<1>(sums + 16, sum_bytes);
    if constexpr (high == 2) tiles.store<2>(lower, sum_bytes);
    if constexpr (high == 2 && wide == 2) tiles.store<3>(lower + 16, sum_bytes);
}

using MultiplyBlock = void (*)(vec::Tiles&, int, const std::byte*, const WeightTiles*, UnitRange, bool, float*);

// Adds a segment's sums to those before it, columns in their order.
void leave_segment(const float* from, std::int64_t count, int panels, bool fresh, float* sums) {
    const __m512i order = _mm512_load_si512(place_of_column);
    for (std::int64_t i = 0; i < count; ++i)
        for (int p = 0; p < panels; ++p) {
            const std::int64_t at = i * task_columns + 16 * p;
            const __m512 part = _mm512_permutexvar_ps(order, _mm512_load_ps(from + at));
            _mm512_storeu_ps(sums + at, fresh ? part : _mm512_add_ps(_mm512_loadu_ps(sums + at), part));
        }
}

MultiplyBlock choose(int high, int wide) {
    if (high == 2) return wide == 2 ? multiply_block<2, 2> : multiply_block<2, 1>;
    return wide == 2 ? multiply_block<1, 2> : multiply_block<1, 1>;
}

bool neighbours(const std::int32_t* rows, std::int64_t count) {
    for (std::int64_t i = 1; i < count; ++i)
        if (rows[i] != rows[0] + i) return false;
    return true;
}

void round_span(const float* x, std::int64_t cols, std::int64_t span, const std::int32_t* order, std::uint16_t* out) {
    const std::int64_t first = span * span_inputs, count = std::min(span_inputs, cols - first);
    for (std::int64_t at = 0; at < span_inputs; at += 32) {
        alignas(64) float part[32] = {};
        const float* from = x + first + at;
        if (order || count - at < 32) {
            for (std::int64_t i = 0; i < 32 && at + i < count; ++i)
                part[i] = order ? x[order[first + at + i]] : x[first + at + i];
            from = part;
        }
        _mm512_store_si512(out + at, vec::to_bf16(_mm512_loadu_ps(from), _mm512_loadu_ps(from + 16)));
    }
}

// Rows of span s, one after the other.
const std::byte* rows_of(const Inputs& inputs, std::int64_t s, RowList rows, std::int64_t count, std::byte* gathered) {
    const auto* const all = reinterpret_cast<const std::byte*>(inputs.tiles) + s * inputs.tokens * row_bytes;
    if (!rows.rows) return all + rows.first * row_bytes;
    for (std::int64_t i = 0; i < count; ++i)
        std::copy_n(all + rows[i] * row_bytes, row_bytes, gathered + i * row_bytes);
    return gathered;
}

}  // namespace

Inputs tile_inputs(const float* x, std::int64_t tokens, std::int64_t cols, const RowSet& set, const std::int32_t* order,
                   std::byte* scratch, Worker& worker) {
    auto* const out = reinterpret_cast<std::uint16_t*>(scratch);
    constexpr std::int64_t chunk = 32;  // about a microsecond
    worker.share(set.count * spans_of(cols), chunk, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t span = i / set.count, row = set.row(i % set.count);
            round_span(x + row * cols, cols, span, order, out + (span * tokens + row) * span_inputs);
        }
    });
    return {InputForm::tiles, tokens, cols, x, scratch};
}

void tile_products(const PackedMatrix& matrix, const std::byte* const* panel, int panels, const Inputs& inputs,
                   RowList rows, std::int64_t count, SumsOut sums) {
    if (rows.rows && neighbours(rows.rows, count)) rows = {nullptr, rows[0]};
    const Blocks blocks(count);
    Space& space = take_space(blocks.rows(), rows.rows != nullptr);
    vec::Tiles tiles(blocks.height);
    const std::int64_t block_rows = blocks.tiles * blocks.height;
    int segment = 0;
    for (std::int64_t s = 0; s < spans_of(inputs.cols); ++s) {
        const std::byte* const activations = rows_of(inputs, s, rows, count, space.gathered);
        const std::int64_t inner = std::min(span_inputs, inputs.cols - s * span_inputs), units = (inner + 31) / 32;
        for (std::int64_t first = 0; first < units;) {
            const InputRange range = matrix.segment(segment);
            const std::int64_t each = SpanUnits(range, s, units).count;
            const bool fresh = range.first == s * span_inputs + first * unit_inputs;
            for (int p = 0; p < panels; p += 2) {
                const int wide = std::min(2, panels - p);
                for (int i = 0; i < wide; ++i)
                    make_tiles(matrix, panel[p + i], s, inner, space.codes, space.weights[i]);
                const MultiplyBlock multiply_rows = choose(blocks.tiles, wide);
                for (std::int64_t b = 0; b < blocks.count; ++b)
                    multiply_rows(tiles, blocks.height, activations + b * block_rows * row_bytes, space.weights,
                                  {first, each}, fresh, space.sums + b * block_rows * task_columns + 16 * p);
            }
            first += each;
            if (range.end > s * span_inputs + first * unit_inputs) continue;
            leave_segment(space.sums, count, panels, segment == 0 || sums.apart,
                          sums.at + (sums.apart ? segment * count * task_columns : 0));
            ++segment;
        }
    }
}

// For tile_check.h.
void tile_product(const std::uint16_t* activations, int rows, const std::uint16_t* weights, int units, float* sums) {
    vec::Tiles tiles(rows);
    tiles.zero<0>();
    for (int u = 0; u < units; ++u) {
        tiles.load<4>(activations + 32 * u, 64 * units);
        tiles.load<6>(weights + 512 * u, 64);
        tiles.multiply<0, 4, 6>();
    }
    tiles.store<0>(sums, 64);
}

}  // namespace penstock::PENSTOCK_ISA
