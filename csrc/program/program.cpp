#include "program/program.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <stdexcept>
#include <string>

#include "ops/attention_plan.h"
#include "program/huge_memory.h"
#include "program/rank_group.h"

namespace penstock {
namespace {

constexpr std::int64_t alignment = 64;
constexpr std::int64_t max_ops = 2048;

std::int64_t aligned(std::int64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

struct Life {
    std::int64_t first = std::numeric_limits<std::int64_t>::max(), last = -1;
};

// Places of the arena that are in use, by offset.
class Places {
public:
    std::int64_t take(std::int64_t bytes, std::int64_t until) {
        std::int64_t at = 0;
        auto before = taken_.begin();
        for (; before != taken_.end() && before->begin - at < bytes; ++before) at = std::max(at, before->end);
        taken_.insert(before, {at, at + bytes, until});
        size = std::max(size, at + bytes);
        return at;
    }
    void release(std::int64_t now) {
        std::erase_if(taken_, [=](const Place& place) { return place.until < now; });
    }
    std::int64_t size = 0;

private:
    struct Place {
        std::int64_t begin, end, until;
    };
    std::vector<Place> taken_;  // ascending
};

void check(std::int64_t given, std::int64_t most, const char* what) {
    if (given < 0 || given > most)
        throw std::invalid_argument("a step of " + std::to_string(given) + " " + what +
                                    " does not fit a program made for " + std::to_string(most) + ".");
}

}  // namespace

Program::Value Program::activation(std::int64_t row_bytes, Extent extent) {
    slots_.push_back({nullptr, row_bytes, extent});
    return static_cast<Value>(slots_.size()) - 1;
}

Program::Value Program::constant(const void* memory) {
    slots_.push_back({const_cast<std::byte*>(static_cast<const std::byte*>(memory))});
    return static_cast<Value>(slots_.size()) - 1;
}

void Program::keep(Value value) { slots_.at(static_cast<std::size_t>(value)).kept = true; }

void Program::add(Op op) {
    if (finished_) throw std::logic_error("the program is finished.");
    if (num_ops() == max_ops) throw std::length_error("a program has room for " + std::to_string(max_ops) + " ops.");
    ops_.push_back(std::move(op));
}

void Program::join(RankGroup& group) {
    if (group.rank() < 0) throw std::invalid_argument("who only watches a group of ranks cannot compute with it.");
    if (std::ranges::find(groups_, &group) == groups_.end()) groups_.push_back(&group);
}

bool Program::stopped() const {
    return std::ranges::any_of(groups_, [](const RankGroup* group) { return group->stopped(); });
}

int Program::add_plan() {
    plans_.push_back(std::make_shared<AttentionPlan>());
    return static_cast<int>(plans_.size()) - 1;
}

void Program::finish(std::int64_t max_tokens, std::int64_t max_logit_rows) {
    if (finished_) throw std::logic_error("the program is finished.");
    max_tokens_ = max_tokens;
    max_logit_rows_ = max_logit_rows;
    place_activations();
    finished_ = true;
}

void Program::place_activations() {
    const auto rows = [&](Extent extent) { return extent == Extent::tokens ? max_tokens_ : max_logit_rows_; };
    std::vector<Life> lives(slots_.size());
    std::int64_t scratch = 0;
    for (std::int64_t at = 0; at < num_ops(); ++at) {
        const Op& op = ops_[static_cast<std::size_t>(at)];
        if (op.scratch) scratch = std::max(scratch, op.scratch(rows(op.extent)));
        for (const auto* values : {&op.reads, &op.writes})
            for (const Value value : *values) {
                if (value == none) continue;
                Life& life = lives[static_cast<std::size_t>(value)];
                life.first = std::min(life.first, at);
                life.last = std::max(life.last, at);
            }
    }
    Places places;
    for (std::int64_t at = 0; at < num_ops(); ++at) {
        places.release(at);
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            Slot& slot = slots_[i];
            if (slot.row_bytes == 0 || lives[i].first != at) continue;
            const std::int64_t until = slot.kept ? num_ops() : lives[i].last;
            slot.offset = places.take(aligned(slot.row_bytes * rows(slot.extent)), until);
        }
    }
    const std::int64_t bytes = places.size + aligned(scratch) + alignment;
    arena_ = huge_memory(static_cast<std::size_t>(bytes)).bytes;
    for (Slot& slot : slots_)
        if (slot.row_bytes != 0) slot.memory = arena_.get() + slot.offset;
    scratch_ = arena_.get() + places.size;
    arena_bytes_ = bytes;
}

void Program::run(const StepInputs& step) {
    if (groups_.empty()) return run_all(step);
    try {
        for (const RankGroup* group : groups_) group->check();
        run_all(step);
    } catch (...) {  // the others would wait for what this rank does not come to
        for (RankGroup* group : groups_) group->stop();
        throw;
    }
    for (const RankGroup* group : groups_) group->check();
}

void Program::run_all(const StepInputs& step) {
    if (!finished_) throw std::logic_error("the program is not finished.");
    check(step.tokens, max_tokens_, "tokens");
    check(step.logit_rows, max_logit_rows_, "logit rows");
    const Frame frame(*this, step);
    if (!seconds_.empty()) return run_measured(frame);
    run_team([&](Worker& worker) {
        for (const Op& op : ops_) {
            if (stopped()) return;
            op.run(frame, worker);
        }
    });
}

void Program::run_measured(const Frame& frame) {
    using Clock = std::chrono::steady_clock;
    const auto since = [](Clock::time_point begun) {
        return std::chrono::duration<double>(Clock::now() - begun).count();
    };
    const auto members = static_cast<std::size_t>(num_threads());
    std::vector<std::vector<double>> waited(members, std::vector<double>(ops_.size(), 0.0));
    const Clock::time_point begun = Clock::now();
    run_team([&](Worker& worker) {
        const auto member = static_cast<std::size_t>(worker.index());
        double* const waits = member < members && !ops_.empty() ? waited[member].data() : nullptr;
        if (waits && member) waits[0] += since(begun);  // until this one had come
        for (std::size_t i = 0; i < ops_.size(); ++i) {
            if (stopped()) return;
            const Clock::time_point start = Clock::now();
            worker.count_waits(waits ? waits + i : nullptr);
            ops_[i].run(frame, worker);
            if (member == 0) seconds_[i] += since(start);
        }
    });
    for (const std::vector<double>& of_member : waited)
        for (std::size_t i = 0; i < ops_.size(); ++i) waited_[i] += of_member[i];
}

}  // namespace penstock
