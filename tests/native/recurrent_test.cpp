// Recurrent ops and adapters on memory that ends with the last value: whole rows and single tokens give the same bits.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "ops/adapter_table.h"
#include "ops/model_ops.h"
#include "program/team.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s, %s\n", ops().isa, what);
    std::exit(1);
}

Floats normals(std::int64_t count) {
    static std::mt19937_64 random(5);
    std::normal_distribution<float> draw;
    Floats out(at(count));
    for (float& x : out) x = draw(random);
    return out;
}

template <class Args>
void run(void (*op)(const Args&, Worker&), const Args& args) {
    run_team([&](Worker& worker) { op(args, worker); });
}

// Runs step(first token, rows, state, out) over two rows of `tokens` at once, then a token at a time, and compares. Row
// 0 keeps its state in slot 1, row 1 in slot 0; both find NaN there.
template <class F>
void whole_and_single(std::int64_t tokens, std::int64_t state_size, std::int64_t width, const char* what, F&& step) {
    const std::vector<std::int64_t> slots = {1, 0};
    const Ints starts = {0, static_cast<std::int32_t>(tokens), static_cast<std::int32_t>(2 * tokens)};
    const Ints lengths(2, static_cast<std::int32_t>(tokens));
    Floats state(at(2 * state_size), NAN), out(at(2 * tokens * width));
    step(0, StateRows{starts.data(), lengths.data(), slots.data(), 2}, state.data(), out.data());
    for (const float x : out) require(std::isfinite(x), what);
    Floats other(state.size(), NAN), one(at(width));
    for (std::int64_t row = 0; row < 2; ++row)
        for (std::int64_t t = 0; t < tokens; ++t) {
            const Ints start = {0, 1}, length = {static_cast<std::int32_t>(t + 1)};
            const std::int64_t token = row * tokens + t;
            step(token, StateRows{start.data(), length.data(), &slots[at(row)], 1}, other.data(), one.data());
            for (std::int64_t i = 0; i < width; ++i) require(one[at(i)] == out[at(token * width + i)], what);
        }
    require(state == other, what);
}

void convolution(std::int64_t channels, std::int64_t taps) {
    const std::int64_t tokens = 6;
    const Floats x = normals(2 * tokens * 3 * channels), weight = normals(taps * channels), bias = normals(channels);
    whole_and_single(tokens, (taps - 1) * channels, channels, "convolution",
                     [&](std::int64_t token, const StateRows& rows, float* state, float* out) {
                         const auto part = [&](int i) {
                             return Columns{x.data() + token * 3 * channels + i * channels, 3 * channels};
                         };
                         run(ops().short_conv, {part(0), part(1), part(2), weight.data(), bias.data(), taps, channels,
                                                true, rows, state, out});
                     });
}

void scan(std::int64_t heads, std::int64_t groups, std::int64_t size, std::int64_t states, bool per_channel) {
    const std::int64_t tokens = 5, width = heads * size, steps = per_channel ? width : heads;
    const Floats x = normals(2 * tokens * width), dt = normals(2 * tokens * steps),
                 b = normals(2 * tokens * groups * states);
    const Floats c = normals(2 * tokens * groups * states), bias = normals(steps), skip = normals(steps);
    Floats a = normals(per_channel ? states * width : heads);
    for (float& value : a) value = -std::fabs(value);
    whole_and_single(tokens, width * states, width, "scan",
                     [&](std::int64_t token, const StateRows& rows, float* state, float* out) {
                         const auto part = [&](const Floats& of, std::int64_t wide) {
                             return Columns{of.data() + token * wide, wide};
                         };
                         run(ops().selective_scan,
                             {part(x, width), part(dt, steps), part(b, groups * states), part(c, groups * states),
                              part(x, width), a.data(), bias.data(), skip.data(), per_channel, 0.0f, 10.0f, heads,
                              groups, size, states, rows, state, out});
                     });
}

void delta(std::int64_t heads, std::int64_t key_heads, std::int64_t dim, std::int64_t size) {
    const std::int64_t tokens = 5, keys = key_heads * dim, width = heads * size;
    const Floats q = normals(2 * tokens * keys), k = normals(2 * tokens * keys), v = normals(2 * tokens * width);
    const Floats step = normals(2 * tokens * heads), beta = normals(2 * tokens * heads), a(at(heads), -0.5f);
    whole_and_single(tokens, width * dim, width, "delta rule",
                     [&](std::int64_t token, const StateRows& rows, float* state, float* out) {
                         const auto part = [&](const Floats& of, std::int64_t wide) {
                             return Columns{of.data() + token * wide, wide};
                         };
                         run(ops().delta_rule,
                             {part(q, keys), part(k, keys), part(v, width), part(step, heads), part(beta, heads),
                              a.data(), nullptr, 1e-6f, heads, key_heads, dim, size, false, rows, state, out});
                     });
}

void gated_norm(std::int64_t size, std::int64_t group) {
    const std::int64_t tokens = 3;
    const Floats x = normals(tokens * 2 * size), weight = normals(size);
    for (const bool first : {false, true}) {
        Floats out(at(tokens * size));
        run(ops().gated_norm, {{x.data(), 2 * size},
                               {x.data() + size, 2 * size},
                               weight.data(),
                               tokens,
                               size,
                               group,
                               1e-5f,
                               first,
                               0,
                               out.data()});
        const double g = x[at(size)], gate = g / (1 + std::exp(-g)), squares = [&] {
            double sum = 0;
            for (std::int64_t i = 0; i < group; ++i) {
                const double z = x[at(size + i)], value = x[at(i)] * (first ? z / (1 + std::exp(-z)) : 1.0);
                sum += value * value;
            }
            return sum;
        }();
        const double want = x[0] * gate * weight[0] / std::sqrt(squares / static_cast<double>(group) + 1e-5);
        require(std::fabs(want - out[0]) < 1e-5 * (1 + std::fabs(want)), "gated norm");
    }
}

void adapters(std::int64_t inputs, std::int64_t outputs, std::int64_t rank) {
    const std::int64_t tokens = 11;
    const Floats x = normals(tokens * inputs), down = normals(rank * inputs), up = normals(rank * outputs);
    AdapterTable table(3, inputs, outputs, rank);
    table.set(2, {down.data(), up.data(), rank, 0.25f, FloatType::f32});
    std::vector<std::int64_t> slots(at(tokens), 2);
    slots[2] = 0;
    const Floats scales(at(tokens), 1.0f);
    Floats out(at(tokens * outputs), 1.0f), scratch(at(tokens * rank));
    run(ops().adapter, {x.data(), inputs, &table, slots.data(), scales.data(), 1, nullptr, tokens, outputs, 0,
                        out.data(), scratch.data()});
    for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t o = 0; o < outputs; ++o) {
            double want = 1.0, size = 1.0;
            for (std::int64_t r = 0; r < rank && t != 2; ++r) {
                double low = 0.0;
                for (std::int64_t i = 0; i < inputs; ++i)
                    low += double(x[at(t * inputs + i)]) * down[at(r * inputs + i)];
                want += 0.25 * low * up[at(r * outputs + o)];
                size += std::fabs(low * up[at(r * outputs + o)]);
            }
            require(std::fabs(want - out[at(t * outputs + o)]) < 1e-5 * size, "adapter");
        }
    const std::vector<std::int64_t> some = {10, 2, 0};
    Floats rows, part(at(3 * outputs), 1.0f);
    for (const std::int64_t t : some) rows.insert(rows.end(), x.begin() + t * inputs, x.begin() + (t + 1) * inputs);
    run(ops().adapter, {rows.data(), inputs, &table, slots.data(), scales.data(), 1, some.data(), 3, outputs, 0,
                        part.data(), scratch.data()});
    for (std::int64_t i = 0; i < 3; ++i)
        for (std::int64_t o = 0; o < outputs; ++o)
            require(part[at(i * outputs + o)] == out[at(some[at(i)] * outputs + o)], "an adapter over some tokens");
}

}  // namespace

int main() {
    for (const auto isa : built_isas()) {
        if (select_isa(isa).refusal != Refusal::none) continue;
        for (const int threads : {1, 3}) {
            set_num_threads(threads);
            for (const std::int64_t channels : {1, 16, 65, 200})
                for (const std::int64_t taps : {2, 3, 4}) convolution(channels, taps);
            scan(3, 1, 64, 9, false);
            scan(4, 2, 70, 5, false);
            scan(1, 1, 133, 3, true);
            delta(2, 1, 24, 64);
            delta(3, 3, 17, 75);
            gated_norm(64, 64);
            gated_norm(45, 15);
            adapters(40, 300, 8);
            adapters(7, 5, 3);
        }
        std::printf("%s passed\n", ops().isa);
    }
    return 0;
}
