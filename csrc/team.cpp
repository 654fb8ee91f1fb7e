#include "team.h"

#include <unistd.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace penstock {
namespace {

struct Job {
    const std::function<void(std::int64_t, std::int64_t)>& work;
    std::int64_t count, chunk;
    std::atomic<std::int64_t> next{0};
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr failure{};  // the first one, written by the thread that set `failed`

    void run() {
        try {
            for (std::int64_t at; (at = next.fetch_add(chunk, std::memory_order_relaxed)) < count;)
                work(at, std::min(at + chunk, count));
        } catch (...) {
            next.store(count);
            if (!failed.test_and_set()) failure = std::current_exception();
        }
    }
};

class Team {
public:
    std::mutex in_use;  // held by the one caller the team works for

    bool usable() const { return getpid() == process; }  // threads do not survive a fork

    // A helper that has not woken up when the work is done is not waited for.
    void run(Job& job, int helpers) {
        grow(helpers);
        {
            std::lock_guard lock(mutex);
            current = &job;
            places = helpers;
        }
        wake.notify_all();
        job.run();
        std::unique_lock lock(mutex);
        current = nullptr;
        done.wait(lock, [&] { return helping == 0; });
        if (job.failure) std::rethrow_exception(job.failure);
    }

private:
    void grow(int helpers) {
        while (static_cast<int>(threads.size()) < helpers) threads.emplace_back([this] { serve(); });
    }

    void serve() {
        std::unique_lock lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return current && places > 0; });
            Job* job = current;
            --places;
            ++helping;
            lock.unlock();
            job->run();
            lock.lock();
            if (--helping == 0) done.notify_one();
        }
    }

    const pid_t process = getpid();
    std::mutex mutex;
    std::condition_variable wake, done;
    std::vector<std::thread> threads;
    Job* current = nullptr;
    int places = 0;   // helpers the current job may still take
    int helping = 0;  // helpers at work
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

}  // namespace

int num_threads() { return thread_count().load(); }
void set_num_threads(int threads) { thread_count().store(std::max(1, threads)); }

void parallel_for(std::int64_t count, std::int64_t chunk, const std::function<void(std::int64_t, std::int64_t)>& work) {
    chunk = std::max<std::int64_t>(chunk, 1);
    const std::int64_t chunks = (count + chunk - 1) / chunk;
    const int helpers = static_cast<int>(std::min<std::int64_t>(num_threads(), chunks)) - 1;
    if (helpers > 0 && team().usable()) {
        if (std::unique_lock claim(team().in_use, std::try_to_lock); claim) {
            Job job{work, count, chunk};
            team().run(job, helpers);
            return;
        }
    }
    if (count > 0) work(0, count);
}

Scratch thread_scratch(std::int64_t vocab) {
    constexpr std::size_t alignment = 64;
    const auto room = [](std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; };
    const std::size_t n = static_cast<std::size_t>(vocab) + 8;
    const std::size_t narrow = room(n * 4), wide = room(n * 8);
    thread_local std::unique_ptr<std::byte[]> memory;
    thread_local std::size_t size = 0;
    const std::size_t needed = 4 * narrow + 2 * wide + alignment;
    if (size < needed) {
        memory.reset(new std::byte[needed]);
        size = needed;
    }
    const auto start = reinterpret_cast<std::uintptr_t>(memory.get());
    std::byte* at = memory.get() + (alignment - start % alignment) % alignment;
    const auto take = [&](std::size_t bytes) { return std::exchange(at, at + bytes); };
    Scratch out;
    out.logits = reinterpret_cast<float*>(take(narrow));
    out.values = reinterpret_cast<float*>(take(narrow));
    out.weights = reinterpret_cast<double*>(take(wide));
    out.keys = reinterpret_cast<std::uint64_t*>(take(wide));
    out.ids = reinterpret_cast<std::uint32_t*>(take(narrow));
    out.index = reinterpret_cast<std::uint32_t*>(take(narrow));
    return out;
}

}  // namespace penstock
