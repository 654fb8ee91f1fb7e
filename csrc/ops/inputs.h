// Rows of activations as the products of a packed matrix take them.
#pragma once

#include "packing/packed.h"

namespace penstock {

// A row's 256 inputs. Values of a short last span are zero.
struct alignas(64) ActivationSpan {
    std::int8_t value[256];  // -127 to 127
    float scale[8];          // of 32 inputs
    float total32[8];        // scale · sum of the 32 values
    float total16[16];       // the same of 16 values
    std::int32_t sum32[8], sum16[16];
};
static_assert(sizeof(ActivationSpan) == 512);

enum class InputForm : int { floats, codes, pairs, tiles };

// T rows of K inputs; the pointer of the form is the one to use.
struct Inputs {
    InputForm form;
    std::int64_t tokens, cols;
    const float* floats;          // [T, K]
    const ActivationSpan* spans;  // [spans of K][T]
    const std::uint16_t* pairs;   // [T, K] rounded to bfloat16; K is even
    const std::uint16_t* tiles;   // [spans of K][T][256] rounded to bfloat16, those of a short last span zero

    // Inputs that lie in `scratch`, unless they are floats: those are at x.
    Inputs(InputForm form, std::int64_t tokens, std::int64_t cols, const float* x, const std::byte* scratch)
        : form(form),
          tokens(tokens),
          cols(cols),
          floats(x),
          spans(reinterpret_cast<const ActivationSpan*>(scratch)),
          pairs(reinterpret_cast<const std::uint16_t*>(scratch)),
          tiles(pairs) {}
    Inputs() = default;
};

// Rows of a step that are multiplied alike: `repeat` neighbours for each number of the list.
struct RowSet {
    const std::int32_t* list;  // null: 0, 1, …
    std::int64_t count;        // of rows
    bool generated;            // at level fast, not of kind prompt
    std::int64_t repeat = 1;

    std::int64_t row(std::int64_t i) const { return list ? list[i / repeat] * repeat + i % repeat : i; }
    RowSet repeated(std::int64_t times) const { return {list, count * times, generated, times}; }
};

// The rows of one call, in turn.
struct RowList {
    const std::int32_t* rows;
    std::int64_t first;
    std::int64_t operator[](std::int64_t i) const { return rows ? rows[i] : first + i; }
};

// Where the sums of rows of 64 columns go. With `apart`, those of a matrix's segments are not added: each one's follow
// those of the one before.
struct SumsOut {
    float* at;
    bool apart;
    SumsOut(float* to, bool segments_apart = false) : at(to), apart(segments_apart) {}
};

// Tiles read rows behind the last one, which nobody uses.
inline constexpr std::int64_t rows_read_behind = 32;

// Bytes that one form of T rows of K inputs takes, at most. Codes and tiles of different rows may share them: a span of
// a row takes as much in both.
inline std::int64_t inputs_bytes(std::int64_t tokens, std::int64_t cols) {
    const std::int64_t spans = tokens * ((cols + span_inputs - 1) / span_inputs) + rows_read_behind;
    return spans * static_cast<std::int64_t>(sizeof(ActivationSpan));
}

}  // namespace penstock
