// Where a product's sums go while inputs come in segments (packed.h): each segment is summed from zero and added behind
// those before it, so that processes which own whole segments can give the bits of one.
#pragma once

#include <algorithm>
#include <cstring>

#include "ops/multiply.h"
#include "ops/tiles.h"
#include "packing/packed.h"
#include "program/team.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {

// Of `count` rows of 64 columns; `sums` are zeros, of the first segment if they stay apart.
class SegmentSums {
public:
    SegmentSums(const PackedMatrix& matrix, std::int64_t count, SumsOut sums)
        : matrix_(matrix), floats_(count * 64), apart_(sums.apart), sums_(sums.at), to_(sums.at) {
        if (matrix.segments() > 1 && !apart_)
            part_ = reinterpret_cast<float*>(thread_memory(4, static_cast<std::size_t>(floats_) * sizeof(float)));
    }

    float* to() const { return to_; }  // of the segment at hand
    InputRange range() const { return matrix_.segment(index_); }
    bool done() const { return index_ == matrix_.segments(); }

    // Where to sum the part of the segment at hand that is not its first (`goes_on`), or that is its last (`ends`).
    SumPlace place(bool goes_on, bool ends) const {
        if (apart_) return {goes_on ? to_ : nullptr, to_, nullptr};
        return {goes_on ? to_ : nullptr, ends ? sums_ : to_, ends && index_ ? sums_ : nullptr};
    }
    // Whether what the segment at hand gives is added to what lies there.
    bool adds() const { return index_ > 0 && !apart_; }
    // The segment at hand is complete and added to those before it.
    void advance() {
        ++index_;
        to_ = apart_ ? to_ + floats_ : part_;
    }

    // The segment at hand is complete.
    void next() {
        if (adds())
            for (std::int64_t i = 0; i < floats_; i += 16)
                vec::store(sums_ + i, vec::load16(sums_ + i) + vec::load16(part_ + i));
        advance();
        if (done()) return;
        std::memset(to_, 0, static_cast<std::size_t>(floats_) * sizeof(float));
    }

private:
    const PackedMatrix& matrix_;
    const std::int64_t floats_;
    const bool apart_;
    float* const sums_;
    float *to_, *part_ = nullptr;
    int index_ = 0;
};

// Units [first, first + count) of a span that lie in a range of inputs.
struct SpanUnits {
    std::int64_t first, count;
    SpanUnits(const InputRange& range, std::int64_t span, std::int64_t units)
        : first(std::max<std::int64_t>(0, (range.first - span * span_inputs) / unit_inputs)),
          count(std::min(units, (range.end - span * span_inputs + unit_inputs - 1) / unit_inputs) - first) {}
};

}  // namespace penstock::PENSTOCK_ISA
