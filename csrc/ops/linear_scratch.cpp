// How much scratch the ops over packed weights need: the same for every instruction set.
#include "ops/expert_scratch.h"
#include "ops/inputs.h"
#include "ops/model_ops.h"

namespace penstock {
namespace {

constexpr std::int64_t least_task_rows = 128, block_bytes = 16;  // of a block of experts()

std::int64_t whole(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

std::int64_t linear_scratch(const PackedMatrix* const* parts, int num_parts, std::int64_t tokens) {
    std::int64_t ordered = 0;
    bool codes = false, others = false;
    for (int i = 0; i < num_parts; ++i) {
        ordered += parts[i]->order() != nullptr;
        (parts[i]->integer() ? codes : others) = true;
    }
    return (ordered + codes + others) * inputs_bytes(tokens, parts[0]->cols());
}

std::int64_t head_linear_scratch(const PackedMatrix& weight, bool rotates, std::int64_t tokens) {
    const std::int64_t rows = tokens * weight.experts();
    return (rotates ? whole(rows * weight.cols() * 4) : 0) + inputs_bytes(rows, weight.cols());
}

ExpertScratch expert_scratch(const PackedMatrix& gate, const PackedMatrix& up, const PackedMatrix& down,
                             std::int64_t tokens, std::int64_t top_k, std::int64_t most_rank) {
    const std::int64_t slots = tokens * top_k;
    const bool alike = gate.header().kind == up.header().kind && !gate.order() && !up.order();
    ExpertScratch out;
    out.inputs = inputs_bytes(tokens, gate.cols());
    out.second_inputs = alike ? 0 : inputs_bytes(tokens, up.cols());
    out.hidden_inputs = inputs_bytes(slots, down.cols());
    out.hidden = whole(slots * gate.rows() * 4);
    out.outputs = whole(slots * down.rows() * 4);
    out.list = whole(slots * 4);
    out.starts = whole((2 * gate.experts() + 1) * 4);
    out.blocks = whole((2 * gate.experts() + slots / least_task_rows + 1) * block_bytes);
    out.products = most_rank ? whole(slots * 2 * gate.rows() * 4) : 0;
    out.low = whole(adapter_scratch(most_rank, slots));
    out.total = out.products + out.low + out.inputs + out.second_inputs + out.hidden_inputs + out.hidden + out.outputs +
                2 * out.list + out.starts + 64 + out.blocks;
    return out;
}

std::int64_t adapter_scratch(std::int64_t most_rank, std::int64_t rows) {
    return rows * AdapterArgs::most * most_rank * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t experts_scratch(const PackedMatrix& gate, const PackedMatrix& up, const PackedMatrix& down,
                             std::int64_t tokens, std::int64_t top_k, std::int64_t most_rank) {
    return expert_scratch(gate, up, down, tokens, top_k, most_rank).total;
}

}  // namespace penstock
