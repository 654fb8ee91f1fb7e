// Ranks that compute one model together: processes of one machine, or threads in tests, and the memory they share.
//
// Everything goes over in chunks that all ranks count alike. A rank fills its slot of the chunk at hand, posts it,
// waits until all have posted theirs, and takes what lies in their slots. Whoever posts chunk n has taken all up to n -
// 2, and nobody fills the slot of chunk n before all have posted n - 2: four slots a rank never have one written that
// is read.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace penstock {

class RankGroup {
public:
    static constexpr int most_ranks = 64;
    static constexpr std::int64_t slots = 4, least_slot_bytes = std::int64_t{1} << 20;

    // Bytes of memory for so many ranks.
    static std::int64_t memory_bytes(int count, std::int64_t slot_bytes);
    // Brings memory of memory_bytes(), all zeros, into order. Throws std::invalid_argument on sizes that are not
    // allowed.
    static void prepare(std::byte* memory, int count, std::int64_t slot_bytes);
    // The same behind the descriptor of an empty file. Throws std::system_error too.
    static void make(int descriptor, int count, std::int64_t slot_bytes);
    // Memory of a file that was made so; the descriptor may be closed afterwards. Throws std::invalid_argument if it
    // was not, std::system_error where it cannot be mapped.
    static std::shared_ptr<std::byte> map(int descriptor);

    // Rank -1 takes no part, but may stop the others. Throws std::invalid_argument if there is no such rank, if
    // somebody has it, or if the memory is not prepared.
    RankGroup(std::shared_ptr<std::byte> memory, int rank);
    ~RankGroup();  // the rank may be taken again
    RankGroup(const RankGroup&) = delete;
    RankGroup& operator=(const RankGroup&) = delete;

    int rank() const { return rank_; }
    int count() const { return count_; }
    std::int64_t slot_bytes() const { return slot_bytes_; }

    // A rank's slot of the chunk to be posted next (`age` 0), or of one that was posted so many before it.
    std::byte* slot(int rank, std::uint32_t age = 0) const {
        const std::int64_t place = (posted_ - age) % slots;
        return data_ + (rank * slots + place) * slot_bytes_;
    }
    // What a rank noted when it posted that chunk.
    std::uint32_t note(int rank, std::uint32_t age) const;

    // The own slot of the chunk at hand is filled. `kind` tells what the ranks are doing and has to be the same of all.
    // One thread of a rank at a time calls this and wait().
    void post(std::uint32_t kind, std::uint32_t note = 0);
    // Until all have posted the chunk of that age; false if the group has been stopped, and from then on for ever.
    bool wait(std::uint32_t age);

    // Ends every wait of all ranks, now and later. From any thread or process.
    void stop();
    // The ranks do not do the same: stops them, and check() will say so.
    void part();
    bool stopped() const;
    void check() const;  // throws std::runtime_error if the group has been stopped

    // Each rank that has something to give gives so many bytes (null: nothing), and each that wants something takes
    // what `from` gives into `out` (null: nothing). All ranks call it with the same number.
    void pass(const std::byte* own, std::int64_t bytes, int from, std::byte* out);

    // Time in which ops passed something, waiting for other ranks and taking what they gave: added by one thread of a
    // step at a time, read by any.
    double exchanged_seconds() const { return 1e-9 * static_cast<double>(exchanged_.load(std::memory_order_relaxed)); }
    void add_exchanged(std::chrono::steady_clock::duration time) {
        const auto added = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
        exchanged_.store(exchanged_.load(std::memory_order_relaxed) + added, std::memory_order_relaxed);
    }

    // Bytes of every rank, one behind the other, in `out`.
    void gather(const std::byte* own, std::int64_t bytes, std::byte* out);

private:
    struct Head;
    struct Line;

    Line& line(int rank) const;
    bool wait_for(Line& other, std::uint32_t number) const;

    std::shared_ptr<std::byte> memory_;
    Head* head_;
    std::byte* data_;
    std::int64_t slot_bytes_;
    int rank_, count_;
    std::uint32_t posted_ = 0;
    std::atomic<std::int64_t> exchanged_{0};  // nanoseconds
    std::atomic<bool> apart_{false};          // this rank has seen another do something else
};

}  // namespace penstock
