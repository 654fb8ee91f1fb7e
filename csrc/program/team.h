// Threads that share work in chunks taken from counters, so that a busy core delays only its own chunk.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "ops/ops.h"

namespace penstock {

// One loop shared by a team: the next item of each range that nobody took, and how many are finished in all.
struct alignas(64) Phase {
    static constexpr int ranges = 7;  // with `done` a line of memory
    std::atomic<std::int64_t> next[ranges]{}, done{0};
};

// The loops of one run, made as they are needed and kept for the next.
class Phases {
public:
    // Throws std::length_error where there are too many, std::bad_alloc.
    Phase& at(std::int64_t index);
    void reset(std::int64_t used);

private:
    static constexpr std::int64_t block = 4096, most = 256;
    std::atomic<Phase*> blocks_[most]{};
};

// A member of a team that runs one function together. Every member calls share() with the same arguments in the same
// order; a member that comes late finds the earlier loops finished and skips them.
class Worker {
public:
    Worker(Phases* phases, int index, int count) : phases_(phases), index_(index), count_(count) {}

    int index() const { return index_; }  // below count(); 0 is the caller
    int count() const { return count_; }  // most members the team may have
    std::int64_t phases_used() const { return used_; }
    // From now on the time this member waits for others is added there; null for nowhere.
    void count_waits(double* seconds) { waited_ = seconds; }

    // Calls work(begin, end) on disjoint ranges of at most `chunk` items that cover [0, count), here or in another
    // member, and returns when all are finished. work must not throw.
    template <class F>
    void share(std::int64_t count, std::int64_t chunk, F&& work) {
        share_in(1, count, chunk, work);
    }

    // The same, each member taking neighbours one after the other as long as there are any of its own part: memory
    // that is read ahead is then memory it reads. Near the end of a part ranges get shorter, so that all end together.
    template <class F>
    void share_neighbours(std::int64_t count, std::int64_t chunk, F&& work) {
        share_in(count_ < Phase::ranges ? count_ : Phase::ranges, count, chunk, work);
    }

private:
    template <class F>
    void share_in(int ranges, std::int64_t count, std::int64_t chunk, F&& work) {
        if (count <= 0) return;
        if (count_ == 1) {
            for (std::int64_t at = 0; at < count; at += chunk) work(at, at + chunk < count ? at + chunk : count);
            return;
        }
        Phase& phase = phases_->at(used_++);
        for (int i = 0; i < ranges; ++i) {
            const int range = (index_ + i) % ranges;
            const std::int64_t first = count * range / ranges, last = count * (range + 1) / ranges;
            std::atomic<std::int64_t>& next = phase.next[range];
            for (std::int64_t at = first + next.load(std::memory_order_relaxed); at < last;) {
                const std::int64_t most = ranges == 1 ? last - at : (last - at + 1) / 2;
                const std::int64_t end = at + (most < chunk ? most : chunk);
                std::int64_t taken = at - first;
                if (!next.compare_exchange_weak(taken, end - first, std::memory_order_relaxed)) {
                    at = first + taken;
                    continue;
                }
                work(at, end);
                phase.done.fetch_add(end - at, std::memory_order_release);
                at = first + next.load(std::memory_order_relaxed);
            }
        }
        if (phase.done.load(std::memory_order_acquire) < count) wait(phase, count);
    }

    void wait(const Phase& phase, std::int64_t count) const;

    Phases* phases_;
    std::int64_t used_ = 0;
    int index_, count_;
    double* waited_ = nullptr;
};

// Threads a team has at most, the caller included; at first, the processors this process may run on.
int num_threads();
void set_num_threads(int threads);

// Runs `body` in the calling thread and in as many helpers as are free, num_threads() in all at most, and returns when
// all that began are through. An exception of the caller's body is thrown here; helpers must not throw. Runs in the
// calling thread alone while another call is using the team.
void run_team(const std::function<void(Worker&)>& body);

// Calls work(begin, end) on disjoint ranges of at most `chunk` items that cover [0, count); returns when all are done.
// An exception of work() ends the loop and is thrown here.
void parallel_for(std::int64_t count, std::int64_t chunk, const std::function<void(std::int64_t, std::int64_t)>& work);

// Memory of the calling thread, 64-byte aligned, at least `bytes` long; valid until its next call with this `slot`
// (0 to 3) from the same thread. Not initialised.
std::byte* thread_memory(int slot, std::size_t bytes);

// The calling thread's work space for a vocabulary of this size, in slot 0.
Scratch thread_scratch(std::int64_t vocab);

}  // namespace penstock
