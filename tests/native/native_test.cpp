// Runs every op of every instruction set over awkward sizes, for the sanitizers. `make sanitize` builds and runs it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "ops/noise.h"
#include "ops/sampler_row.h"
#include "packing/encode.h"
#include "program/decode_rows.h"
#include "program/team.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

// The codes and scales of blocks give every finite value of `expected` again.
void join_codes(BlockFormat format, const std::vector<std::uint8_t>& data, std::int64_t blocks,
                const std::vector<float>& expected) {
    const CodeInfo& info = code_info(format);
    const std::int64_t elements = block_layout(format).elements;
    std::vector<CodeBlock> split(static_cast<std::size_t>(blocks));
    require(decode_codes(format, data.data(), blocks, split.data()) == (info.bits > 0), "codes of integer formats");
    if (info.bits == 0) return;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const CodeBlock& block = split[i / static_cast<std::size_t>(elements)];
        const std::size_t at = i % static_cast<std::size_t>(elements),
                          group = at / static_cast<std::size_t>(info.group);
        const int code = block.codes[at];
        const auto value = static_cast<float>(info.lut ? info.lut[code & 15] : code - info.zero);
        const auto scale = static_cast<float>(block.sub_scale[group]), least = static_cast<float>(block.sub_min[group]);
        require(code < 1 << info.bits, "codes fit their bits");
        if (!std::isfinite(expected[i])) continue;
        require(block.scale[group] * value - block.minimum[group] == expected[i], "codes give the decoded value");
        if (format == BlockFormat::nvfp4) continue;
        require(block.scale[group] == block.super_scale * info.factor * scale, "both levels give the scale");
        require(block.minimum[group] == block.super_min * least, "both levels give the minimum");
    }
}

// Buffers of exactly the right size, so that a read or write past the end is caught.
void decode_every_format(std::mt19937_64& random) {
    for (int format = 0; format < static_cast<int>(BlockFormat::count); ++format) {
        const BlockLayout& layout = block_layouts[format];
        for (const std::int64_t blocks : {0, 1, 7, 300}) {
            std::vector<std::uint8_t> data(static_cast<std::size_t>(blocks * layout.bytes));
            for (auto& byte : data) byte = static_cast<std::uint8_t>(random());
            std::vector<float> out(static_cast<std::size_t>(blocks * layout.elements));
            ops().dequantize(static_cast<BlockFormat>(format), data.data(), blocks, out.data());
            join_codes(static_cast<BlockFormat>(format), data, blocks, out);
        }
    }
}

RowSettings random_settings(std::mt19937_64& random, std::int64_t vocab) {
    const auto chance = [&] { return random() % 3 == 0; };
    const auto token = [&] { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocab)); };
    RowSettings s;
    s.vocab_size = vocab;
    s.seed = random();
    s.temperature = chance() ? 0.0 : 0.7;
    if (chance()) s.top_k = static_cast<std::int64_t>(random() % 400);
    if (chance()) s.top_p = 0.9;
    if (chance()) s.min_p = 0.01;
    if (chance()) s.typical_p = 0.5;
    if (chance()) s.repetition_penalty = 1.3;
    if (chance()) s.presence_penalty = 0.5;
    if (chance()) s.logit_bias = {{token(), 100.0}, {vocab - 1, -100.0}};
    if (chance()) s.bad_words = {{token()}, {token(), token(), vocab - 1}};
    if (chance()) {
        s.restrict_to_allowed = true;
        s.allowed_ids = {0, token(), vocab - 1};
    }
    s.min_tokens = 2;
    s.stop_ids = {token()};
    s.prompt_ids = {0, vocab - 1};
    return s;
}

// What is encoded decodes to finite values near the original, for ordinary, zero, huge and tiny rows.
void encode_every_format(std::mt19937_64& random) {
    for (int format = 0; format < static_cast<int>(BlockFormat::count); ++format) {
        const auto kind = static_cast<BlockFormat>(format);
        if (!has_encoder(kind)) continue;
        const BlockLayout& layout = block_layout(kind);
        for (const float size : {0.0f, 1e-30f, 0.02f, 1e4f})
            for (const bool weighed : {false, true}) {
                std::vector<float> values(static_cast<std::size_t>(3 * layout.elements)), weights(values.size());
                for (auto& x : values) x = size * (static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
                for (auto& w : weights) w = static_cast<float>(random() % 100);
                std::vector<std::uint8_t> data(static_cast<std::size_t>(3 * layout.bytes));
                std::vector<float> out(values.size());
                ops().encode(kind, values.data(), weighed ? weights.data() : nullptr, 3, data.data());
                ops().dequantize(kind, data.data(), 3, out.data());
                for (std::size_t i = 0; i < out.size(); ++i)
                    require(std::fabs(out[i] - values[i]) <= 2.5f * size, "encoded values");
            }
    }
}

void sample_every_size(std::mt19937_64& random) {
    for (const std::int64_t vocab : {1, 2, 7, 8, 9, 31, 33, 1023, 1024, 1025, 5000}) {
        std::vector<float> logits(static_cast<std::size_t>(vocab));
        for (int round = 0; round < 60; ++round) {
            for (auto& x : logits) x = static_cast<float>(static_cast<double>(random() % 2000) / 100.0 - 10.0);
            if (round % 5 == 0) logits[random() % logits.size()] = -std::numeric_limits<float>::infinity();
            if (round % 11 == 0) logits[random() % logits.size()] = std::nanf("");
            SamplerRow row(random_settings(random, vocab));
            const Scratch scratch = thread_scratch(vocab);
            for (std::uint64_t position = 0; position < 4; ++position) {
                const SampledRow got = ops().sample_row(row.view(logits.data(), nullptr, position), vocab, scratch);
                require((got.error == RowError::none) == (got.token >= 0 && got.token < vocab), "token or error");
                if (got.token >= 0) row.extend(got.token);
            }
            const std::int64_t top = vocab < 20 ? vocab : 20;
            std::vector<std::int32_t> ids(static_cast<std::size_t>(top));
            std::vector<double> values(static_cast<std::size_t>(top));
            Logprobs out{0.0, 0, ids.data(), values.data()};
            ops().logprobs_row(logits.data(), vocab, vocab - 1, top, scratch, out);
        }
    }
}

void noise_within_its_range() {
    const double unit = static_cast<double>(std::int64_t{1} << noise_bits);
    std::int64_t before = std::numeric_limits<std::int64_t>::min();
    for (std::uint64_t bits = 0; bits <= 0xffffffffu; bits += bits < 4096 || bits > 0xfffff000u ? 1 : 65521) {
        const std::int64_t noise = gumbel(static_cast<std::uint32_t>(bits));
        const double uniform = (2.0 * static_cast<double>(bits) + 1.0) * 0x1p-33;
        const double exact = -std::log(-std::log1p(uniform - 1.0));
        require(std::fabs(static_cast<double>(noise) / unit - exact) < 0x1p-28, "noise as its formula says");
        require(noise >= before, "noise rises with its bits");
        require(least_noise * unit < static_cast<double>(noise) && static_cast<double>(noise) < most_noise * unit,
                "noise within its range");
        before = noise;
    }
}

void share_work() {
    for (const int threads : {1, 2, 7, 9}) {
        set_num_threads(threads);
        for (const std::int64_t count : {0, 1, 3, 1001}) {  // fewer than members, and more members than ranges
            std::vector<int> once(static_cast<std::size_t>(count)), again = once;
            run_team([&](Worker& worker) {
                worker.share_neighbours(count, 4, [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; ++i) ++once[static_cast<std::size_t>(i)];
                });
                worker.share_neighbours(count, 1, [&](std::int64_t begin, std::int64_t end) {
                    for (std::int64_t i = begin; i < end; ++i)  // what the others have finished is there
                        again[static_cast<std::size_t>(i)] += once[static_cast<std::size_t>(count - 1 - i)];
                });
            });
            for (const int times : again) require(times == 1, "every neighbour once, and seen by all");
        }
        std::vector<int> touched(1001);
        parallel_for(1001, 10, [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t i = begin; i < end; ++i) ++touched[static_cast<std::size_t>(i)];
        });
        for (const int times : touched) require(times == 1, "every item once");
        bool thrown = false;
        try {
            parallel_for(100, 1, [](std::int64_t begin, std::int64_t end) {
                if (begin <= 50 && 50 < end) throw std::runtime_error("fifty");
            });
        } catch (const std::runtime_error&) {
            thrown = true;
        }
        require(thrown, "an exception reaches the caller");
    }
}

// Decode steps of two cache groups: rows whose slots follow each other read the tables in place, others a copy.
void fill_decode_steps() {
    constexpr std::int64_t slots = 4, width = 3, block = 2;
    std::vector<std::int32_t> blocks[2] = {std::vector<std::int32_t>(slots * width), {}};
    for (std::size_t i = 0; i < blocks[0].size(); ++i) blocks[0][i] = static_cast<std::int32_t>(10 + i);
    blocks[1] = blocks[0];
    std::vector<std::int64_t> used[2] = {{1, 2, 3, 2}, {1, 2, 3, 2}};
    DecodeRows rows({{blocks[0].data(), used[0].data()}, {blocks[1].data(), used[1].data()}}, slots, width, block);
    for (const std::vector<std::int64_t>& order : {std::vector<std::int64_t>{1, 2, 3}, {2, 0}, {3}}) {
        rows.begin(static_cast<std::int64_t>(order.size()));
        for (const std::int64_t slot : order) rows.add({slot, 1, 7 * slot, slot % 2 == 0});
        rows.finish(true);
        const StepInputs& step = rows.inputs();
        for (std::size_t r = 0; r < order.size(); ++r) {
            const StepInputs::Group& group = step.groups[1];
            const std::int32_t first = blocks[1][static_cast<std::size_t>(order[r] * width)];
            require(step.token_ids[r] == 7 * order[r] && step.context_len[r] == 2 && step.positions[r] == 1, "a row");
            require(group.slot[r] == first * block + 1, "where a row writes");
            require(group.block_table[static_cast<std::int64_t>(r) * group.table_width] == first, "a row's table");
        }
        require(step.kinds->prompt == (order.size() == 1 ? 0 : order.size() == 3 ? 1 : 2), "rows of kind prompt");
    }
    rows.append(1, 3, 99);
    require(used[1][3] == 3 && blocks[1][11] == 99, "a block behind the last");
    rows.begin(1);
    const auto refused = [](const auto& call) {
        try {
            call();
        } catch (const std::exception&) {
            return true;
        }
        return false;
    };
    require(refused([&] { rows.append(1, 3, 98); }) && refused([&] { rows.append(0, slots, 98); }), "a full table");
    require(refused([&] { rows.add({0, 2, 1, false}); }), "a position without a block");
    require(refused([&] { rows.finish(false); }) && refused([&] { rows.begin(slots + 1); }), "rows that are not there");
}

}  // namespace

int main() {
    for (const auto isa : built_isas()) {
        if (select_isa(isa).refusal != Refusal::none) continue;
        std::mt19937_64 random(1);
        decode_every_format(random);
        encode_every_format(random);
        sample_every_size(random);
        std::printf("%s passed\n", ops().isa);
    }
    share_work();
    noise_within_its_range();
    fill_decode_steps();
    bool thrown = false;
    try {
        RowSettings s;
        s.vocab_size = 4;
        s.stop_ids = {4};
        SamplerRow row(s);
    } catch (const std::invalid_argument&) {
        thrown = true;
    }
    require(thrown, "a token outside the vocabulary is refused");
    return 0;
}
