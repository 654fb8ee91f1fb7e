// How ops over several ranks pass what they have computed: in chunks, of which each rank fills its own slot while it
// still waits for what the others have put into theirs of the chunk before.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "program/rank_group.h"
#include "program/team.h"

namespace penstock {

// What ranks are doing, as they tell each other: of an op and its sizes. Ranks that differ in it are stopped.
inline std::uint32_t exchange_kind(std::uint32_t op, std::int64_t tokens, std::int64_t width, std::int64_t parts) {
    std::uint64_t mixed = op;
    for (const std::int64_t part : {tokens, width, parts})
        mixed = (mixed ^ static_cast<std::uint64_t>(part)) * 0x9e3779b97f4a7c15u, mixed ^= mixed >> 29;
    return static_cast<std::uint32_t>(mixed >> 32);
}

// Calls fill(i), which shares its work among the team, for each of `chunks` chunks, and take(i, age) once all ranks
// have filled chunk i: it lies in slots of that age. All members of all ranks' teams call it with the same arguments.
// Both look at the group only in work that they share: for a member that comes late it is further. Ends early if the
// group is stopped.
template <class Fill, class Take>
void exchange(RankGroup& group, std::int64_t chunks, std::uint32_t kind, std::uint32_t note, Worker& worker,
              Fill&& fill, Take&& take) {
    for (std::int64_t i = 0; i < chunks; ++i) {
        fill(i);
        const auto since = std::chrono::steady_clock::now();
        const bool last = i + 1 == chunks;
        worker.share(1, 1, [&](std::int64_t, std::int64_t) {
            group.post(kind, note);
            if (last || i) group.wait(last ? 1 : 2);
        });
        if (group.stopped()) return;
        if (i) take(i - 1, 2);
        if (last) take(i, 1);
        if (worker.index() == 0) group.add_exchanged(std::chrono::steady_clock::now() - since);
    }
}

}  // namespace penstock
