// The ops of a model's forward pass: what each takes. Every member of a team calls an op with the same arguments; when
// it returns, its results are there for all. T tokens of R rows; activations are float32, contiguous, [T, width].
//
// Determinism: an output row is computed from its own input row alone, in an order fixed by absolute positions, never
// by T, R, the number of threads or the chunk a thread took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "program/team.h"

namespace penstock {

class PackedMatrix;  // packed.h
class RankGroup;     // rank_group.h

// relu2 is relu squared; clip bounds to ±limit.
enum class Activation : int { none, silu, gelu, gelu_tanh, swigluoai, relu, relu2, clip };
// Norms of queries and keys: RMS of each head, RMS over all query heads and over all key heads, mean and variance of
// each head, or RMS of each head after the rotation.
enum class HeadNorm : int { each, all, layer, rotated };
enum class Routing : int { softmax_topk, topk_softmax, sigmoid_topk, sparsemixer };
// Which tokens of its context a row's queries see: those up to their own; all; all of another sequence's; or those up
// to their own and all of the span they lie in.
enum class MaskKind : std::int32_t { causal, bidirectional, cross, spans };
enum class KvType : int { f32, bf16, f16, f8_e4m3, i8, i4 };

// How many rows an op that takes one after the other works on: all tokens of a step, or those whose logits are wanted.
struct RowCount {
    std::int64_t count;
    constexpr RowCount(std::int64_t rows = 0) : count(rows) {}
    constexpr operator std::int64_t() const { return count; }
};

struct EmbeddingArgs {
    const PackedMatrix* table;  // [V, N]
    const std::int64_t* token_ids;
    std::int64_t tokens;
    float scale;
    float* out;  // [T, N]
};

// Which rows of a step are tokens of kind prompt. Given at level fast alone: instruction sets with matrix units then
// multiply the other rows by integers, the rest ignore it.
struct RowKinds {
    const std::int32_t* rows;  // [T] those of kind prompt, then the others, both ascending; null: 0, 1, …
    std::int64_t prompt;       // how many are of kind prompt
};

class AdapterTable;  // adapter_table.h

// The adapters of some columns of a product's output.
struct AdapterUse {
    const AdapterTable* table;
    std::int64_t offset;
};

// What a step's tokens have of adapters, as in AdapterArgs.
struct TokenAdapters {
    const std::int64_t* slot = nullptr;
    const float* scale = nullptr;
    std::int64_t count = 0;
    const std::int64_t* index = nullptr;
};

// out = x · Wᵀ (+ bias) (+ residual), W's rows being those of all parts one after the other.
// With an activation, parts are gates and ups of equal shapes and out = activation(gate) · up, half as wide.
struct LinearArgs {
    const PackedMatrix* const* parts;
    int num_parts;
    const float* x;
    std::int64_t tokens;
    const float* bias;      // [width], before the activation; or null
    const float* residual;  // [T, width of out], may be out itself; or null
    Activation activation;
    float alpha, limit;
    float* out;
    std::byte* scratch;               // linear_scratch() bytes, 64-byte aligned
    const RowKinds* kinds = nullptr;  // null: all rows are multiplied alike
};

// out = the sum over all ranks' x · Wᵀ (+ bias) (+ residual): each has some of the inputs, cut into segments, and all
// segments are added in their order, so that the bits are those of linear() in one process.
struct SharedLinearArgs {
    const PackedMatrix* matrix;  // [M, own inputs]; null where this rank has none
    const float* x;              // [T, own inputs]
    std::int64_t tokens;
    RankGroup* group;
    std::int64_t first, total;  // number of the first own segment, and how many all ranks have
    std::int64_t width;         // M
    const float* bias;          // [M] or null
    const float* residual;      // [T, M], may be out itself; or null
    float* out;
    std::byte* scratch;  // linear_scratch() bytes
    const RowKinds* kinds = nullptr;
};

// out[t] = all ranks' columns side by side
struct GatherColumnsArgs {
    const float* x;  // [T, own width]
    std::int64_t tokens;
    RankGroup* group;
    const std::int64_t* widths;  // of every rank
    float* out;                  // [T, the sum of those that are taken]
    int first = 0, end = 0;      // ranks whose columns this one takes; none is all
};

// embedding() of a table whose rows lie with several ranks: rows from `first` on are this one's.
struct SharedEmbeddingArgs {
    const PackedMatrix* table;  // [own rows, N]; null where this rank has none
    const std::int64_t* token_ids;
    std::int64_t tokens, width;
    float scale;
    std::int64_t first;
    RankGroup* group;
    float* out;  // [T, N]
};

// One MLP an expert; every token runs through its top_k.
// Which of a group's ranks compute which experts, in memory that is written between steps.
struct ExpertPlaces {
    // [E, 3]: this rank's place of an expert among its own, or -1; how many ranks have it, of which each computes every
    // so manieth token; which of them this rank is, from 0. Behind that the table's number, which all ranks count
    // alike.
    std::int32_t* table = nullptr;
    std::int64_t* counts = nullptr;  // [E], to which the tokens of each are added
    std::int64_t experts = 0;
};

struct ExpertsArgs {
    const float* x;           // [T, N]
    const float* weights;     // [T, top_k]
    const std::int64_t* ids;  // [T, top_k]
    std::int64_t tokens, top_k;
    const PackedMatrix* gate;   // of E experts, [E · I, N]
    const PackedMatrix* up;     // the same; `gate` itself where experts have none: activation(gate · x) goes down
    const PackedMatrix* down;   // of E experts, [E · N, I]
    const float* gate_up_bias;  // [E, 2 · I] or null
    const float* down_bias;     // [E, N] or null
    const float* residual;      // [T, N] or null
    Activation activation;
    float alpha, limit;
    float* out;          // [T, N]
    std::byte* scratch;  // experts_scratch() bytes
    const RowKinds* kinds = nullptr;
    std::span<const AdapterUse> gate_up_adapters = {}, down_adapters = {};  // of columns of 2 · I (or I), and of N
    TokenAdapters adapters = {};
    // Where experts lie with several ranks: the group, and the number of this rank's first. Matrices, biases are of its
    // own ones; `ids` and adapters of all. Every rank gets the sums of all, with the bits of one process.
    RankGroup* group = nullptr;
    std::int64_t first = 0;
    ExpertPlaces places = {};  // in the place of `first`, where ranks have others than a run in order
};

struct RouteArgs {
    const float* logits;  // [T, E]
    RowCount tokens;
    std::int64_t experts, top_k;
    Routing routing;
    bool renormalize;
    float* weights;                           // [T, top_k]
    std::int64_t* ids;                        // [T, top_k]
    const float* bias = nullptr;              // [E] added to softmax or sigmoid for the choice alone; or null
    std::int64_t groups = 1, top_groups = 1;  // only experts of the best groups are chosen; a group is consecutive ones
    float scale = 1.0f;                       // of the weights
    float jitter = 0.0f;                      // of sparsemixer
    const float* factors = nullptr;           // [E] of the weights, at last; or null
};

struct RmsNormArgs {
    const float* x;         // [T, N]
    const float* residual;  // or null
    const float* weight;    // [N]
    RowCount tokens;
    std::int64_t size;
    float eps;
    float* out;  // norm(x + residual) · weight
    float* sum;  // x + residual, may be residual itself; null if not wanted
};

struct LayerNormArgs {
    const float* x;
    const float* weight;
    const float* bias;  // or null
    RowCount tokens;
    std::int64_t size;
    float eps;
    float* out;
};

// out = activation(gate) · up, gate_up [T, 2 · N] with gates first
struct GateUpArgs {
    const float* gate_up;
    std::int64_t tokens, size;
    Activation activation;
    float alpha, limit;
    float* out;  // [T, N]
};

struct ActivateArgs {
    const float* x;
    RowCount tokens;
    std::int64_t size;
    Activation activation;  // not swigluoai
    float limit;
    float* out;  // may be x
};

struct AddArgs {
    const float* a;
    const float* b;
    RowCount tokens;
    std::int64_t size;
    float* out;   // a + b, may be either
    bool vector;  // b is one row, which all of a get
};

struct SigmoidGateArgs {
    const float* x;
    const float* gate;
    RowCount tokens;
    std::int64_t size;
    float* out;  // x · sigmoid(gate), may be either
};

struct SoftCapArgs {
    const float* x;
    RowCount tokens;
    std::int64_t size;
    float cap;
    float* out;  // cap · tanh(x / cap), may be x
};

struct ScaleRowsArgs {
    const float* x;        // [T, N]
    const float* factors;  // [T]
    RowCount tokens;
    std::int64_t size;
    float* out;
};

// Some columns of an activation: [T, width] inside rows of `stride` elements; no data where an op's input is absent.
struct Columns {
    const float* data = nullptr;
    std::int64_t stride = 0;
    const float* at(std::int64_t token) const { return data + token * stride; }
};

// x · y, where y may be one row for all (a stride of 0).
struct MultiplyArgs {
    const float* x;  // [T, N]
    Columns y;       // [T, N]
    RowCount tokens;
    std::int64_t size;
    float* out;  // may be x
};

// base + the sum over i of weight[t, i] · x[i][t], i upwards
struct WeightedSumArgs {
    static constexpr int most = 8;
    const float* base;     // [T, N]
    const float* x[most];  // [T, N] each
    int count;
    Columns weights;  // [T, count]
    std::int64_t tokens, size;
    float* out;  // may be base
};

// x times the root mean square of `like` over its own, whose square is taken for `least` where it is less.
struct MatchRmsArgs {
    const float* x;     // [T, N]
    const float* like;  // [T, N]
    RowCount tokens;
    std::int64_t size;
    float least;
    float* out;
};

// max(0, x - mean - deviations · standard deviation), both of x's row
struct StatisticalTopkArgs {
    Columns x;  // [T, N]
    RowCount tokens;
    std::int64_t size;
    float deviations;
    float* out;
};

// 1 + weight · log(1 + floor((position + offset) / length))
struct PositionScalesArgs {
    const std::int64_t* positions;
    std::int64_t tokens, offset;
    float length, weight;
    float* out;  // [T]
};

struct TakeRowsArgs {
    const float* x;             // [T, N]
    const std::int64_t* index;  // [rows], below T
    std::int64_t rows, size;
    float* out;  // [rows, N]
};

// x[rows[i]] = values[i], or += values[i]
struct InjectArgs {
    float* x;                  // [T, N]
    const std::int64_t* rows;  // [count], below T, all different
    const float* values;       // [count, N]
    std::int64_t count, size;
    bool adds;
};

// cos | cos and -sin | sin of position · frequency, times factor
struct RopeTablesArgs {
    const std::int64_t* positions;  // [T], or [P, T] where pairs take positions of several axes
    const float* frequencies;       // [rot / 2] radians a position
    std::int64_t tokens, half;
    float factor;
    float* cos;                          // [T, rot]
    float* sin;                          // [T, rot]
    const std::int32_t* axes = nullptr;  // [rot / 2], the axis below P whose position turns a pair; null: the first
};

// Heads rotated by the tables of their token, in the half-split layout.
struct RotateArgs {
    const float* x;    // [T, H, D]
    const float* cos;  // [T, rot]
    const float* sin;  // [T, rot], the first half negated
    RowCount tokens;
    std::int64_t heads, dim, rotary_dim;
    float* out;
};

// How one layer's keys and values lie in a block. A block of keys or values is `heads` runs, one a KV head.
struct KvLayout {
    KvType type;
    std::int64_t block_size, heads, key_dim, value_dim;
    std::int64_t key_block_bytes, value_block_bytes;  // multiples of 64, filled in by kv_layout()
    bool latent = false;  // a value is the first value_dim elements of its key; there are no others
    // Of a block that lies with several ranks: which of them this is. They have runs of a block's positions in turn
    // (kv_layout.h), and block_size is how many each has.
    std::int64_t place = 0, ranks = 1;
};

struct RopeWriteArgs {
    const float* qkv;  // [T, (H + K) · D + K · Dv]
    const float* cos;  // [T, rot]
    const float* sin;
    std::int64_t rotary_dim;
    const std::int64_t* slot;  // [T]: block · block_size + offset
    std::int64_t tokens, heads;
    const float* qk_norm;  // [H + K, D] or null
    float eps;
    KvLayout layout;
    std::byte* keys;
    std::byte* values;
    float* query;  // [T, H, D]
    HeadNorm norm = HeadNorm::each;
    float* factors = nullptr;  // [T, 2] of scratch, for HeadNorm::all
};

// The rotation of consecutive elements of a vector by the tables of its token.
struct Rotation {
    const float* cos;  // [T, size]
    const float* sin;
    std::int64_t size;
    bool interleaved;  // pairs lie side by side; the rotated vector has their first elements, then their second ones
};

// A token's entry of a latent cache is norm(x's first value_dim elements) and its others, rotated.
struct LatentWriteArgs {
    const float* x;     // [T, key_dim]
    const float* norm;  // [value_dim]
    float eps;
    Rotation rotation;  // of size key_dim - value_dim
    const std::int64_t* slot;
    std::int64_t tokens;
    KvLayout layout;
    std::byte* keys;
};

// One product a head: out[t, h] = W[h] · x[t, h], then the rotated rest of x[t, h].
struct HeadLinearArgs {
    const float* x;              // [T, H, K + rotated]
    const PackedMatrix* weight;  // of H experts, [H · N, K]
    std::int64_t tokens;
    Rotation rotation;   // of size 0 for none
    float* out;          // [T, H, N + rotated]
    std::byte* scratch;  // head_linear_scratch() bytes
};

// The rows of a step, as attention cuts them into tasks: made once a step and cache group, by attention_plan().
struct AttentionPlan;

struct AttentionRows {
    const std::int32_t* query_start;  // [R + 1]
    const std::int32_t* context_len;  // [R]
    const std::int32_t* block_table;  // [R, table_width]
    std::int64_t table_width, rows;
    std::int64_t window;  // 0 for none; a bidirectional row's queries see window / 2 positions on either side
    const MaskKind* masks = nullptr;      // [R], or null: all are causal
    const std::int32_t* spans = nullptr;  // [T, 2] first position and end of a token's span, for rows of that kind
    bool chunked = false;                 // causal queries see positions from the last multiple of the window on
    bool whole = false;                   // every query sees all context_len positions, whatever its mask
    std::int64_t room = 0;  // bytes that a rank can leave for others at a time, where contexts lie with several
};

struct AttentionArgs {
    const float* query;  // [T, H, D]
    const AttentionPlan* plan;
    AttentionRows rows;
    KvLayout layout;
    const std::byte* keys;
    const std::byte* values;
    std::int64_t heads;
    float scale;
    const float* sinks;             // [H] or null
    float soft_cap;                 // 0 for none
    float* out;                     // [T, H · Dv]
    const float* slopes = nullptr;  // [H] added to a score for each position its key lies behind; or null
    float* states = nullptr;        // where items leave states; null: in the plan's memory
};

// Attention over contexts that lie with several ranks, with the bits of one process: each leaves states of what it has
// for the heads of all of them, and takes those of its own heads in their order.
struct SharedAttentionArgs {
    AttentionArgs all;  // of the heads of all ranks that share contexts; `sinks` and `out` are of this rank's alone
    RankGroup* group;   // in which they are neighbours, the first of them a multiple of their number
    std::int64_t first, own;  // heads of this rank, counted in those
};

// The rows of a step over a pool of states, a slot a row. A row whose first position is 0 finds zeros in its slot.
// Its state after token t goes to slot after[t], where the next token of that slot overwrites it; without `after` to
// its own.
struct StateRows {
    const std::int32_t* query_start;  // [R + 1]
    const std::int32_t* context_len;  // [R]
    const std::int64_t* slot;         // [R], all different
    std::int64_t rows;
    const std::int64_t* after = nullptr;  // [T] or null; no slot of one row is another row's
    bool fresh(std::int64_t row) const { return context_len[row] == query_start[row + 1] - query_start[row]; }
};

// out[t] = after[t] · f(bias + sum over j < W of weight[j] · in[t - W + 1 + j]), in = before · x, f SiLU or nothing.
struct ShortConvArgs {
    Columns x, before, after;  // [T, C], the last two may be absent
    const float* weight;       // [W, C], oldest first
    const float* bias;         // [C] or null
    std::int64_t taps, channels;
    bool silu;
    StateRows rows;
    float* state;  // [slots, W - 1, C], oldest first
    float* out;    // [T, C]
};

// h = exp(dt · a) · h + dt · b ⊗ x, out = c · h + skip · x, times silu(gate); dt = clamp(softplus(dt + bias)). Steps
// and decays belong to heads (Mamba-2) or to channels (Mamba-1).
struct SelectiveScanArgs {
    Columns x, dt, b, c, gate;  // [T, H · P]; [T, H] or [T, H · P]; [T, G · N] twice; [T, H · P] or absent
    const float* a;             // [H], or [N, H · P] where every channel has its own; negative
    const float* dt_bias;       // as wide as dt, or null
    const float* skip;          // [H], or [H · P], or null
    bool per_channel;
    float least, most;                         // of dt
    std::int64_t heads, groups, size, states;  // H, G, P, N
    StateRows rows;
    float* state;  // [slots, H, N, P]
    float* out;    // [T, H · P]
};

// s = exp(g) · s; s = s + k ⊗ beta · (v - k · s); out = q · s, with q and k divided by their lengths, q by sqrt(D) too,
// g = a · softplus(step + bias), beta = sigmoid(beta).
struct DeltaRuleArgs {
    Columns q, k, v, step, beta;  // [T, K · D] twice, [T, H · Dv], [T, H] twice
    const float* a;               // [H], negative
    const float* bias;            // [H] or null
    float eps;
    std::int64_t heads, key_heads, key_dim, value_dim;
    bool tiled;  // value head h reads key head h % K, not h / (H / K)
    StateRows rows;
    float* state;  // [slots, H, D, Dv]
    float* out;    // [T, H · Dv]
};

// norm(x) · weight · silu(gate), or norm(x · silu(gate)) · weight; every group of elements has its own norm.
struct GatedNormArgs {
    Columns x, gate;      // [T, N], the second may be absent
    const float* weight;  // [N]
    RowCount tokens;
    std::int64_t size, group;
    float eps;
    bool gate_first;
    std::int64_t segment;  // neighbours that a rank has all of, where ranks may share a group: unit of segments.h; or 0
    float* out;            // [T, N]
};

// For every row, and each adapter s of its token with weight w: out[row, offset + i] += w · scale_s · (B_s · A_s ·
// x)_i, or, where s has factors c of columns, w · (c_i - 1) · (W · x)_i + w · scale_s · c_i · (B_s · A_s · x)_i. A
// token has `each` rows: heads, or its experts.
struct AdapterArgs {
    static constexpr std::int64_t most = 4;  // adapters of a token
    const float* x;                          // rows of x_stride elements, the first K of which are taken
    std::int64_t x_stride;
    const AdapterTable* table;
    const std::int64_t* slot;  // [step's tokens, count]; null where no token has one
    const float* scale;        // [step's tokens, count]
    std::int64_t count;
    const std::int64_t* index;  // [tokens], which of the step's tokens there are; null for all
    std::int64_t tokens, width, offset;
    float* out;      // [tokens · each, width]
    float* scratch;  // [tokens · each, count, most_rank]
    std::int64_t each = 1;
    std::int64_t shared = 1;                // neighbouring rows that have a row of x together
    const std::int64_t* experts = nullptr;  // [tokens · each], of the rows; null where they are heads, in turn
    const float* bias = nullptr;            // [experts, width], and
    const float* residual = nullptr;        // [tokens · each, width]: what `out` has besides the product, or null
    const std::int64_t* numbers = nullptr;  // [tokens]: a row's x is `factor` at this place and 0 elsewhere; x is null
    float factor = 1.0f;
};

// Every op and what it takes; a line here is all that the tables of instruction sets and, of PLAIN ones, the binding
// ask for. PLAIN ops are bound as their arguments' fields say (binding/plain_op.h), BOUND ones by hand; OWN ones, by
// hand too, are compiled anew for instruction sets that share the others.
#define PENSTOCK_MODEL_OPS(PLAIN, BOUND, OWN)    \
    PLAIN(rms_norm, RmsNormArgs)                 \
    PLAIN(layer_norm, LayerNormArgs)             \
    PLAIN(route_experts, RouteArgs)              \
    PLAIN(activate, ActivateArgs)                \
    PLAIN(add, AddArgs)                          \
    PLAIN(sigmoid_gate, SigmoidGateArgs)         \
    PLAIN(soft_cap, SoftCapArgs)                 \
    PLAIN(scale_rows, ScaleRowsArgs)             \
    PLAIN(multiply, MultiplyArgs)                \
    PLAIN(match_rms, MatchRmsArgs)               \
    PLAIN(statistical_topk, StatisticalTopkArgs) \
    PLAIN(rotate_heads, RotateArgs)              \
    PLAIN(gated_norm, GatedNormArgs)             \
    PLAIN(short_conv, ShortConvArgs)             \
    PLAIN(selective_scan, SelectiveScanArgs)     \
    PLAIN(delta_rule, DeltaRuleArgs)             \
    BOUND(gate_up, GateUpArgs)                   \
    BOUND(embedding, EmbeddingArgs)              \
    BOUND(shared_embedding, SharedEmbeddingArgs) \
    BOUND(gather_columns, GatherColumnsArgs)     \
    BOUND(weighted_sum, WeightedSumArgs)         \
    BOUND(position_scales, PositionScalesArgs)   \
    BOUND(take_rows, TakeRowsArgs)               \
    BOUND(inject, InjectArgs)                    \
    BOUND(rope_tables, RopeTablesArgs)           \
    BOUND(rope_write, RopeWriteArgs)             \
    BOUND(latent_write, LatentWriteArgs)         \
    BOUND(adapter, AdapterArgs)                  \
    OWN(linear, LinearArgs)                      \
    OWN(shared_linear, SharedLinearArgs)         \
    OWN(head_linear, HeadLinearArgs)             \
    OWN(experts, ExpertsArgs)

}  // namespace penstock
