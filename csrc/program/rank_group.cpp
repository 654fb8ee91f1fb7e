#include "program/rank_group.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace penstock {
namespace {

constexpr std::uint64_t mark = 0x314b4e52'4b545350;    // "PSTKRNK1"
constexpr std::int64_t line_bytes = 128, page = 4096;  // processors fetch lines of memory in pairs
constexpr int spins_before_yield = 2000;               // about 50 microseconds
constexpr auto awake = std::chrono::milliseconds(2);   // a rank that waits longer sleeps
constexpr long sleep_nanoseconds = 50'000'000;         // then it looks by itself, lest a wake was lost

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

#ifdef __linux__
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
    const timespec most{0, sleep_nanoseconds};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
void sleep_while(std::atomic<std::uint32_t>&, std::uint32_t) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
}

void wake_all(std::atomic<std::uint32_t>&) {}
#endif

std::int64_t whole(std::int64_t bytes, std::int64_t unit) { return (bytes + unit - 1) / unit * unit; }

void check_sizes(std::int64_t count, std::int64_t slot_bytes) {
    if (count < 1 || count > RankGroup::most_ranks)
        throw std::invalid_argument("a group has 1 to " + std::to_string(RankGroup::most_ranks) + " ranks, not " +
                                    std::to_string(count) + ".");
    constexpr std::int64_t most = std::int64_t{1} << 40;
    if (slot_bytes < RankGroup::least_slot_bytes || slot_bytes > most || slot_bytes % page)
        throw std::invalid_argument("a slot has " + std::to_string(slot_bytes) + " bytes; it has to have " +
                                    std::to_string(RankGroup::least_slot_bytes) + " at least, in whole pages of " +
                                    std::to_string(page) + ".");
}

std::system_error failed(const char* what) { return {errno, std::generic_category(), what}; }

std::int64_t file_bytes(int descriptor) {
    struct stat found{};
    if (fstat(descriptor, &found) != 0) throw failed("memory of a group of ranks cannot be looked at");
    return found.st_size;
}

std::shared_ptr<std::byte> mapped(int descriptor, std::int64_t bytes) {
    const auto size = static_cast<std::size_t>(bytes);
    void* const start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (start == MAP_FAILED) throw failed("memory of a group of ranks cannot be mapped");
#ifdef MADV_HUGEPAGE
    madvise(start, size, MADV_HUGEPAGE);  // as the kernel is set up for shared memory; it may refuse
#endif
    return {static_cast<std::byte*>(start), [size](std::byte* at) { munmap(at, size); }};
}

}  // namespace

struct RankGroup::Head {
    std::atomic<std::uint64_t> mark;
    std::uint32_t count;
    std::atomic<std::uint32_t> stopped;
    std::int64_t slot_bytes;
};

struct RankGroup::Line {
    std::atomic<std::uint32_t> posted;    // chunks so far
    std::atomic<std::uint32_t> sleepers;  // ranks that sleep until there is another
    std::atomic<std::uint32_t> taken;
    std::atomic<std::uint32_t> kinds[slots], notes[slots];
};

std::int64_t RankGroup::memory_bytes(int count, std::int64_t slot_bytes) {
    check_sizes(count, slot_bytes);
    return whole((1 + count) * line_bytes, page) + count * slots * slot_bytes;
}

void RankGroup::prepare(std::byte* memory, int count, std::int64_t slot_bytes) {
    check_sizes(count, slot_bytes);
    static_assert(sizeof(Line) <= line_bytes && sizeof(Head) <= line_bytes);
    static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);
    auto& head = *reinterpret_cast<Head*>(memory);
    head.count = static_cast<std::uint32_t>(count);
    head.slot_bytes = slot_bytes;
    head.mark.store(mark, std::memory_order_release);
}

void RankGroup::make(int descriptor, int count, std::int64_t slot_bytes) {
    const std::int64_t size = memory_bytes(count, slot_bytes);
    if (file_bytes(descriptor) != 0) throw std::invalid_argument("memory for a new group of ranks has to be empty.");
    if (ftruncate(descriptor, size) != 0) throw failed("memory of a group of ranks cannot be had");
    prepare(mapped(descriptor, size).get(), count, slot_bytes);
}

std::shared_ptr<std::byte> RankGroup::map(int descriptor) {
    const std::int64_t size = file_bytes(descriptor);
    if (size >= page) {
        auto memory = mapped(descriptor, size);
        const auto& head = *reinterpret_cast<const Head*>(memory.get());
        if (head.mark.load(std::memory_order_acquire) == mark &&
            memory_bytes(static_cast<int>(head.count), head.slot_bytes) == size)
            return memory;
    }
    throw std::invalid_argument("this is no memory of a group of ranks.");
}

RankGroup::RankGroup(std::shared_ptr<std::byte> memory, int rank)
    : memory_(std::move(memory)), head_(reinterpret_cast<Head*>(memory_.get())), rank_(rank) {
    if (head_->mark.load(std::memory_order_acquire) != mark)
        throw std::invalid_argument("this is no memory of a group of ranks.");
    count_ = static_cast<int>(head_->count);
    slot_bytes_ = head_->slot_bytes;
    data_ = memory_.get() + whole((1 + count_) * line_bytes, page);
    if (rank < -1 || rank >= count_)
        throw std::invalid_argument("there is no rank " + std::to_string(rank) + " in a group of " +
                                    std::to_string(count_) + ".");
    if (rank < 0) return;
    if (line(rank).taken.exchange(1, std::memory_order_acq_rel))
        throw std::invalid_argument("rank " + std::to_string(rank) + " of this group is taken.");
    posted_ = line(rank).posted.load(std::memory_order_relaxed);
    // Its pages are put where it runs.
    for (std::int64_t at = 0; at < slots * slot_bytes_; at += page) {
        auto* const touched = reinterpret_cast<volatile std::byte*>(data_ + rank * slots * slot_bytes_ + at);
        *touched = *touched;
    }
}

RankGroup::~RankGroup() {
    if (rank_ >= 0) line(rank_).taken.store(0, std::memory_order_release);
}

RankGroup::Line& RankGroup::line(int rank) const {
    return *reinterpret_cast<Line*>(memory_.get() + (1 + rank) * line_bytes);
}

std::uint32_t RankGroup::note(int rank, std::uint32_t age) const {
    return line(rank).notes[(posted_ - age) % slots].load(std::memory_order_relaxed);
}

void RankGroup::post(std::uint32_t kind, std::uint32_t note) {
    Line& own = line(rank_);
    own.kinds[posted_ % slots].store(kind, std::memory_order_relaxed);
    own.notes[posted_ % slots].store(note, std::memory_order_relaxed);
    // Both in one order with a sleeper's: it is seen there, or it sees what was posted.
    own.posted.store(++posted_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) wake_all(own.posted);
}

bool RankGroup::wait(std::uint32_t age) {
    const std::uint32_t number = posted_ - age + 1, place = (posted_ - age) % slots;
    const std::uint32_t kind = line(rank_).kinds[place].load(std::memory_order_relaxed);
    for (int r = 0; r < count_; ++r) {
        if (r == rank_) continue;
        if (!wait_for(line(r), number)) return false;
        if (line(r).kinds[place].load(std::memory_order_relaxed) == kind) continue;
        part();
        return false;
    }
    return !stopped();
}

bool RankGroup::wait_for(Line& other, std::uint32_t number) const {
    const auto there = [&] {
        return static_cast<std::int32_t>(other.posted.load(std::memory_order_acquire) - number) >= 0;
    };
    for (int spins = 0; spins < spins_before_yield; ++spins) {
        if (there()) return true;
        if (stopped()) return false;
        relax();
    }
    for (const auto until = std::chrono::steady_clock::now() + awake; std::chrono::steady_clock::now() < until;) {
        if (there()) return true;
        if (stopped()) return false;
        std::this_thread::yield();
    }
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool found = false;
    for (;;) {
        const std::uint32_t posted = other.posted.load(std::memory_order_seq_cst);
        found = static_cast<std::int32_t>(posted - number) >= 0;
        if (found || stopped()) break;
        sleep_while(other.posted, posted);
    }
    other.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return found;
}

void RankGroup::stop() {
    head_->stopped.store(1, std::memory_order_seq_cst);
    for (int r = 0; r < count_; ++r) wake_all(line(r).posted);
}

void RankGroup::part() {
    apart_.store(true, std::memory_order_relaxed);
    stop();
}

bool RankGroup::stopped() const { return head_->stopped.load(std::memory_order_acquire) != 0; }

void RankGroup::check() const {
    if (apart_.load(std::memory_order_relaxed))
        throw std::runtime_error("another rank computes something else: all ranks have to run the same steps.");
    if (stopped()) throw std::runtime_error("another rank has ended, or the group of ranks was stopped.");
}

void RankGroup::pass(const std::byte* own, std::int64_t bytes, int from, std::byte* out) {
    if (rank_ < 0 || bytes < 1 || (out && (from < 0 || from >= count_)))
        throw std::invalid_argument("ranks pass bytes to each other, from a rank that there is.");
    constexpr std::uint32_t passing = 0x70617373;
    for (std::int64_t at = 0; at < bytes; at += slot_bytes_) {
        const auto part = static_cast<std::size_t>(std::min(slot_bytes_, bytes - at));
        if (own) std::memcpy(slot(rank_), own + at, part);
        post(static_cast<std::uint32_t>(bytes) ^ passing);
        if (!wait(1)) return check();
        if (out) std::memcpy(out + at, slot(from, 1), part);
    }
}

void RankGroup::gather(const std::byte* own, std::int64_t bytes, std::byte* out) {
    if (rank_ < 0) throw std::invalid_argument("who only watches a group of ranks has nothing to share.");
    std::int64_t at = 0;
    do {  // once even for no bytes: it is a barrier then
        const auto part = static_cast<std::size_t>(std::min(slot_bytes_, bytes - at));
        if (part) std::memcpy(slot(rank_), own + at, part);
        post(static_cast<std::uint32_t>(bytes));
        if (!wait(1)) return check();
        for (int r = 0; part && r < count_; ++r) std::memcpy(out + r * bytes + at, slot(r, 1), part);
        at += slot_bytes_;
    } while (at < bytes);
}

}  // namespace penstock
