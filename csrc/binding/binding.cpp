// The only file that knows Python: checks every length and type, releases the GIL, calls the ops in use.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/bindings.h"
#include "ops/philox.h"
#include "ops/sampler_row.h"
#include "packing/encode.h"
#include "program/team.h"
#include "vec/dispatch.h"

namespace nb = nanobind;
using namespace penstock;

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr std::int64_t values_in_chunk = 32768;  // about 10 microseconds of work, far above the cost of sharing it

std::int64_t length(std::size_t size) { return static_cast<std::int64_t>(size); }

void require(bool holds, const std::string& otherwise) {
    if (!holds) throw nb::value_error(otherwise.c_str());
}

// Rows of logits a thread takes at a time.
std::int64_t rows_in_chunk(std::int64_t vocab) { return std::max<std::int64_t>(1, values_in_chunk / vocab); }

SamplerRow make_row(std::int64_t vocab_size, std::uint64_t seed, std::uint32_t sequence, double temperature,
                    std::int64_t top_k, double top_p, double min_p, double typical_p, double repetition_penalty,
                    double presence_penalty, double frequency_penalty, std::int64_t min_tokens,
                    std::vector<std::pair<std::int64_t, double>> logit_bias,
                    std::optional<std::vector<std::int64_t>> allowed_ids,
                    std::vector<std::vector<std::int64_t>> bad_words, std::vector<std::int64_t> stop_ids,
                    std::vector<std::int64_t> prompt_ids, std::vector<std::int64_t> generated_ids,
                    std::vector<std::pair<std::string, std::vector<double>>> chain, nb::bytes breaker_mask,
                    std::vector<std::vector<std::int64_t>> breaker_sequences, std::vector<std::int64_t> protected_ids,
                    std::vector<double> state) {
    RowSettings s;
    s.vocab_size = vocab_size;
    s.seed = seed;
    s.sequence = sequence;
    s.temperature = temperature;
    s.top_k = top_k;
    s.top_p = top_p;
    s.min_p = min_p;
    s.typical_p = typical_p;
    s.repetition_penalty = repetition_penalty;
    s.presence_penalty = presence_penalty;
    s.frequency_penalty = frequency_penalty;
    s.min_tokens = min_tokens;
    s.logit_bias = std::move(logit_bias);
    s.restrict_to_allowed = allowed_ids.has_value();
    if (allowed_ids) s.allowed_ids = std::move(*allowed_ids);
    s.bad_words = std::move(bad_words);
    s.stop_ids = std::move(stop_ids);
    s.prompt_ids = std::move(prompt_ids);
    s.generated_ids = std::move(generated_ids);
    s.chain = std::move(chain);
    s.breaker_mask.assign(breaker_mask.c_str(), breaker_mask.size());
    s.breaker_sequences = std::move(breaker_sequences);
    s.protected_ids = std::move(protected_ids);
    s.state = std::move(state);
    return SamplerRow(s);
}

void check_rows(const std::vector<SamplerRow*>& rows, std::int64_t vocab) {
    for (const SamplerRow* row : rows) {
        require(row != nullptr, "rows holds None.");
        require(row->vocab_size() == vocab, "a row was made for a vocabulary of " + std::to_string(row->vocab_size()) +
                                                ", logits have " + std::to_string(vocab) + " columns.");
    }
    auto sorted = rows;
    std::ranges::sort(sorted);
    require(std::ranges::adjacent_find(sorted) == sorted.end(), "a row appears more than once in one call.");
}

// Tokens and error codes, one each a row. Lists of numbers: arrays of a few rows would take longer to make and to read.
std::pair<std::vector<std::int64_t>, std::vector<int>> sample(Matrix<const float> logits,
                                                              const std::vector<SamplerRow*>& rows,
                                                              const std::vector<std::int64_t>& positions,
                                                              std::optional<Matrix<const std::uint32_t>> masks) {
    const std::int64_t count = length(logits.shape(0)), vocab = length(logits.shape(1));
    require(length(rows.size()) == count && length(positions.size()) == count,
            "logits, rows and positions differ in length.");
    const std::int64_t words = (vocab + 31) / 32;
    if (masks)
        require(length(masks->shape(0)) == count && length(masks->shape(1)) == words,
                "masks must be of shape [rows, ceil(vocabulary / 32)].");
    check_rows(rows, vocab);
    std::vector<RowView> views;
    for (std::int64_t i = 0; i < count; ++i) {
        require(positions[static_cast<std::size_t>(i)] >= 0, "positions holds a negative number.");
        views.push_back(rows[static_cast<std::size_t>(i)]->view(
            logits.data() + i * vocab, masks ? masks->data() + i * words : nullptr,
            static_cast<std::uint64_t>(positions[static_cast<std::size_t>(i)])));
    }
    std::vector<SampledRow> sampled(rows.size());
    {
        nb::gil_scoped_release release;
        const OpTable& table = ops();
        parallel_for(count, rows_in_chunk(std::max<std::int64_t>(vocab, 1)), [&](std::int64_t begin, std::int64_t end) {
            const Scratch scratch = thread_scratch(vocab);
            for (std::int64_t i = begin; i < end; ++i) {
                const auto row = static_cast<std::size_t>(i);
                sampled[row] = table.sample_row(views[row], vocab, scratch);
            }
        });
    }
    std::vector<std::int64_t> tokens(rows.size());
    std::vector<int> errors(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
        tokens[i] = sampled[i].token;
        errors[i] = static_cast<int>(sampled[i].error);
        if (tokens[i] >= 0) rows[i]->take(sampled[i]);
    }
    return {std::move(tokens), std::move(errors)};
}

// The places starts[i] … starts[i + 1] - 1 of row i are drawn one after the other while the token is the expected one.
void verify(Matrix<const float> logits, const std::vector<SamplerRow*>& rows, Vector<const std::int64_t> starts,
            Vector<const std::int64_t> expected, Vector<const std::int64_t> positions, Vector<std::int64_t> tokens,
            Vector<std::uint8_t> errors, std::optional<Matrix<const std::uint32_t>> masks) {
    const std::int64_t places = length(logits.shape(0)), vocab = length(logits.shape(1)), count = length(rows.size());
    require(length(starts.shape(0)) == count + 1 && length(positions.shape(0)) == count &&
                length(expected.shape(0)) == places && length(tokens.shape(0)) == places &&
                length(errors.shape(0)) == places,
            "logits, rows, drafts and positions differ in length.");
    const std::int64_t words = (vocab + 31) / 32;
    if (masks)
        require(length(masks->shape(0)) == places && length(masks->shape(1)) == words,
                "masks must be of shape [places, ceil(vocabulary / 32)].");
    require(starts.data()[0] == 0 && starts.data()[count] == places, "starts do not cover the places.");
    for (std::int64_t i = 0; i < count; ++i) {
        require(positions.data()[i] >= 0, "positions holds a negative number.");
        require(starts.data()[i] < starts.data()[i + 1], "a row has no place.");
    }
    check_rows(rows, vocab);
    std::fill_n(tokens.data(), places, -1);
    std::fill_n(errors.data(), places, static_cast<std::uint8_t>(RowError::none));
    nb::gil_scoped_release release;
    const OpTable& table = ops();
    parallel_for(count, rows_in_chunk(std::max<std::int64_t>(vocab, 1)), [&](std::int64_t begin, std::int64_t end) {
        const Scratch scratch = thread_scratch(vocab);
        for (std::int64_t i = begin; i < end; ++i) {
            SamplerRow& row = *rows[static_cast<std::size_t>(i)];
            const std::int64_t first = starts.data()[i];
            for (std::int64_t at = first; at < starts.data()[i + 1]; ++at) {
                const RowView view = row.view(logits.data() + at * vocab, masks ? masks->data() + at * words : nullptr,
                                              static_cast<std::uint64_t>(positions.data()[i] + at - first));
                const SampledRow out = table.sample_row(view, vocab, scratch);
                tokens.data()[at] = out.token;
                errors.data()[at] = static_cast<std::uint8_t>(out.error);
                if (out.token < 0) break;
                row.take(out);
                if (out.token != expected.data()[at]) break;
            }
        }
    });
}

void logprobs(Matrix<const float> logits, Vector<const std::int64_t> targets, Vector<double> values,
              Vector<std::int64_t> ranks, Matrix<std::int32_t> top_ids, Matrix<double> top_values,
              Vector<std::uint8_t> errors) {
    const std::int64_t count = length(logits.shape(0)), vocab = length(logits.shape(1)), top = length(top_ids.shape(1));
    require(length(targets.shape(0)) == count && length(values.shape(0)) == count && length(ranks.shape(0)) == count &&
                length(errors.shape(0)) == count && length(top_ids.shape(0)) == count &&
                length(top_values.shape(0)) == count && length(top_values.shape(1)) == top,
            "logits, targets and outputs differ in length.");
    require(top <= vocab, "more alternatives are asked for than the vocabulary has tokens.");
    for (std::int64_t i = 0; i < count; ++i)
        require(targets.data()[i] >= 0 && targets.data()[i] < vocab, "target id " + std::to_string(targets.data()[i]) +
                                                                         " is outside the vocabulary of " +
                                                                         std::to_string(vocab) + ".");
    nb::gil_scoped_release release;
    const OpTable& table = ops();
    parallel_for(count, rows_in_chunk(std::max<std::int64_t>(vocab, 1)), [&](std::int64_t begin, std::int64_t end) {
        const Scratch scratch = thread_scratch(vocab);
        for (std::int64_t i = begin; i < end; ++i) {
            Logprobs out{0.0, 0, top_ids.data() + i * top, top_values.data() + i * top};
            errors.data()[i] = static_cast<std::uint8_t>(
                table.logprobs_row(logits.data() + i * vocab, vocab, targets.data()[i], top, scratch, out));
            values.data()[i] = out.logprob;
            ranks.data()[i] = out.rank;
        }
    });
}

void dequantize_blocks(const std::string& format, Vector<const std::uint8_t> data, Vector<float> out) {
    const auto* at = std::ranges::find(block_layouts, format, &BlockLayout::name);
    require(at != std::end(block_layouts), "block format \"" + format + "\" has no native decoder.");
    const std::int64_t bytes = length(data.shape(0)), blocks = bytes / at->bytes;
    require(bytes % at->bytes == 0, std::to_string(bytes) + " bytes are not whole blocks of " +
                                        std::to_string(at->bytes) + " bytes (" + format + ").");
    require(length(out.shape(0)) == blocks * at->elements,
            std::to_string(blocks) + " blocks of " + format + " decode to " + std::to_string(blocks * at->elements) +
                " values, the output holds " + std::to_string(out.shape(0)) + ".");
    const auto kind = static_cast<BlockFormat>(at - std::begin(block_layouts));
    nb::gil_scoped_release release;
    const OpTable& table = ops();
    parallel_for(blocks, values_in_chunk / at->elements, [&](std::int64_t begin, std::int64_t end) {
        table.dequantize(kind, data.data() + begin * at->bytes, end - begin, out.data() + begin * at->elements);
    });
}

void encode_rows(const std::string& format, Matrix<const float> values, Vector<std::uint8_t> out,
                 std::optional<Vector<const float>> importance) {
    const auto* at = std::ranges::find(block_layouts, format, &BlockLayout::name);
    const auto kind = static_cast<BlockFormat>(at - std::begin(block_layouts));
    require(at != std::end(block_layouts) && has_encoder(kind),
            "block format \"" + format + "\" has no native encoder.");
    const std::int64_t rows = length(values.shape(0)), columns = length(values.shape(1));
    const std::int64_t blocks = columns / at->elements, row_bytes = blocks * at->bytes;
    require(columns % at->elements == 0, "rows of " + std::to_string(columns) + " values are not whole blocks of " +
                                             std::to_string(at->elements) + " (" + format + ").");
    require(
        length(out.shape(0)) == rows * row_bytes,
        std::to_string(rows * row_bytes) + " bytes come out, the output holds " + std::to_string(out.shape(0)) + ".");
    require(!importance || length(importance->shape(0)) == columns,
            "importance must have one weight a column, " + std::to_string(columns) + ".");
    const float* weights = importance ? importance->data() : nullptr;
    nb::gil_scoped_release release;
    const OpTable& table = ops();
    parallel_for(rows, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row)
            table.encode(kind, values.data() + row * columns, weights, blocks, out.data() + row * row_bytes);
    });
}

void raise_refusal(const Verdict& verdict) {
    if (verdict.refusal == Refusal::unknown) throw nb::value_error(verdict.reason.c_str());
    if (verdict.refusal != Refusal::none) throw std::runtime_error(verdict.reason);
}

std::vector<std::string> names(const std::vector<std::string_view>& from) { return {from.begin(), from.end()}; }

std::optional<std::string> refusal(const std::string& isa, std::optional<std::map<std::string, bool>> features) {
    std::vector<Feature> given;
    if (features)
        for (const auto& [name, has] : *features) given.push_back({name, has});
    const Verdict verdict = features ? judge(isa, given) : usable(isa);
    return verdict.refusal == Refusal::none ? std::nullopt : std::optional(verdict.reason);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Penstock's native CPU ops.";
#ifdef NDEBUG
    nb::set_leak_warnings(false);  // what a script still holds when the interpreter ends is no error of the user's
#endif
    using namespace nb::literals;
    bind_packed(m);
    bind_program(m);
    bind_decode(m);
    bind_rank_group(m);
    nb::class_<SamplerRow>(m, "SamplerRow", "What the sampler keeps of one sequence.")
        .def(nb::new_(&make_row), "vocab_size"_a, "seed"_a = 0, "sequence"_a = 0, "temperature"_a = 1.0, "top_k"_a = 0,
             "top_p"_a = 1.0, "min_p"_a = 0.0, "typical_p"_a = 1.0, "repetition_penalty"_a = 1.0,
             "presence_penalty"_a = 0.0, "frequency_penalty"_a = 0.0, "min_tokens"_a = 0,
             "logit_bias"_a = nb::make_tuple(), "allowed_ids"_a = nb::none(), "bad_words"_a = nb::make_tuple(),
             "stop_ids"_a = nb::make_tuple(), "prompt_ids"_a = nb::make_tuple(), "generated_ids"_a = nb::make_tuple(),
             "chain"_a = nb::make_tuple(), "breaker_mask"_a = nb::bytes("", 0),
             "breaker_sequences"_a = nb::make_tuple(), "protected_ids"_a = nb::make_tuple(),
             "state"_a = nb::make_tuple())
        .def("extend", &SamplerRow::extend, "token"_a, "Takes a token that was generated or forced.")
        .def_prop_ro("num_generated", &SamplerRow::num_generated)
        .def_prop_ro("state", [](const SamplerRow& row) { return nb::tuple(nb::cast(row.state())); });
    m.def("sample", &sample, "logits"_a.noconvert(), "rows"_a, "positions"_a, "masks"_a.noconvert() = nb::none(),
          "Draws one token a row and gives it to the row: tokens, and a code each, 0 for no error.");
    m.def("verify", &verify, "logits"_a.noconvert(), "rows"_a, "starts"_a.noconvert(), "expected"_a.noconvert(),
          "positions"_a.noconvert(), "tokens"_a.noconvert(), "errors"_a.noconvert(), "masks"_a.noconvert() = nb::none(),
          "As sample, for several places a row, in order, while the token drawn is the expected one.");
    m.def("logprobs", &logprobs, "logits"_a.noconvert(), "targets"_a.noconvert(), "values"_a.noconvert(),
          "ranks"_a.noconvert(), "top_ids"_a.noconvert(), "top_values"_a.noconvert(), "errors"_a.noconvert(),
          "Log-softmax at the targets, their ranks, and the most probable tokens.");
    m.def("dequantize_blocks", &dequantize_blocks, "format"_a, "data"_a.noconvert(), "out"_a.noconvert(),
          "Decodes whole blocks to float32.");
    m.def("encode_rows", &encode_rows, "format"_a, "values"_a.noconvert(), "out"_a.noconvert(),
          "importance"_a.noconvert() = nb::none(), "Encodes float32 rows to blocks, searching for the scales.");
    m.def("philox4x32", &philox4x32, "counter"_a, "key"_a, "Philox4x32-10.");
    m.def("token_noise", &token_noise, "seed"_a, "sequence"_a, "position"_a, "token"_a,
          "The noise of one token's draw, in units of 2^-40.");
    m.def("isa", [] { return std::string(ops().isa); }, "The instruction set in use.");
    m.def("two_ways", [] { return ops().two_ways; }, "Whether level fast differs from strict on the set in use.");
    m.def("known_isas", [] { return names(known_isas()); }, "Every instruction set with a name, worst first.");
    m.def("built_isas", [] { return names(built_isas()); }, "Those in this build, worst first.");
    m.def("refusal", &refusal, "isa"_a, "features"_a = nb::none(),
          "Why an instruction set cannot be used (on a machine with these features), or None.");
    m.def(
        "select_isa", [](const std::string& isa) { raise_refusal(select_isa(isa)); }, "isa"_a,
        "Uses an instruction set from now on; ValueError: unknown name, RuntimeError: not possible here.");
    m.def(
        "cpu_features",
        [] {
            std::map<std::string, bool> out;
            for (const Feature& f : cpu_features()) out.emplace(f.name, f.usable);
            return out;
        },
        "Which features the processor has and the operating system lets programs use.");
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads, "threads"_a);
}
