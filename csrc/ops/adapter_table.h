// The low-rank adapters of one weight, or of one an expert, by slot. Slot 0 stands for none. Changed only between runs.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock {

enum class FloatType : int { f32, bf16, f16 };

class AdapterTable {
public:
    struct Entry {
        const void* down = nullptr;  // [experts, rank, inputs]
        const void* up = nullptr;    // [experts, rank, outputs]
        std::int64_t rank = 0;
        float scale = 0.0f;
        FloatType type = FloatType::f32;
        const float* columns =
            nullptr;  // [experts, outputs] factors of outputs, null for none (DoRA, arXiv:2402.09353)
    };

    AdapterTable(std::int64_t slots, std::int64_t inputs, std::int64_t outputs, std::int64_t most_rank,
                 std::int64_t experts = 1)
        : inputs(inputs),
          outputs(outputs),
          most_rank(most_rank),
          experts(experts),
          entries_(static_cast<std::size_t>(slots)) {}

    // Memory of the caller that lives until the slot is set again.
    void set(std::int64_t slot, const Entry& entry) {
        if (slot < 1 || slot >= static_cast<std::int64_t>(entries_.size()))
            throw std::invalid_argument("adapter slot " + std::to_string(slot) + " is not one of 1 to " +
                                        std::to_string(entries_.size() - 1) + ".");
        if (entry.rank < 0 || entry.rank > most_rank)
            throw std::invalid_argument("an adapter of rank " + std::to_string(entry.rank) +
                                        " does not fit a table made for " + std::to_string(most_rank) + ".");
        entries_[static_cast<std::size_t>(slot)] = entry;
    }
    // A slot that is not there is empty.
    const Entry& operator[](std::int64_t slot) const {
        static constexpr Entry none;
        return slot > 0 && slot < static_cast<std::int64_t>(entries_.size()) ? entries_[static_cast<std::size_t>(slot)]
                                                                             : none;
    }

    const std::int64_t inputs, outputs, most_rank, experts;

private:
    std::vector<Entry> entries_;
};

}  // namespace penstock
