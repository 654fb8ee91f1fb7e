// Attention over contexts that lie with several ranks. Each treats its own partitions for the heads of all of them and
// leaves their states in its slots; each takes those of its own heads in the order of positions.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/attention_items.h"
#include "ops/attention_merge.h"
#include "ops/exchange.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::uint32_t attention_op = 5;

class Shared {
public:
    explicit Shared(const SharedAttentionArgs& args)
        : args_(args),
          own_(args.all),
          plan_(*args.all.plan),
          group_(*args.group),
          ranks_(args.all.layout.ranks),
          columns_(padded_value_dim(args.all.layout)) {
        own_.heads = args.own;
    }

    void run(Worker& worker) const {
        const auto rounds = static_cast<std::int64_t>(plan_.rounds.size());
        const std::uint32_t kind = exchange_kind(attention_op, static_cast<std::int64_t>(plan_.dealt.size()), rounds,
                                                 plan_.state_floats << 32 | ranks_);
        exchange(
            group_, rounds, kind, 0, worker, [&](std::int64_t round) { fill(round, worker); },
            [&](std::int64_t round, std::uint32_t age) { take(round, age, worker); });
    }

private:
    const AttentionRound& round_of(std::int64_t index) const { return plan_.rounds[static_cast<std::size_t>(index)]; }

    void fill(std::int64_t index, Worker& worker) const {
        const AttentionRound& round = round_of(index);
        AttentionArgs all = args_.all;
        all.states = reinterpret_cast<float*>(group_.slot(group_.rank()));
        attention_items(all, {round.first_item, round.end_item, round.pieces}, worker);
    }

    void take(std::int64_t index, std::uint32_t age, Worker& worker) const {
        const AttentionRound& round = round_of(index);
        const std::int64_t queries = round.end_query - round.first_query;
        worker.share(queries * args_.own, 4, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i)
                take_query(plan_.dealt[static_cast<std::size_t>(round.first_query + i / args_.own)], i % args_.own,
                           age);
        });
    }

    // The states of one query and one own head, of all ranks that share its context.
    void take_query(const DealtQuery& query, std::int64_t head, std::uint32_t age) const {
        float* const sums = query.kept < 0 ? reinterpret_cast<float*>(thread_memory(
                                                 2, static_cast<std::size_t>(plan_.state_floats) * sizeof(float)))
                                           : plan_.states.get() + (query.kept * args_.own + head) * plan_.state_floats;
        std::int64_t partition = query.first;
        if (query.begins && partition < query.end)
            std::memcpy(sums, left(query, partition++, head, age),
                        static_cast<std::size_t>(plan_.state_floats) * sizeof(float));
        else if (query.begins)
            start_empty(sums);
        for (; partition < query.end; ++partition) take_state(sums, left(query, partition, head, age), columns_);
        if (query.ends) finish(own_, query.token, head, sums, sums[columns_], sums[columns_ + 1]);
    }

    void start_empty(float* sums) const {
        std::fill_n(sums, plan_.state_floats, 0.0f);
        sums[columns_] = -std::numeric_limits<float>::infinity();
    }

    // What the rank that has a partition has left of it.
    const float* left(const DealtQuery& query, std::int64_t partition, std::int64_t head, std::uint32_t age) const {
        const int rank = group_.rank() - static_cast<int>(args_.all.layout.place - partition % ranks_);
        const std::int64_t state = query.state + partition / ranks_ - query.turn;
        return reinterpret_cast<const float*>(group_.slot(rank, age)) +
               (state * args_.all.heads + args_.first + head) * plan_.state_floats;
    }

    const SharedAttentionArgs& args_;
    AttentionArgs own_;
    const AttentionPlan& plan_;
    RankGroup& group_;
    const std::int64_t ranks_, columns_;
};

}  // namespace

void shared_attention(const SharedAttentionArgs& args, Worker& worker) { Shared(args).run(worker); }

}  // namespace penstock::PENSTOCK_ISA
