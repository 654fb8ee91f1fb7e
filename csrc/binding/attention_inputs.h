// What ops of attention are given in a run.
#pragma once

#include <cstddef>

#include "binding/plain_op.h"
#include "ops/model_ops.h"

namespace penstock {

// A layer's KV memory, as ops take it.
struct KvBuffers {
    KvLayout layout;
    Value keys, values;
};

inline AttentionRows rows_of(const Frame& f, std::size_t group, std::int64_t window, bool chunked) {
    const StepInputs::Group& tables = f.step.groups[group];
    const bool whole = tables.context_len != nullptr;
    return {f.step.query_start,
            whole ? tables.context_len : f.step.context_len,
            tables.block_table,
            tables.table_width,
            f.step.rows,
            window,
            f.step.masks,
            f.step.spans,
            chunked,
            whole};
}

}  // namespace penstock
