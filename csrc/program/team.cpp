#include "program/team.h"

#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace penstock {
namespace {

constexpr int spins_before_yield = 2000;  // about 50 microseconds of waiting for another member
constexpr int spins_before_sleep = 3000;  // a helper looks that often for work before it sleeps

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

thread_local bool working = false;  // in a team's body: what it calls must not ask for the team again

class Team {
public:
    std::mutex in_use;  // held by the one caller the team works for

    bool usable() const { return getpid() == process; }  // threads do not survive a fork

    void run(const std::function<void(Worker&)>& body, int helpers) {
        while (static_cast<int>(threads.size()) < helpers) {
            const int index = static_cast<int>(threads.size()) + 1;
            threads.emplace_back([this, index] { serve(index); });
        }
        job = &body;
        members = helpers + 1;
        helping.store(open, std::memory_order_release);  // publishes job and members
        round.fetch_add(1, std::memory_order_release);
        round.notify_all();
        Worker self(&phases, 0, members);
        std::exception_ptr failure;
        try {
            body(self);
        } catch (...) {
            failure = std::current_exception();
        }
        // No helper may join from here on; those that did are waited for.
        helping.fetch_sub(open, std::memory_order_acq_rel);
        for (int spins = 0; helping.load(std::memory_order_acquire) != 0; ++spins)
            spins < spins_before_yield ? relax() : std::this_thread::yield();
        phases.reset(std::max(self.phases_used(), helped.exchange(0, std::memory_order_relaxed)));
        if (failure) std::rethrow_exception(failure);
    }

private:
    static constexpr int open = 1 << 20;  // in `helping` while helpers may join

    void serve(int index) {
        int seen = 0;
        for (;;) {
            for (int spins = 0; round.load(std::memory_order_acquire) == seen && spins < spins_before_sleep; ++spins)
                relax();
            round.wait(seen, std::memory_order_acquire);
            seen = round.load(std::memory_order_acquire);
            int state = helping.load(std::memory_order_acquire);
            while (state >= open && !helping.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
            }
            if (state < open) continue;  // too late for this job
            if (index < members) {
                working = true;
                Worker self(&phases, index, members);
                (*job)(self);
                // A member that leaves early, as from a stopped exchange, may have come less far than another.
                const std::int64_t used = self.phases_used();
                std::int64_t most = helped.load(std::memory_order_relaxed);
                while (most < used && !helped.compare_exchange_weak(most, used, std::memory_order_relaxed)) {
                }
            }
            helping.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    const pid_t process = getpid();
    std::vector<std::thread> threads;
    Phases phases;
    const std::function<void(Worker&)>* job = nullptr;
    int members = 1;
    std::atomic<int> round{0};            // grows with every job
    std::atomic<int> helping{0};          // helpers at work, plus `open`
    std::atomic<std::int64_t> helped{0};  // loops that the helper which came furthest has used
};

// Never destroyed: its threads wait on its members until the process ends.
Team& team() {
    static Team* const instance = new Team;
    return *instance;
}

int processors() {
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

std::atomic<int>& thread_count() {
    static std::atomic<int> count{processors()};
    return count;
}

// For a caller who works alone: share() needs no counters then.
void run_alone(const std::function<void(Worker&)>& body) {
    Worker self(nullptr, 0, 1);
    body(self);
}

}  // namespace

Phase& Phases::at(std::int64_t index) {
    if (index >= block * most) throw std::length_error("a native program has too many steps for one run.");
    std::atomic<Phase*>& place = blocks_[index / block];
    Phase* found = place.load(std::memory_order_acquire);
    if (!found) {
        auto made = std::make_unique<Phase[]>(block);
        if (place.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) found = made.release();
    }
    return found[index % block];
}

void Phases::reset(std::int64_t used) {
    for (std::int64_t i = 0; i < used; ++i) {
        Phase& phase = at(i);
        for (std::atomic<std::int64_t>& next : phase.next) next.store(0, std::memory_order_relaxed);
        phase.done.store(0, std::memory_order_relaxed);
    }
}

void Worker::wait(const Phase& phase, std::int64_t count) const {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point begun = waited_ ? Clock::now() : Clock::time_point();
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; ++spins)
        spins < spins_before_yield ? relax() : std::this_thread::yield();
    if (waited_) *waited_ += std::chrono::duration<double>(Clock::now() - begun).count();
}

int num_threads() { return thread_count().load(); }
void set_num_threads(int threads) { thread_count().store(std::max(1, threads)); }

void run_team(const std::function<void(Worker&)>& body) {
    const int helpers = num_threads() - 1;
    if (helpers > 0 && !working && team().usable()) {
        if (std::unique_lock claim(team().in_use, std::try_to_lock); claim) {
            struct Busy {
                Busy() { working = true; }
                ~Busy() { working = false; }
            } busy;
            return team().run(body, helpers);
        }
    }
    run_alone(body);
}

void parallel_for(std::int64_t count, std::int64_t chunk, const std::function<void(std::int64_t, std::int64_t)>& work) {
    chunk = std::max<std::int64_t>(chunk, 1);
    if (count <= 0) return;
    if (count <= chunk || num_threads() == 1) return work(0, count);
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr failure;  // the first one, written by the thread that set `failed`
    run_team([&](Worker& worker) {
        worker.share(count, chunk, [&](std::int64_t begin, std::int64_t end) {
            try {
                if (!failed.test(std::memory_order_relaxed)) work(begin, end);
            } catch (...) {
                if (!failed.test_and_set()) failure = std::current_exception();
            }
        });
    });
    if (failure) std::rethrow_exception(failure);
}

std::byte* thread_memory(int slot, std::size_t bytes) {
    constexpr std::size_t alignment = 64;
    struct Memory {
        std::unique_ptr<std::byte[]> bytes;
        std::size_t size = 0;
    };
    thread_local Memory slots[5];
    Memory& memory = slots[slot];
    if (memory.size < bytes + alignment) {
        memory.bytes.reset(new std::byte[bytes + alignment]);
        memory.size = bytes + alignment;
    }
    const auto start = reinterpret_cast<std::uintptr_t>(memory.bytes.get());
    return memory.bytes.get() + (alignment - start % alignment) % alignment;
}

Scratch thread_scratch(std::int64_t vocab) {
    const auto room = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    const std::size_t n = static_cast<std::size_t>(vocab) + 8;
    const std::size_t narrow = room(n * 4), wide = room(n * 8);
    std::byte* at = thread_memory(0, 4 * narrow + 3 * wide);
    const auto take = [&](std::size_t bytes) { return std::exchange(at, at + bytes); };
    Scratch out;
    out.logits = reinterpret_cast<float*>(take(narrow));
    out.values = reinterpret_cast<float*>(take(narrow));
    out.weights = reinterpret_cast<double*>(take(wide));
    out.chained = reinterpret_cast<double*>(take(wide));
    out.keys = reinterpret_cast<std::uint64_t*>(take(wide));
    out.ids = reinterpret_cast<std::uint32_t*>(take(narrow));
    out.index = reinterpret_cast<std::uint32_t*>(take(narrow));
    return out;
}

}  // namespace penstock
