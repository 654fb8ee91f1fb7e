// The k largest logits without sorting the vocabulary: a heap of the best so far, and a vector compare against its
// least member that rejects eight tokens at a time.
#pragma once

#include "ops/scan.h"

namespace penstock::PENSTOCK_ISA {

constexpr std::int64_t heap_limit = 128;

// Whether token a comes after token b: a smaller logit, or an equal one with a higher id.
static inline bool ranks_after(float a, std::uint32_t id_a, float b, std::uint32_t id_b) {
    return a < b || (a == b && id_a > id_b);
}

struct TopHeap {
    std::uint32_t* ids;
    float* values;
    std::int64_t size;

    // Moves the entry at `hole` down until neither child ranks after it; the root is the entry that ranks last.
    void sink(std::int64_t hole) {
        const float value = values[hole];
        const std::uint32_t id = ids[hole];
        for (std::int64_t child; (child = 2 * hole + 1) < size; hole = child) {
            if (child + 1 < size && ranks_after(values[child + 1], ids[child + 1], values[child], ids[child])) ++child;
            if (!ranks_after(values[child], ids[child], value, id)) break;
            values[hole] = values[child];
            ids[hole] = ids[child];
        }
        values[hole] = value;
        ids[hole] = id;
    }

    void take_root(float value, std::uint32_t id) {
        values[0] = value;
        ids[0] = id;
        sink(0);
    }
};

// Fills ids and values with the min(k, size) tokens that rank first, as a heap; returns how many.
static inline TopHeap top_heap(const float* logits, std::int64_t size, std::int64_t k, std::uint32_t* ids,
                               float* values) {
    TopHeap heap{ids, values, k < size ? k : size};
    for (std::int64_t i = 0; i < heap.size; ++i) {
        ids[i] = static_cast<std::uint32_t>(i);
        values[i] = logits[i];
    }
    if (heap.size == 0) return heap;
    for (std::int64_t i = heap.size / 2; i-- > 0;) heap.sink(i);
    std::int64_t at = heap.size;
    for (; at < size && at % 8; ++at)
        if (logits[at] > values[0]) heap.take_root(logits[at], static_cast<std::uint32_t>(at));
    for (; at < size; at += 8) {
        unsigned hits = vec::less(vec::splat(values[0]), load_padded(logits, at, size));
        for (; hits; hits &= hits - 1) {
            const std::int64_t id = at + __builtin_ctz(hits);
            if (logits[id] > values[0]) heap.take_root(logits[id], static_cast<std::uint32_t>(id));
        }
    }
    return heap;
}

// Orders a heap by rank, first first.
static inline void sort_by_rank(TopHeap heap) {
    while (heap.size > 1) {
        const std::int64_t last = --heap.size;
        const float value = heap.values[0];
        const std::uint32_t id = heap.ids[0];
        heap.take_root(heap.values[last], heap.ids[last]);
        heap.values[last] = value;
        heap.ids[last] = id;
    }
}

// Orders at most heap_limit entries by token id.
static inline void sort_by_id(TopHeap heap) {
    for (std::int64_t i = 1; i < heap.size; ++i) {
        const std::uint32_t id = heap.ids[i];
        const float value = heap.values[i];
        std::int64_t j = i;
        for (; j > 0 && heap.ids[j - 1] > id; --j) {
            heap.ids[j] = heap.ids[j - 1];
            heap.values[j] = heap.values[j - 1];
        }
        heap.ids[j] = id;
        heap.values[j] = value;
    }
}

}  // namespace penstock::PENSTOCK_ISA
