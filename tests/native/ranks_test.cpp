// Ranks as threads over one memory: products, columns, tables and experts have the bits of one process, however late a
// rank is, and a group that is stopped lets everybody go.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "packing/packed.h"
#include "program/rank_group.h"
#include "program/team.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

using Floats = std::vector<float>;
using Random = std::mt19937_64;
using Numbers = std::vector<std::int64_t>;

void require(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "failed (%s): %s\n", ops().isa, what.c_str());
    std::exit(1);
}

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Floats normals(Random& random, std::int64_t count) {
    std::normal_distribution<float> draw;
    Floats out(at(count));
    for (float& x : out) x = draw(random);
    return out;
}

Packed pack(const Floats& values, std::int64_t rows, std::int64_t cols, const std::vector<std::int64_t>& ends,
            std::int64_t experts = 1) {
    Packed out = pack_plain(
        {PackedKind::f32, rows, cols, experts, reinterpret_cast<const std::byte*>(values.data()), nullptr, 0, 0});
    out->cut(ends);
    return out;
}

// Columns [first, end) of rows of `cols`.
Floats columns(const Floats& from, std::int64_t cols, std::int64_t first, std::int64_t end) {
    Floats out;
    for (std::int64_t at_row = 0; at_row < static_cast<std::int64_t>(from.size()); at_row += cols)
        out.insert(out.end(), from.begin() + at_row + first, from.begin() + at_row + end);
    return out;
}

constexpr std::int64_t slot_bytes = RankGroup::least_slot_bytes;

// Runs `rank` of each in a thread of its own, all over one memory, so that a sanitizer sees every access.
void ranks(int count, const std::function<void(RankGroup&)>& rank) {
    const auto bytes = at(RankGroup::memory_bytes(count, slot_bytes));
    constexpr std::align_val_t alignment{4096};
    const std::shared_ptr<std::byte> memory(static_cast<std::byte*>(::operator new(bytes, alignment)),
                                            [](std::byte* p) { ::operator delete(p, alignment); });
    std::memset(memory.get(), 0, bytes);
    RankGroup::prepare(memory.get(), count, slot_bytes);
    std::vector<std::thread> threads;
    for (int r = 0; r < count; ++r)
        threads.emplace_back([&, r] {
            RankGroup group(memory, r);
            rank(group);
        });
    for (std::thread& thread : threads) thread.join();
}

constexpr std::int64_t segments = 4, unit = 64, inputs = segments * unit, width = 150, vocabulary = 90, experts = 5;

// A step of all shared ops over T tokens: what it works on, and what one process gives.
struct Step {
    std::int64_t tokens;
    Floats x, weight, bias, residual, table, gates, downs, routed;
    Numbers ids, chosen;
    Floats product, mixed;

    Step(Random& random, std::int64_t count)
        : tokens(count),
          x(normals(random, count * inputs)),
          weight(normals(random, width * inputs)),
          bias(normals(random, width)),
          residual(normals(random, count * width)),
          table(normals(random, vocabulary * width)),
          gates(normals(random, experts * 2 * unit * inputs)),
          downs(normals(random, experts * inputs * 2 * unit)),
          routed(normals(random, 2 * count)),
          product(at(count * width)),
          mixed(at(count * inputs)) {
        for (std::int64_t t = 0; t < count; ++t) {
            ids.push_back(static_cast<std::int64_t>(random() % vocabulary));
            const auto first = static_cast<std::int64_t>(random() % experts);
            chosen.insert(chosen.end(), {first, (first + 2) % experts});
        }
        const Packed whole = pack(weight, width, inputs, {64, 128, 192, 256});
        const PackedMatrix* const part = whole.get();
        const auto [gate, down] = packed_experts(0, experts);
        std::vector<std::byte> scratch(at(std::max(linear_scratch(&part, 1, count), room(*gate, *down)) + 64));
        run_team([&](Worker& worker) {
            ops().linear({&part, 1, x.data(), count, bias.data(), residual.data(), Activation::none, 0, 0,
                          product.data(), aligned(scratch)},
                         worker);
        });
        run_team([&](Worker& worker) { ops().experts(arguments(*gate, *down, mixed, scratch), worker); });
    }

    static std::byte* aligned(std::vector<std::byte>& memory) {
        return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    }
    std::int64_t room(const PackedMatrix& gate, const PackedMatrix& down) const {
        return experts_scratch(gate, gate, down, tokens, 2);
    }
    std::pair<Packed, Packed> packed_experts(std::int64_t first, std::int64_t end) const {
        const auto rows = [&](const Floats& from) {
            const auto each = static_cast<std::int64_t>(from.size()) / experts;
            return Floats(from.begin() + first * each, from.begin() + end * each);
        };
        return {pack(rows(gates), (end - first) * 2 * unit, inputs, {inputs}, end - first),
                pack(rows(downs), (end - first) * inputs, 2 * unit, {2 * unit}, end - first)};
    }
    ExpertsArgs arguments(const PackedMatrix& gate, const PackedMatrix& down, Floats& out,
                          std::vector<std::byte>& scratch) const {
        ExpertsArgs args{
            x.data(), routed.data(), chosen.data(), tokens,           2, &gate, &gate,      &down,
            nullptr,  nullptr,       x.data(),      Activation::silu, 0, 0,     out.data(), aligned(scratch)};
        return args;
    }
};

// What one rank has of a step.
class Rank {
public:
    Rank(const Step& step, RankGroup& group) : step_(step), group_(group), late_(static_cast<unsigned>(group.rank())) {
        const int r = group.rank(), n = group.count();
        first_ = segments * r / n, end_ = segments * (r + 1) / n;
        const Floats own = columns(step.weight, inputs, first_ * unit, end_ * unit);
        std::vector<std::int64_t> ends;
        for (std::int64_t s = first_; s < end_; ++s) ends.push_back((s + 1 - first_) * unit);
        if (!ends.empty()) weight_ = pack(own, width, (end_ - first_) * unit, ends);
        x_ = columns(step.x, inputs, first_ * unit, end_ * unit);
        row_ = vocabulary * r / n;
        const std::int64_t last = vocabulary * (r + 1) / n;
        table_ = pack(Floats(step.table.begin() + row_ * width, step.table.begin() + last * width), last - row_, width,
                      {width});
        expert_ = experts * r / n;
        std::tie(gate_, down_) = step.packed_experts(expert_, experts * (r + 1) / n);
        for (int i = 0; i < n; ++i) widths_.push_back(width * (i + 1) / n - width * i / n);
        scratch_.resize(
            at(std::max(weight_ ? linear_scratch(&part(), 1, step.tokens) : 0, step.room(*gate_, *down_)) + 64));
    }

    void run() {
        const std::int64_t tokens = step_.tokens;
        Floats product(at(tokens * width)), rows(product.size()), all(product.size()), mixed(at(tokens * inputs));
        const std::int64_t column = std::accumulate(widths_.begin(), widths_.begin() + group_.rank(), std::int64_t{0});
        const Floats own = columns(step_.residual, width, column, column + widths_[at(group_.rank())]);
        if (late_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(late_() % 300));
        run_team([&](Worker& worker) {
            ops().shared_linear({weight_.get(), x_.data(), tokens, &group_, first_, segments, width, step_.bias.data(),
                                 step_.residual.data(), product.data(), Step::aligned(scratch_)},
                                worker);
            ops().shared_embedding({table_.get(), step_.ids.data(), tokens, width, 1.0f, row_, &group_, rows.data()},
                                   worker);
            ops().gather_columns({own.data(), tokens, &group_, widths_.data(), all.data()}, worker);
            ExpertsArgs args = step_.arguments(*gate_, *down_, mixed, scratch_);
            args.group = &group_;
            args.first = expert_;
            ops().experts(args, worker);
        });
        require(product == step_.product, "a product of several ranks");
        require(all == step_.residual, "columns of several ranks");
        require(mixed == step_.mixed, "experts of several ranks");
        for (std::int64_t t = 0; t < tokens; ++t)
            require(std::equal(&rows[at(t * width)], &rows[at(t * width)] + width,
                               &step_.table[at(step_.ids[at(t)] * width)]),
                    "rows of several ranks");
    }

private:
    const PackedMatrix* const& part() { return part_ = weight_.get(); }

    const Step& step_;
    RankGroup& group_;
    std::minstd_rand late_;
    std::int64_t first_, end_, row_, expert_;
    Packed weight_, table_, gate_, down_;
    const PackedMatrix* part_ = nullptr;
    Floats x_;
    Numbers widths_;
    std::vector<std::byte> scratch_;
};

void steps_one_after_the_other() {
    Random random(1);
    std::vector<Step> steps;
    for (const std::int64_t tokens : {1, 3, 700}) steps.emplace_back(random, tokens);
    for (const int count : {1, 2, 3, 5})
        ranks(count, [&](RankGroup& group) {
            for (const Step& step : steps) {
                Rank rank(step, group);
                for (int i = 0; i < (step.tokens < 100 ? 15 : 2); ++i) rank.run();
            }
        });
}

void groups_that_stop() {
    ranks(3, [&](RankGroup& group) {
        std::byte own{1}, all[3];
        if (group.rank() == 2) return group.stop();
        bool refused = false;
        try {
            for (;;) group.gather(&own, 1, all);
        } catch (const std::runtime_error&) {
            refused = true;
        }
        require(refused, "who waits is told");
    });
    ranks(2, [&](RankGroup& group) {  // who sleeps, too
        group.post(1);
        if (group.rank() == 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            return group.stop();
        }
        group.wait(1);
        group.post(1);
        require(!group.wait(1), "who sleeps is woken");
    });
}

}  // namespace

int main() {
    for (const int threads : {1, 3}) {
        set_num_threads(threads);
        for (const auto isa : built_isas()) {
            if (select_isa(isa).refusal != Refusal::none) continue;
            steps_one_after_the_other();
            std::printf("%s passed with %d threads\n", ops().isa, threads);
        }
    }
    groups_that_stop();
    return 0;
}
