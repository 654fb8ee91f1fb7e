#include "program/huge_memory.h"

#include <cstdint>
#include <cstring>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace penstock {
namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

HugeMemory ordinary(std::size_t bytes) {
    constexpr std::align_val_t alignment{64};
    auto* const at = static_cast<std::byte*>(::operator new(bytes ? bytes : 1, alignment));
    std::memset(at, 0, bytes);
    return {std::shared_ptr<std::byte>(at, [](std::byte* p) { ::operator delete(p, alignment); }), false};
}

}  // namespace

HugeMemory huge_memory(std::size_t bytes) {
#ifdef __linux__
    if (bytes >= huge_page) {
        // One page more than asked for, so that whole pages fit in wherever the mapping begins.
        const std::size_t size = (bytes + 2 * huge_page - 1) / huge_page * huge_page;
        void* const start = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
        const auto at = (reinterpret_cast<std::uintptr_t>(start) + huge_page - 1) / huge_page * huge_page;
        auto* const aligned = reinterpret_cast<std::byte*>(at);
        const bool huge = madvise(aligned, (bytes + huge_page - 1) / huge_page * huge_page, MADV_HUGEPAGE) == 0;
        return {std::shared_ptr<std::byte>(aligned, [start, size](std::byte*) { munmap(start, size); }), huge};
    }
#endif
    return ordinary(bytes);
}

}  // namespace penstock
