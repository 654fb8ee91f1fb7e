// Norms, activations, routing and the pointwise ops against the formulas in double, over sizes that leave lanes over.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "ops/model_ops.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

using Floats = std::vector<float>;
using Random = std::mt19937_64;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

Floats normals(Random& random, std::int64_t count, float scale = 1.0f) {
    std::normal_distribution<float> draw(0.0f, scale);
    Floats out(at(count));
    for (float& x : out) x = draw(random);
    return out;
}

void near(double want, double have, const char* what, double error = 4e-6) {
    if (std::fabs(want - have) <= error * (1e-3 + std::fabs(want))) return;
    std::fprintf(stderr, "%.9g, not %.9g: ", have, want);
    require(false, what);
}

template <class Args>
void run(void (*op)(const Args&, Worker&), const Args& args) {
    run_team([&](Worker& worker) { op(args, worker); });
}

void norms(Random& random, std::int64_t tokens, std::int64_t size) {
    const Floats x = normals(random, tokens * size), residual = normals(random, tokens * size);
    const Floats weight = normals(random, size), bias = normals(random, size);
    Floats out(x.size()), sum(x.size()), centred(x.size()), plain(x.size());
    run(ops().rms_norm, {x.data(), residual.data(), weight.data(), tokens, size, 1e-5f, out.data(), sum.data()});
    run(ops().rms_norm, {sum.data(), nullptr, weight.data(), tokens, size, 1e-5f, plain.data(), nullptr});
    run(ops().layer_norm, {x.data(), weight.data(), bias.data(), tokens, size, 1e-5f, centred.data()});
    require(plain == out, "a norm of the sum is the norm with a residual");
    for (std::int64_t t = 0; t < tokens; ++t) {
        double squares = 0, mean = 0, spread = 0;
        for (std::int64_t i = t * size; i < (t + 1) * size; ++i) {
            require(sum[at(i)] == x[at(i)] + residual[at(i)], "the residual's sum");
            squares += double(sum[at(i)]) * sum[at(i)];
            mean += x[at(i)];
        }
        mean /= double(size);
        for (std::int64_t i = t * size; i < (t + 1) * size; ++i) spread += (x[at(i)] - mean) * (x[at(i)] - mean);
        for (std::int64_t i = 0; i < size; ++i) {
            const std::size_t j = at(t * size + i);
            near(sum[j] / std::sqrt(squares / double(size) + 1e-5) * weight[at(i)], out[j], "rms norm");
            const double scaled = (x[j] - mean) / std::sqrt(spread / double(size) + 1e-5) * weight[at(i)];
            require(std::fabs(scaled + bias[at(i)] - centred[j]) < 1e-5, "layer norm");
        }
    }
}

double gated(Activation activation, double g, double u, double alpha, double limit) {
    switch (activation) {
        case Activation::silu:
            return g / (1 + std::exp(-g)) * u;
        case Activation::gelu:
            return g * 0.5 * std::erfc(-g / std::sqrt(2.0)) * u;
        case Activation::gelu_tanh:
            return g * 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))) * u;
        case Activation::swigluoai:
            g = std::min(g, limit);
            return g / (1 + std::exp(-alpha * g)) * (std::clamp(u, -limit, limit) + 1);
        case Activation::relu:
            return std::max(g, 0.0) * u;
        case Activation::relu2:
            return std::max(g, 0.0) * std::max(g, 0.0) * u;
        case Activation::clip:
            return std::clamp(g, -limit, limit) * u;
        case Activation::none:
            break;
    }
    return 0;
}

void activations(Random& random, std::int64_t tokens, std::int64_t size) {
    const Floats x = normals(random, tokens * 2 * size, 4.0f);
    Floats out(at(tokens * size));
    for (const auto activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::swigluoai,
                                  Activation::relu, Activation::relu2}) {
        run(ops().gate_up, {x.data(), tokens, size, activation, 1.702f, 7.0f, out.data()});
        for (std::int64_t t = 0; t < tokens; ++t)
            for (std::int64_t i = 0; i < size; ++i) {
                const float gate = x[at(t * 2 * size + i)], up = x[at(t * 2 * size + size + i)];
                // far to the left the tanh form cancels in any precision; it is then near zero
                if (gate > -5)
                    near(gated(activation, gate, up, 1.702f, 7.0), out[at(t * size + i)], "a gated activation", 2e-5);
                else
                    require(std::fabs(gated(activation, gate, up, 1.702f, 7.0) - out[at(t * size + i)]) < 1e-4,
                            "its left end");
            }
    }
}

void pointwise(Random& random, std::int64_t tokens, std::int64_t size) {
    const Floats a = normals(random, tokens * size, 30.0f), b = normals(random, tokens * size);
    Floats sum(a.size()), gated_by(a.size()), capped(a.size()), taken(at(3 * size));
    run(ops().add, {a.data(), b.data(), tokens, size, sum.data()});
    run(ops().sigmoid_gate, {a.data(), b.data(), tokens, size, gated_by.data()});
    run(ops().soft_cap, {a.data(), tokens, size, 20.0f, capped.data()});
    const std::int64_t index[] = {tokens - 1, 0, tokens / 2};
    run(ops().take_rows, {a.data(), index, 3, size, taken.data()});
    for (std::size_t i = 0; i < a.size(); ++i) {
        require(sum[i] == a[i] + b[i], "a sum");
        near(a[i] / (1 + std::exp(-double{b[i]})), gated_by[i], "a sigmoid's gate", 2e-6);
        near(20 * std::tanh(a[i] / 20.0), capped[i], "a soft cap", 1e-6);
    }
    for (const auto activation :
         {Activation::silu, Activation::gelu, Activation::relu, Activation::relu2, Activation::clip}) {
        run(ops().activate, {a.data(), tokens, size, activation, 8.0f, capped.data()});
        for (std::size_t i = 0; i < a.size(); ++i)
            near(gated(activation, a[i], 1, 0, 8.0), capped[i], "an activation", 2e-5);
    }
    for (std::int64_t r = 0; r < 3; ++r)
        for (std::int64_t i = 0; i < size; ++i)
            require(taken[at(r * size + i)] == a[at(index[r] * size + i)], "a row taken");
}

// What several streams of activations are mixed with; parts end where their buffer does.
void streams(Random& random, std::int64_t tokens, std::int64_t size) {
    const std::int64_t stride = size + 3;
    const Floats x = normals(random, tokens * size), like = normals(random, tokens * size, 3.0f);
    const Floats wide = normals(random, tokens * stride), row = normals(random, size);
    const Columns part{wide.data() + 3, stride};
    const auto of_part = [&](std::int64_t t, std::int64_t i) { return wide[at(t * stride + 3 + i)]; };
    Floats product(x.size()), by_row(x.size()), mixed(x.size()), matched(x.size()), kept(x.size());
    run(ops().multiply, {x.data(), part, tokens, size, product.data()});
    run(ops().multiply, {x.data(), {row.data(), 0}, tokens, size, by_row.data()});
    const Columns weights{wide.data() + stride - 2, stride};  // the last two columns
    run(ops().weighted_sum, {x.data(), {like.data(), x.data()}, 2, weights, tokens, size, mixed.data()});
    run(ops().match_rms, {x.data(), like.data(), tokens, size, 1e-5f, matched.data()});
    run(ops().statistical_topk, {part, tokens, size, 0.5f, kept.data()});
    for (std::int64_t t = 0; t < tokens; ++t) {
        double own = 0, wanted = 0, mean = 0, spread = 0;
        for (std::int64_t i = 0; i < size; ++i) {
            own += double(x[at(t * size + i)]) * x[at(t * size + i)];
            wanted += double(like[at(t * size + i)]) * like[at(t * size + i)];
            mean += of_part(t, i) / double(size);
        }
        for (std::int64_t i = 0; i < size; ++i) spread += (of_part(t, i) - mean) * (of_part(t, i) - mean);
        const double cut = mean + 0.5 * std::sqrt(spread / double(size));
        for (std::int64_t i = 0; i < size; ++i) {
            const std::size_t j = at(t * size + i);
            require(product[j] == x[j] * of_part(t, i), "a product");
            require(by_row[j] == x[j] * row[at(i)], "a product with one row");
            const double sum = x[j] + double(weights.at(t)[0]) * like[j] + double(weights.at(t)[1]) * x[j];
            require(std::fabs(sum - mixed[j]) < 2e-5, "a weighted sum");
            near(x[j] * std::sqrt(wanted / std::max(own, 1e-5 * double(size))), matched[j], "a size matched", 1e-5);
            require(std::fabs(std::max(0.0, of_part(t, i) - cut) - kept[j]) < 2e-5, "what lies above the cut");
        }
    }
}

void rotated_heads(Random& random, std::int64_t tokens, std::int64_t heads, std::int64_t dim, std::int64_t rotary) {
    const Floats x = normals(random, tokens * heads * dim), cos = normals(random, tokens * rotary);
    const Floats sin = normals(random, tokens * rotary);
    Floats out(x.size());
    run(ops().rotate_heads, {x.data(), cos.data(), sin.data(), tokens, heads, dim, rotary, out.data()});
    for (std::int64_t t = 0; t < tokens; ++t)
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t i = 0; i < dim; ++i) {
                const std::size_t head = at((t * heads + h) * dim), j = head + at(i), table = at(t * rotary + i);
                const std::int64_t other = (i + rotary / 2) % rotary;
                const double want =
                    i < rotary ? double(x[j]) * cos[table] + double(x[head + at(other)]) * sin[table] : x[j];
                require(std::fabs(want - out[j]) < 1e-5, "a rotated head");
            }
}

void routing(Random& random, std::int64_t tokens, std::int64_t experts, std::int64_t top_k) {
    Floats logits = normals(random, tokens * experts, 2.0f), weights(at(tokens * top_k));
    for (float& x : logits) x = random() % 4 ? x : std::round(x);  // ties
    std::vector<std::int64_t> ids(weights.size()), order(at(experts));
    for (const bool renormalize : {false, true})
        for (const auto how : {Routing::softmax_topk, Routing::topk_softmax}) {
            run(ops().route_experts,
                {logits.data(), tokens, experts, top_k, how, renormalize, weights.data(), ids.data()});
            for (std::int64_t t = 0; t < tokens; ++t) {
                const float* const row = logits.data() + t * experts;
                std::iota(order.begin(), order.end(), 0);
                std::ranges::stable_sort(order, std::greater<>(), [&](std::int64_t e) { return row[e]; });
                const bool chosen_only = how == Routing::topk_softmax || renormalize;
                double total = 0;
                for (std::int64_t e = 0; e < (chosen_only ? top_k : experts); ++e)
                    total += std::exp(double(row[order[at(e)]]));
                for (std::int64_t k = 0; k < top_k; ++k) {
                    require(ids[at(t * top_k + k)] == order[at(k)], "the largest logits, of equals the first");
                    near(std::exp(double(row[order[at(k)]])) / total, weights[at(t * top_k + k)], "an expert's weight");
                }
            }
        }
}

void odd_values() {
    const float nan = std::nanf("");
    const Floats logits(8, nan);
    Floats weights(4);
    std::vector<std::int64_t> ids(4, -1);
    run(ops().route_experts, {logits.data(), 1, 8, 4, Routing::softmax_topk, true, weights.data(), ids.data()});
    for (const auto id : ids) require(id >= 0 && id < 8, "an expert even where all logits are NaN");
    const Floats gate{nan, 1.0f, 1.0f, nan};
    for (const auto activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::swigluoai}) {
        Floats out(2);
        run(ops().gate_up, {gate.data(), 1, 2, activation, 1.702f, 7.0f, out.data()});
        require(std::isnan(out[0]) && std::isnan(out[1]), "NaN stays NaN");
    }
}

}  // namespace

int main() {
    for (const auto isa : built_isas()) {
        if (select_isa(isa).refusal != Refusal::none) continue;
        Random random(3);
        for (const std::int64_t size : {1, 7, 16, 33, 64, 100, 2048}) {
            norms(random, 5, size);
            activations(random, 3, size);
            pointwise(random, 4, size);
            streams(random, 3, size);
        }
        for (const std::int64_t dim : {8, 64, 256}) {
            rotated_heads(random, 3, 2, dim, dim);
            rotated_heads(random, 2, 3, dim, dim / 2);
        }
        routing(random, 9, 8, 2);
        routing(random, 40, 128, 8);
        routing(random, 3, 5, 5);
        odd_values();
        std::printf("%s passed\n", ops().isa);
    }
    return 0;
}
