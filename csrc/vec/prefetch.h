// Asks for memory before it is read.
#pragma once

namespace penstock::PENSTOCK_ISA::vec {

// The cache line at `address`, which may be any, into the second-level cache (locality 2) or the first (3). To the
// compiler a function that only does so is one without effects, whose calls it drops; the empty assembly is an effect.
template <int locality = 2>
static inline void prefetch(const void* address) {
    __builtin_prefetch(address, 0, locality);
    asm volatile("");
}

}  // namespace penstock::PENSTOCK_ISA::vec
