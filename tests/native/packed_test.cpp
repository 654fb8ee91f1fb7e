// Packs random matrices of every kind and runs the ops over them: every instruction set, awkward sizes, exact buffers.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "packing/packed.h"
#include "program/team.h"
#include "vec/dispatch.h"

using namespace penstock;

namespace {

using Floats = std::vector<float>;
using Random = std::mt19937_64;

void require(bool holds, const std::string& what) {
    if (holds) return;
    std::fprintf(stderr, "failed (%s): %s\n", ops().isa, what.c_str());
    std::exit(1);
}

// A matrix of floats and its packing.
struct Sample {
    std::string name;
    Packed packed;
    Floats values;  // [experts · rows, cols]
};

bool same(const float* a, const float* b, std::int64_t count) {
    return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}

float normal(Random& random) { return std::normal_distribution<float>()(random); }

Floats random_floats(Random& random, std::int64_t count, float scale = 1.0f) {
    Floats out(static_cast<std::size_t>(count));
    for (auto& x : out) x = normal(random) * scale;
    return out;
}

// Random blocks whose values are of ordinary size.
std::vector<std::uint8_t> random_blocks(Random& random, BlockFormat format, std::int64_t count, Floats& values) {
    const BlockLayout& layout = block_layout(format);
    std::vector<std::uint8_t> out(static_cast<std::size_t>(count * layout.bytes));
    values.resize(static_cast<std::size_t>(count * layout.elements));
    for (std::int64_t b = 0; b < count; ++b) {
        std::uint8_t* const block = out.data() + b * layout.bytes;
        float* const at = values.data() + b * layout.elements;
        do {
            for (std::int64_t i = 0; i < layout.bytes; ++i) block[i] = static_cast<std::uint8_t>(random());
            ops().dequantize(format, block, 1, at);
        } while (!std::all_of(at, at + layout.elements, [](float x) { return std::fabs(x) < 1e3f; }));
    }
    return out;
}

void add_block_samples(Random& random, std::vector<Sample>& out) {
    for (int i = 0; i < static_cast<int>(BlockFormat::count); ++i) {
        const auto format = static_cast<BlockFormat>(i);
        const BlockLayout& layout = block_layout(format);
        for (const std::int64_t blocks : {1, 9}) {
            const std::int64_t rows = blocks == 1 ? 5 : 70;
            const std::int64_t cols = layout.elements == 1 ? blocks * 37 : layout.elements * blocks;
            Sample sample{layout.name, nullptr, {}};
            const auto data = random_blocks(random, format, rows * cols / layout.elements, sample.values);
            sample.packed = pack_blocks(format, rows, cols, 1, data.data());
            out.push_back(std::move(sample));
        }
    }
}

// Scales that are exact in the kind of that number.
float random_scale(Random& random, int kind) {
    const float x = std::fabs(normal(random)) + 0.01f;
    if (kind == 0) return x;
    if (kind == 1) return std::ldexp(std::nearbyint(x * 128), -7);
    return std::ldexp(1.0f, static_cast<int>(random() % 8) - 4);
}

void add_affine_samples(Random& random, std::vector<Sample>& out) {
    const std::int64_t rows = 21;
    for (const int bits : {1, 2, 3, 4, 5, 6, 7, 8})
        for (const std::int64_t group : {16, 32, 48, 128, 512, 272}) {
            const std::int64_t cols = group == 272 ? 272 : group == 48 ? 336 : 1024;
            const int shape = static_cast<int>(random() % 4), kind = static_cast<int>(random() % 2);
            std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols));
            for (auto& code : codes) code = static_cast<std::uint8_t>(random() % (1u << bits));
            const std::int64_t groups = rows * cols / group;
            Floats scales(static_cast<std::size_t>(groups)), minimums = random_floats(random, groups);
            for (auto& scale : scales) scale = random_scale(random, kind);
            std::vector<std::uint8_t> zeros(static_cast<std::size_t>(groups));
            for (auto& zero : zeros) zero = static_cast<std::uint8_t>(random() % (1u << bits));
            std::vector<std::int32_t> order(static_cast<std::size_t>(cols));
            for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<std::int32_t>(k);
            std::ranges::shuffle(order, random);
            const bool ordered = group == 128;
            const AffineSource source{rows,
                                      cols,
                                      1,
                                      group,
                                      bits,
                                      shape == 0 ? 1 << (bits - 1) : 0,
                                      codes.data(),
                                      scales.data(),
                                      shape == 1 ? zeros.data() : nullptr,
                                      shape == 3 ? minimums.data() : nullptr,
                                      shape == 2 ? minimums.data() : nullptr,
                                      ordered ? order.data() : nullptr};
            Sample sample{"affine " + std::to_string(bits) + "/" + std::to_string(group), pack_affine(source),
                          codes.size() ? Floats(codes.size()) : Floats{}};
            for (std::int64_t i = 0; i < rows * cols; ++i) {
                const auto g = static_cast<std::size_t>(i / group), at = static_cast<std::size_t>(i);
                const float zero = shape == 3 ? minimums[g] : static_cast<float>(shape == 1 ? zeros[g] : source.zero);
                const float value = scales[g] * (static_cast<float>(codes[at]) - zero);
                const std::int64_t k = ordered ? order[at % order.size()] : i % cols;
                sample.values[static_cast<std::size_t>(i / cols * cols + k)] = shape == 2 ? value + minimums[g] : value;
            }
            out.push_back(std::move(sample));
        }
}

// Inputs whose codes have fewer and fewer bits, and scales that are squares times a number of the group.
void add_sorted_samples(Random& random, std::vector<Sample>& out) {
    for (const std::int64_t group : {16, 32, 64}) {
        const std::int64_t rows = 37, cols = 7 * 64 + group;
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols));
        Floats scales(static_cast<std::size_t>(rows * cols / group)), values(codes.size());
        std::vector<std::int32_t> order(static_cast<std::size_t>(cols));
        for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<std::int32_t>(order.size() - 1 - k);
        for (std::int64_t i = 0; i < rows * cols; ++i) {
            const std::int64_t k = i % cols, bits = std::max<std::int64_t>(1, 8 - k / 64), g = k / group;
            const auto at = static_cast<std::size_t>(i), scale = static_cast<std::size_t>(i / group);
            codes[at] = static_cast<std::uint8_t>(128 + static_cast<int>(random() % (1u << bits)) - (1 << (bits - 1)));
            if (i % group == 0) {
                const float root = static_cast<float>(random() % 16 + 1);
                scales[scale] = root * root * static_cast<float>(g + 3) / 1024;
            }
            values[static_cast<std::size_t>(i - k + order[static_cast<std::size_t>(k)])] =
                scales[scale] * static_cast<float>(codes[at] - 128);
        }
        const AffineSource source{rows,         cols,          1,       group,   8,       128,
                                  codes.data(), scales.data(), nullptr, nullptr, nullptr, order.data()};
        out.push_back({"sorted by width/" + std::to_string(group), pack_affine(source), values});
        require(out.back().packed->widths() != nullptr, "widths differ");
    }
}

void add_codebook_samples(Random& random, std::vector<Sample>& out) {
    const std::int64_t rows = 33, cols = 320;
    for (const int integer : {0, 1})
        for (const std::int64_t group : {16, 32, 64, 320}) {
            float table[16];
            for (int i = 0; i < 16; ++i) table[i] = integer ? static_cast<float>(i * i - 60) * 0.25f : normal(random);
            std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * cols));
            for (auto& code : codes) code = static_cast<std::uint8_t>(random() % 16);
            Floats scales(static_cast<std::size_t>(rows * cols / group));
            for (auto& scale : scales) scale = random_scale(random, group == 32 ? 2 : 0);
            Sample sample{"codebook", pack_codebook({rows, cols, 1, group, codes.data(), table, scales.data()}),
                          Floats(codes.size())};
            for (std::size_t i = 0; i < codes.size(); ++i)
                sample.values[i] = scales[i / static_cast<std::size_t>(group)] * table[codes[i]];
            out.push_back(std::move(sample));
        }
}

void add_plain_samples(Random& random, std::vector<Sample>& out) {
    const std::int64_t rows = 40, cols = 131;
    for (const auto kind : {PackedKind::f32, PackedKind::bf16, PackedKind::f8_e4m3})
        for (const std::int64_t tile : {0, 1, 24}) {
            const std::int64_t tile_rows = tile == 24 ? 24 : 1, tile_cols = tile == 24 ? 50 : cols;
            const Floats exact = random_floats(random, rows * cols);
            std::vector<std::byte> data;
            Floats plain(exact.size());
            for (std::size_t i = 0; i < exact.size(); ++i) {
                const float power = std::ldexp(std::copysign(1.0f, exact[i]), static_cast<int>(random() % 9) - 5);
                plain[i] = kind == PackedKind::f32 ? exact[i] : power;
                std::byte bytes[4];
                std::memcpy(bytes, &plain[i], 4);
                if (kind == PackedKind::f32) data.insert(data.end(), bytes, bytes + 4);
                if (kind == PackedKind::bf16) data.insert(data.end(), bytes + 2, bytes + 4);
                if (kind == PackedKind::f8_e4m3)
                    data.push_back(static_cast<std::byte>((power < 0 ? 128 : 0) | (std::ilogb(power) + 7) << 3));
            }
            const std::int64_t tiles = (cols + tile_cols - 1) / tile_cols;
            const Floats scales = random_floats(random, (rows + tile_rows - 1) / tile_rows * tiles);
            Sample sample{
                "plain",
                pack_plain({kind, rows, cols, 1, data.data(), tile ? scales.data() : nullptr, tile_rows, tile_cols}),
                plain};
            for (std::int64_t i = 0; tile && i < rows * cols; ++i) {
                const std::int64_t at = i / cols / tile_rows * tiles + i % cols / tile_cols;
                sample.values[static_cast<std::size_t>(i)] *= scales[static_cast<std::size_t>(at)];
            }
            out.push_back(std::move(sample));
        }
}

Floats run_linear(const std::vector<const PackedMatrix*>& parts, const Floats& x, std::int64_t tokens,
                  const float* bias, const float* residual, Activation activation, std::int64_t width) {
    Floats out(static_cast<std::size_t>(tokens * width));
    const int count = static_cast<int>(parts.size());
    const auto bytes = static_cast<std::size_t>(linear_scratch(parts.data(), count, tokens));
    auto* const scratch = static_cast<std::byte*>(::operator new(bytes + 1, std::align_val_t{64}));
    run_team([&](Worker& worker) {
        ops().linear(
            {parts.data(), count, x.data(), tokens, bias, residual, activation, 1.7f, 7.0f, out.data(), scratch},
            worker);
    });
    ::operator delete(scratch, std::align_val_t{64});
    return out;
}

// Half a step of the activations' quantisation for every weight, or both roundings to bfloat16, and those of fp32 sums.
double bound(const float* w, const float* x, std::int64_t cols, bool integer) {
    double out = 0;
    for (std::int64_t first = 0; first < cols; first += 32) {
        double most_w = 0, most_x = 0;
        for (std::int64_t k = first; k < std::min(first + 32, cols); ++k) {
            most_w = std::max(most_w, std::fabs(static_cast<double>(w[k])));
            most_x = std::max(most_x, std::fabs(static_cast<double>(x[k])));
        }
        out += 32 * most_w * most_x * ((ops().two_ways ? 1.0 / 255 : integer ? 0.5 / 127 : 0) + 1e-5);
    }
    return out + 1e-6;
}

void check_linear(const Sample& sample, Random& random) {
    const PackedMatrix& matrix = *sample.packed;
    const std::int64_t rows = matrix.rows(), cols = matrix.cols(), most = 14;
    const Floats x = random_floats(random, most * cols), bias = random_floats(random, rows),
                 residual = random_floats(random, most * rows);
    const Floats all = run_linear({&matrix}, x, most, bias.data(), residual.data(), Activation::none, rows);
    for (std::int64_t t = 0; t < most; ++t)
        for (std::int64_t n = 0; n < rows && !matrix.order(); ++n) {
            double sum = static_cast<double>(bias[static_cast<std::size_t>(n)]) +
                         static_cast<double>(residual[static_cast<std::size_t>(t * rows + n)]);
            const float *w = sample.values.data() + n * cols, *a = x.data() + t * cols;
            for (std::int64_t k = 0; k < cols; ++k) sum += static_cast<double>(w[k]) * static_cast<double>(a[k]);
            const double error = std::fabs(sum - static_cast<double>(all[static_cast<std::size_t>(t * rows + n)]));
            require(error <= bound(w, a, cols, matrix.integer()), sample.name + ": linear is near its reference");
        }
    for (const std::int64_t tokens : {1, 2, 5, 7})
        require(same(run_linear({&matrix}, x, tokens, bias.data(), residual.data(), Activation::none, rows).data(),
                     all.data(), tokens * rows),
                sample.name + ": a row does not depend on how many there are");
    if (rows % 2 == 0) {
        const Floats two = run_linear({&matrix, &matrix}, x, 3, nullptr, nullptr, Activation::silu, rows);
        const Floats plain = run_linear({&matrix}, x, 3, nullptr, nullptr, Activation::none, rows);
        for (std::size_t i = 0; i < two.size(); ++i) {
            const double g = plain[i], expected = g / (1 + std::exp(-g)) * g;
            require(std::fabs(two[i] - expected) <= 1e-4 * (1 + std::fabs(expected)), sample.name + ": gated");
        }
    }
}

void check_values(const Sample& sample) {
    const PackedMatrix& matrix = *sample.packed;
    const std::int64_t rows = matrix.rows() * matrix.experts(), cols = matrix.cols();
    Floats row(static_cast<std::size_t>(cols));
    for (std::int64_t n = 0; n < rows; ++n) {
        unpack_row(matrix, n, row.data());
        for (std::int64_t k = 0; k < cols; ++k) {
            const float expected = sample.values[static_cast<std::size_t>(n * cols + k)];
            require(row[static_cast<std::size_t>(k)] == expected,
                    sample.name + " (" + matrix.kind() + "): unpacked values are the reference's");
        }
    }
    const PackedMatrix mapped(matrix.header(), matrix.data(), nullptr);
    require(mapped.kind() == matrix.kind(), "a mapped matrix is the same");
    PackedHeader broken = matrix.header();
    broken.panel_bytes += 64;
    bool refused = false;
    try {
        PackedMatrix(broken, matrix.data(), nullptr);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    require(refused, "a damaged header is refused");
}

Sample stack(Random& random, BlockFormat format, std::int64_t experts, std::int64_t rows, std::int64_t cols) {
    Sample out{block_layout(format).name, nullptr, {}};
    const auto data = random_blocks(random, format, experts * rows * cols / block_layout(format).elements, out.values);
    out.packed = pack_blocks(format, experts * rows, cols, experts, data.data());
    return out;
}

// Experts are the same as dense layers of their rows, added up in order.
void check_experts(Random& random) {
    const std::int64_t experts = 3, inner = 32 * 5, width = 64, tokens = 9, top_k = 2;
    const Sample gate = stack(random, BlockFormat::q4_0, experts, inner, width),
                 up = stack(random, BlockFormat::q8_0, experts, inner, width);
    const Sample down = stack(random, BlockFormat::q5_0, experts, width, inner);
    const Floats x = random_floats(random, tokens * width, 1e-2f), weights = random_floats(random, tokens * top_k);
    const Floats residual = random_floats(random, tokens * width);
    std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens * top_k));
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i % 2 ? random() % 2 : 2);
    // Two of them with one team, as in a program's layers: a member may still be in the first when others begin the
    // second.
    const auto run = [&](std::int64_t first, std::int64_t count) {
        Floats out(static_cast<std::size_t>(count * width)), again(out.size());
        const auto bytes =
            static_cast<std::size_t>(experts_scratch(*gate.packed, *up.packed, *down.packed, count, top_k));
        auto* const scratch = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}));
        run_team([&](Worker& worker) {
            for (float* const to : {out.data(), again.data()})
                ops().experts({x.data() + first * width, weights.data() + first * top_k, ids.data() + first * top_k,
                               count, top_k, gate.packed.get(), up.packed.get(), down.packed.get(), nullptr, nullptr,
                               residual.data() + first * width, Activation::silu, 0, 0, to, scratch},
                              worker);
        });
        ::operator delete(scratch, std::align_val_t{64});
        require(same(out.data(), again.data(), count * width), "the second of two is the same");
        return out;
    };
    const Floats all = run(0, tokens);
    for (std::int64_t t = 0; t < tokens; ++t) {
        require(same(run(t, 1).data(), all.data() + t * width, width), "a token's experts do not depend on others");
        std::vector<double> sum(residual.begin() + t * width, residual.begin() + (t + 1) * width);
        double size = 0;
        for (std::int64_t k = 0; k < top_k; ++k) {
            const std::int64_t e = ids[static_cast<std::size_t>(t * top_k + k)];
            std::vector<double> hidden(static_cast<std::size_t>(inner));
            for (std::int64_t i = 0; i < inner; ++i) {
                double g = 0, u = 0;
                for (std::int64_t j = 0; j < width; ++j) {
                    const auto at = static_cast<std::size_t>((e * inner + i) * width + j);
                    g += static_cast<double>(gate.values[at]) *
                         static_cast<double>(x[static_cast<std::size_t>(t * width + j)]);
                    u += static_cast<double>(up.values[at]) *
                         static_cast<double>(x[static_cast<std::size_t>(t * width + j)]);
                }
                hidden[static_cast<std::size_t>(i)] = g / (1 + std::exp(-g)) * u;
            }
            for (std::int64_t n = 0; n < width; ++n) {
                double y = 0;
                for (std::int64_t i = 0; i < inner; ++i)
                    y += static_cast<double>(down.values[static_cast<std::size_t>((e * width + n) * inner + i)]) *
                         hidden[static_cast<std::size_t>(i)];
                sum[static_cast<std::size_t>(n)] +=
                    y * static_cast<double>(weights[static_cast<std::size_t>(t * top_k + k)]);
            }
        }
        double error = 0;
        for (std::int64_t n = 0; n < width; ++n) {
            const double expected = sum[static_cast<std::size_t>(n)];
            error += std::pow(expected - static_cast<double>(all[static_cast<std::size_t>(t * width + n)]), 2);
            size += expected * expected;
        }
        require(error <= 1e-3 * size, "experts are near their reference");
    }
}

// One product a head is that of its rows; a part that is rotated comes behind it.
void check_head_linear(Random& random) {
    for (const std::int64_t rotated : {0, 6}) {
        const std::int64_t heads = 3, rows = 32, cols = 64, tokens = 9, from = cols + rotated, to = rows + rotated;
        const Sample weight = stack(random, BlockFormat::q8_0, heads, rows, cols);
        const Floats x = random_floats(random, tokens * heads * from), cos = random_floats(random, tokens * rotated),
                     sin = random_floats(random, tokens * rotated);
        const auto run = [&](std::int64_t first, std::int64_t count) {
            Floats out(static_cast<std::size_t>(count * heads * to));
            const auto bytes = static_cast<std::size_t>(head_linear_scratch(*weight.packed, rotated > 0, count));
            auto* const scratch = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}));
            const Rotation rotation{cos.data() + first * rotated, sin.data() + first * rotated, rotated, false};
            run_team([&](Worker& worker) {
                ops().head_linear(
                    {x.data() + first * heads * from, weight.packed.get(), count, rotation, out.data(), scratch},
                    worker);
            });
            ::operator delete(scratch, std::align_val_t{64});
            return out;
        };
        const Floats all = run(0, tokens);
        for (std::int64_t t = 0; t < tokens; ++t) {
            require(same(run(t, 1).data(), all.data() + t * heads * to, heads * to),
                    "a token's heads do not depend on others");
            for (std::int64_t h = 0; h < heads; ++h) {
                const float* const in = x.data() + (t * heads + h) * from;
                const float* const out = all.data() + (t * heads + h) * to;
                double error = 0, size = 0;
                for (std::int64_t n = 0; n < rows; ++n) {
                    double y = 0;
                    for (std::int64_t k = 0; k < cols; ++k)
                        y += static_cast<double>(weight.values[static_cast<std::size_t>((h * rows + n) * cols + k)]) *
                             static_cast<double>(in[k]);
                    error += std::pow(y - static_cast<double>(out[n]), 2);
                    size += y * y;
                }
                require(error <= 1e-3 * size, "a head's product is near its reference");
                for (std::int64_t i = 0; i < rotated; ++i) {
                    const auto at = static_cast<std::size_t>(t * rotated + i);
                    const float other = in[cols + (i + rotated / 2) % rotated];
                    require(std::fabs(in[cols + i] * cos[at] + other * sin[at] - out[rows + i]) < 1e-5f,
                            "the rotated part");
                }
            }
        }
    }
}

}  // namespace

int main() {
    Random random(3);
    std::vector<Sample> samples;
    add_block_samples(random, samples);
    add_affine_samples(random, samples);
    add_sorted_samples(random, samples);
    add_codebook_samples(random, samples);
    add_plain_samples(random, samples);
    for (const Sample& sample : samples) check_values(sample);
    std::vector<Floats> results;
    for (const auto isa : built_isas()) {
        if (select_isa(isa).refusal != Refusal::none) continue;
        Random fresh(4);
        std::vector<Floats> own;
        for (const Sample& sample : samples) {
            check_linear(sample, fresh);
            own.push_back(run_linear({sample.packed.get()}, random_floats(fresh, 2 * sample.packed->cols()), 2, nullptr,
                                     nullptr, Activation::none, sample.packed->rows()));
        }
        check_experts(fresh);
        check_head_linear(fresh);
        for (std::size_t i = 0; i < own.size() && !results.empty() && !ops().two_ways; ++i)
            require(same(own[i].data(), results[i].data(), static_cast<std::int64_t>(own[i].size())),
                    samples[i].name + ": the same bits on every instruction set");
        if (results.empty() && !ops().two_ways) results = own;
        std::printf("%s passed: %zu matrices\n", ops().isa, samples.size());
    }
    bool refused = false;
    try {
        const std::uint8_t codes[24] = {};
        const float scales[2] = {1.0f, NAN};
        pack_affine({1, 32, 1, 16, 4, 0, codes, scales, nullptr, nullptr, nullptr, nullptr});
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    require(refused, "scales that are not finite are refused");
    return 0;
}
