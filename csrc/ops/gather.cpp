// Columns and rows that lie with several ranks.
#include <algorithm>

#include "ops/exchange.h"
#include "ops/row_chunk.h"
#include "packing/packed.h"
#include "vec/wide.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr std::uint32_t columns_op = 2, rows_op = 3;
constexpr std::int64_t floats_at_once = 16384;  // of a thread

// Numbers [first, end) of all that a rank has, rows one after the other, into its columns of `out`.
void place(const float* from, std::int64_t first, std::int64_t end, std::int64_t width, float* out,
           std::int64_t whole) {
    for (std::int64_t at = first; at < end;) {
        const std::int64_t row = at / width, column = at % width, n = std::min(width - column, end - at);
        std::copy_n(from + (at - first), n, out + row * whole + column);
        at += n;
    }
}

}  // namespace

void gather_columns(const GatherColumnsArgs& args, Worker& worker) {
    RankGroup& group = *args.group;
    const int self = group.rank();
    const int from_rank = args.first, end_rank = args.end ? args.end : group.count();
    std::int64_t whole = 0, widest = 0, taken = 0;
    for (int r = 0; r < group.count(); ++r) {
        whole += args.widths[r];
        widest = std::max(widest, args.widths[r]);
        if (r >= from_rank && r < end_rank) taken += args.widths[r];
    }
    const std::int64_t most = args.tokens * widest;
    if (most == 0) return;
    const std::int64_t room = group.slot_bytes() / 4, chunks = (most + room - 1) / room;
    const auto share = [&](std::int64_t chunk, std::int64_t width, auto&& use) {
        const std::int64_t first = std::min(chunk * room, args.tokens * width),
                           end = std::min(first + room, args.tokens * width);
        worker.share(end - first, floats_at_once, [&](std::int64_t from, std::int64_t to) { use(first, from, to); });
    };
    exchange(
        group, chunks, exchange_kind(columns_op, args.tokens, whole, widest), 0, worker,
        [&](std::int64_t chunk) {
            share(chunk, args.widths[self], [&](std::int64_t first, std::int64_t from, std::int64_t to) {
                std::copy_n(args.x + first + from, to - from, reinterpret_cast<float*>(group.slot(self)) + from);
            });
        },
        [&](std::int64_t chunk, std::uint32_t age) {
            std::int64_t column = 0;
            for (int r = from_rank; r < end_rank; ++r) {
                share(chunk, args.widths[r], [&](std::int64_t first, std::int64_t from, std::int64_t to) {
                    const auto* const slot = reinterpret_cast<const float*>(group.slot(r, age));
                    place(slot + from, first + from, first + to, args.widths[r], args.out + column, taken);
                });
                column += args.widths[r];
            }
        });
}

// Rows go to the first rank's slots, each from the rank that has it.
void shared_embedding(const SharedEmbeddingArgs& args, Worker& worker) {
    RankGroup& group = *args.group;
    if (args.tokens == 0 || args.width == 0) return;
    const std::int64_t room = std::min(args.tokens, group.slot_bytes() / (args.width * 4)),
                       chunks = (args.tokens + room - 1) / room, own = args.table ? args.table->rows() : 0;
    const auto share = [&](std::int64_t chunk, auto&& use) {
        worker.share(std::min(room, args.tokens - chunk * room), row_chunk(args.width),
                     [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t i = begin; i < end; ++i) use(i, chunk * room + i);
                     });
    };
    exchange(
        group, chunks, exchange_kind(rows_op, args.tokens, args.width, 0), 0, worker,
        [&](std::int64_t chunk) {
            share(chunk, [&](std::int64_t i, std::int64_t token) {
                const std::int64_t row = args.token_ids[token] - args.first;
                if (row < 0 || row >= own) return;
                float* const out = reinterpret_cast<float*>(group.slot(0)) + i * args.width;
                unpack_row(*args.table, row, out);
                if (args.scale != 1.0f)
                    for (std::int64_t k = 0; k < args.width; ++k) out[k] *= args.scale;
            });
        },
        [&](std::int64_t chunk, std::uint32_t age) {
            share(chunk, [&](std::int64_t i, std::int64_t token) {
                const auto* const slot = reinterpret_cast<const float*>(group.slot(0, age));
                std::copy_n(slot + i * args.width, args.width, args.out + token * args.width);
            });
        });
}

}  // namespace penstock::PENSTOCK_ISA
