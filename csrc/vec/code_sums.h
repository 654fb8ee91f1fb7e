// Sums of products of codes where four products are added to a sum of 32 bits at once.
#pragma once

namespace penstock::PENSTOCK_ISA::vec {

// A panel's sixteen columns in parts, each a register of floats.
inline constexpr int column_parts = 1;
using ColumnFloats = F32x16;
static inline ColumnFloats load_columns(const float* from) { return load16(from); }
static inline ColumnFloats splat_columns(float value) { return splat16(value); }

// Sums of products of unsigned codes up to `most` with signed bytes, of `steps` steps of four each, over the columns of
// a part; codes are taken minus code_base.
inline constexpr bool sums_by_greatest = false;
template <int most>
inline constexpr int code_base = 0;
template <int most>
struct ColumnCodes {
    Bytes64 codes;
    template <int part>
    static ColumnCodes of(Bytes64 bytes) {
        return {bytes};
    }
};
template <int most, int steps>
class CodeSum {
public:
    template <int step>
    [[gnu::always_inline]] inline void add(const ColumnCodes<most>& codes, const std::int8_t* four) {
        sum_ = dot4(sum_, codes.codes, four);
    }
    ColumnFloats total(std::int32_t more) const { return to_float(sum_ + splat_i32(more)); }
    ColumnFloats total() const { return to_float(sum_); }

private:
    I32x16 sum_ = splat_i32(0);
};

}  // namespace penstock::PENSTOCK_ISA::vec
