// Large memory that is read from end to end: in huge pages where the system has them, so that fewer addresses are
// looked up.
#pragma once

#include <cstddef>
#include <memory>

namespace penstock {

struct HugeMemory {
    std::shared_ptr<std::byte> bytes;  // 2 MiB-aligned where that is possible, else 64 bytes; zeros
    bool huge_pages;                   // the system was asked for huge pages and agreed
};

// Throws std::bad_alloc.
HugeMemory huge_memory(std::size_t bytes);

}  // namespace penstock
