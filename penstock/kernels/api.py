"""The op list: every operation a model computes with, as typed callables, and their choice for one engine.

T is the number of tokens of a step, R its rows, H query heads, K KV heads, D elements of a head. Activations have the
engine's compute dtype; reductions (norms, softmax, rotations) are carried out in float32 whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from torch import Tensor

from penstock.kernels import onednn, reference, triton
from penstock.kernels.adapters import Adapted, AdapterSlots, ExpertAdapters
from penstock.kernels.cache import KvTensors, StateRows
from penstock.kernels.canonical import Canonical
from penstock.kernels.cpu.implementations import implementations as native_implementations
from penstock.kernels.registry import Choice, KernelContext, choose
from penstock.kernels.sampling import SamplingKernel
from penstock.kernels.shared_ops import GatherColumns, SharedAttention, SharedEmbedding, SharedExperts, SharedLinear

Activation = Literal["silu", "gelu", "gelu_tanh", "swigluoai", "relu", "relu2", "clip"]
HeadNorm = Literal["each", "all", "layer", "rotated"]
Routing = Literal["softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer"]
Matrix = Canonical | Tensor  # what a weight is packed from: still quantised, or a plain tensor [N, K]


class EmbeddingOp(Protocol):
    """Rows of a table."""

    def __call__(self, numbers: Tensor, table: Any, scale: float = 1.0) -> Tensor:
        """Row numbers [T] int64, table [V, N] from `pack_table` → [T, N], times `scale` rounded to the compute dtype.

        The numbers are a step's token ids, positions or token types.
        """


class RmsNormOp(Protocol):
    """Root mean square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467), optionally after a residual add."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [T, N], weight [N] float32, residual [T, N] → (norm(x + residual) · weight, x + residual), both as x."""


class LayerNormOp(Protocol):
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450)."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """x [T, N], weight and bias [N] float32 → [T, N] as x."""


class RopeTables(Protocol):
    """Cos and sin of the step's positions, for every layer with the same frequencies."""

    def __call__(
        self, positions: Tensor, frequencies: Tensor, factor: float = 1.0, axes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """positions [T] int64, frequencies [rot / 2] float32 radians a position → cos and sin, [T, 1, rot] float32.

        Both halves hold the same angles; both are multiplied by `factor`, and sin's first half is negated. With `axes`
        [rot / 2] int32 positions are [P, T], and each pair is turned by those of its own axis (Qwen2-VL,
        arXiv:2409.12191, section 2.1).
        """


class Inject(Protocol):
    """Hidden states from outside: those of media in the place of placeholders' (DeepStack, arXiv:2406.04334)."""

    def __call__(self, x: Tensor, rows: Tensor, values: Tensor, level: int) -> Tensor:
        """x [T, N], in place: x[rows] becomes values[0], or gains values[level] if that is not 0; returns `x`.

        rows [M] int64, all different; values [levels, M, N] as x.
        """


class RotateHeads(Protocol):
    """Rotates queries that read what another layer has cached."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        """x [T, H · D], tables as in RopeAndCacheWrite → the rotated heads, [T, H, D]."""


class RopeAndCacheWrite(Protocol):
    """Splits a merged projection, normalises and rotates queries and keys, writes keys and values to the cache."""

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot: Tensor,
        cache: KvTensors,
        qk_norm: Tensor | None = None,
        eps: float = 0.0,
        head_norm: HeadNorm = "each",
    ) -> Tensor:
        """Rotary embedding in the half-split layout (Su et al. 2021, arXiv:2104.09864).

        Args:
            qkv: [T, (H + K) · D + K · Dv]: all queries, all keys, all values.
            cos: [T, 1, rot] float32, rot ≤ D; the first rot elements of a head are rotated.
            sin: [T, 1, rot] float32, the first half negated: out = x · cos + roll(x, rot / 2) · sin.
            slot: [T] int64, flat cache slot of each token.
            cache: from `make_cache`, written in place.
            qk_norm: [H + K, D] float32 scales of an RMS norm of each head before the rotation, or None.
            eps: of that norm.
            head_norm: "each" as said; "all" has one root mean square for all query heads and one for all key heads,
                summed in segments of whole heads as in PackLinear;
                "layer" is a layer norm of each head; "rotated" is the RMS norm of each head after the rotation.

        Returns:
            The rotated queries, [T, H, D].
        """


class LatentCacheWrite(Protocol):
    """Writes a latent cache's entries: latents normalised, key parts rotated (DeepSeek-V2, arXiv:2405.04434)."""

    def __call__(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        slot: Tensor,
        cache: KvTensors,
        interleaved: bool = False,
    ) -> None:
        """Writes norm(x[:, :C]) and the rotated rest of each token as one key, whose first C elements are its value.

        Args:
            x: [T, C + P].
            norm: [C] float32 scale of an RMS norm; `eps` is added to the mean square.
            cos, sin: [T, 1, P] float32 as in RopeAndCacheWrite.
            slot: [T] int64, flat cache slot of each token.
            cache: a latent one from `make_cache`, written in place.
            interleaved: rotated pairs lie side by side in x; they are written as two halves.
        """


class HeadLinear(Protocol):
    """One matrix a head: brings queries into the space of latents and attended latents out of it."""

    def __call__(
        self,
        x: Tensor,
        weight: Any,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        interleaved: bool = False,
        adapters: Adapted | None = None,
    ) -> Tensor:
        """x [T, H · (K + P)], weight [H, M, K] from `pack_heads` → [T, H · (M + P)].

        The first K elements of a head are multiplied by its matrix; the other P, as many as cos and sin [T, 1, P]
        have, follow rotated (`interleaved` as in LatentCacheWrite). P is 0 without tables. `adapters` have one of each
        for every head, and an offset of 0.
        """


class Packable(Protocol):
    """Whether the packings here take a matrix as it is stored."""

    def __call__(self, matrix: Canonical) -> str | None:
        """Why not, or None. What is not packable is decoded first."""


class PackTable(Protocol):
    """Brings a table into the layout that both `embedding` and `linear` read; done once, when it is loaded."""

    def __call__(self, parts: Sequence[Matrix]) -> Any:
        """Matrices of equally many inputs, one below the other → the same values (perhaps the same tensor)."""


class PackLinear(Protocol):
    """Brings a weight into the layout `linear` reads; done once, when the weight is loaded."""

    def __call__(self, parts: Sequence[Matrix], segment: int = 0, ends: Sequence[int] = ()) -> Any:
        """Matrices of equally many inputs, one below the other → the same values for `linear` and `gated_linear`.

        If `segment` is not 0, implementations whose sums have one order (the native one) sum the inputs in
        `segments.segment_ends`, of multiples of it and of what the format keeps together, and add the sums in order.
        A rank that has some of the inputs gives the `ends` of its segments instead.
        """


class LinearOp(Protocol):
    """A dense layer."""

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x · weightᵀ + bias + residual, [T, M].

        x [T, N], weight [M, N] from `pack_linear` or `pack_table`, bias [M], residual [T, M].
        """


class GatedLinear(Protocol):
    """A merged gate-and-up projection and its gated activation (Shazeer 2020, arXiv:2002.05202)."""

    def __call__(
        self,
        x: Tensor,
        weight: Any,
        activation: Activation,
        bias: Tensor | None = None,
        alpha: float = 1.702,
        limit: float = 7.0,
        adapters: Adapted | None = None,
    ) -> Tensor:
        """x [T, K], weight [2 · N, K] from `pack_linear`, gates first, bias [2 · N] → [T, N].

        "silu", "gelu" (exact), "gelu_tanh", "relu" and "relu2" (its square) give activation(gate) · up. "swigluoai"
        gives g · sigmoid(alpha · g) · (u + 1) with g = min(gate, limit), u = clamp(up, ±limit) (GPT-OSS model card,
        arXiv:2508.10925). `adapters` change the products before the activation.
        """


class Activate(Protocol):
    """An activation by itself."""

    def __call__(self, x: Tensor, activation: Activation, limit: float = 0.0) -> Tensor:
        """x [T, N] → the same shape: an activation as in GatedLinear, or "clip", which bounds to ±limit."""


class Add(Protocol):
    """The sum of two activations, or of one and a vector."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """a [T, N], b [T, N] or [N] float32 → a + b."""


class Multiply(Protocol):
    """The product of two activations, or of one and a vector."""

    def __call__(self, x: Tensor, factors: Tensor) -> Tensor:
        """x [T, N], factors [T, N], which may be a part, or [N] float32 for all rows → x · factors."""


class WeightedSum(Protocol):
    """Activations mixed with weights of each token's own (AltUp, Baykal et al. 2023, arXiv:2301.13310)."""

    def __call__(self, base: Tensor, terms: Sequence[Tensor], weights: Tensor) -> Tensor:
        """base and up to 8 terms [T, N], weights [T, terms], perhaps a part → base + Σ weights[:, i] · terms[i]."""


class MatchRms(Protocol):
    """An activation is brought to the size of another."""

    def __call__(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        """x, like [T, N] → x · rms(like) / rms(x) of each row; x's mean square counts as at least `least`."""


class StatisticalTopk(Protocol):
    """Keeps what lies far above a row's mean (Spark Transformer, arXiv:2506.06644)."""

    def __call__(self, x: Tensor, deviations: float) -> Tensor:
        """x [T, N], which may be a part → max(0, x - mean - deviations · standard deviation), of each row."""


class SigmoidGate(Protocol):
    """One activation weighs another (gated attention, arXiv:2505.06708)."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [T, N] → x · sigmoid(gate)."""


class SoftCap(Protocol):
    """Squashes logits to ±cap (Gemma 2 report, arXiv:2408.00118)."""

    def __call__(self, x: Tensor, cap: float) -> Tensor:
        """x [L, N] float32 → cap · tanh(x / cap)."""


class ScaleRows(Protocol):
    """A factor a row."""

    def __call__(self, x: Tensor, factors: Tensor) -> Tensor:
        """x [T, N] or [T, H, D], factors [T, 1] float32 → each row of x times its factor, as x."""


class PositionScales(Protocol):
    """A temperature that grows with the position, for queries (Nakanishi 2025, arXiv:2501.19399)."""

    def __call__(self, positions: Tensor, length: float, weight: float, offset: int = 0) -> Tensor:
        """positions [T] int64 → 1 + weight · log(1 + floor((position + offset) / length)), [T, 1] float32."""


class TakeRows(Protocol):
    """Some rows of an activation."""

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """x [T, N], rows [L] int64 → [L, N]."""


class RouteExperts(Protocol):
    """Chooses each token's experts."""

    def __call__(
        self,
        router_logits: Tensor,
        top_k: int,
        routing: Routing,
        renormalize: bool,
        bias: Tensor | None = None,
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
        jitter: float = 0.0,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """router_logits [T, E] → (weights [T, top_k] float32 times `scale`, expert ids [T, top_k] int64).

        With `factors` [E] float32, an expert's weight is at last multiplied by its own.

        "softmax_topk" takes the largest of the softmax over all experts (divided by their sum if `renormalize`);
        "topk_softmax" takes the softmax over the largest logits; "sigmoid_topk" takes sigmoids (DeepSeek-V3,
        arXiv:2412.19437; divided by their sum if `renormalize`). Softmax and sigmoids are chosen with `bias` [E]
        float32 added to them, and count without it. "sparsemixer" (arXiv:2409.12136) takes for each of the largest
        logits the softmax over those not taken before it that lie below it by at most 2 · jitter of its size.

        With groups (G, g) experts form G groups of consecutive ones, and only those of the g best groups are chosen
        (DeepSeek-V2, arXiv:2405.04434, section 2.2.2). A group counts for its best expert, or, of sigmoids, for the
        sum of its best two.
        """


class PackExperts(Protocol):
    """Brings a stack of expert weights into the layout `grouped_experts` reads; done once, when it is loaded."""

    def __call__(self, parts: Sequence[Matrix], count: int, segment: int = 0) -> Any:
        """Matrices [count · M, N] of all experts → the same values for `grouped_experts` of the same implementation.

        Two parts are gates and ups of a merged projection; one part is a plain one. `segment` as in PackLinear.
        """


class PackHeads(Protocol):
    """Brings one matrix a head into the layout `head_linear` reads; done once, when they are loaded."""

    def __call__(self, parts: Sequence[Matrix], count: int) -> Any:
        """One matrix [count · M, K], that of head 0 first → the same values for `head_linear`."""


class GroupedExperts(Protocol):
    """Runs each token through its experts' MLPs and sums the weighted outputs."""

    def __call__(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Any,
        down: Any,
        activation: Activation,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        alpha: float = 1.702,
        limit: float = 7.0,
        residual: Tensor | None = None,
        gated: bool = True,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """x [T, N], weights and ids [T, k] from `route_experts`, gate_up [E, 2 · I, N], down [E, N, I] → [T, N].

        If not `gated`, gate_up is [E, I, N] (its bias [E, I]) and an expert gives down · activation(gate_up · x).

        gate_up and down come from `pack_experts`. Biases are [E, 2 · I] and [E, N]; activation, alpha and limit are
        as in GatedLinear; residual [T, N] is added. Of `adapters`, those of gates and ups change the products before
        the activation, those of down before they are weighted; all have one for each expert, or one for all.
        """


class MakeCache(Protocol):
    """Allocates one layer's KV memory."""

    def __call__(
        self,
        kv_type: str,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        device: str = "cpu",
        latent: bool = False,
    ) -> KvTensors:
        """Blocks of zeros. kv_type: "float32", "bfloat16", "float16", "fp8", "int8" or "int4".

        A latent cache keeps keys only: a token's value is the first value_dim elements of its key.
        """


class CacheBlockBytes(Protocol):
    """What `make_cache` allocates for one block."""

    def __call__(
        self, kv_type: str, block_size: int, num_kv_heads: int, key_dim: int, value_dim: int, latent: bool = False
    ) -> int:
        """Bytes of one block's keys and values, scales and padding included."""


class PlanAttention(Protocol):
    """Prepares one step's attention for all layers of a cache group; done once a step, off the per-layer path."""

    def __call__(
        self,
        cache: KvTensors,
        query_start: Tensor,
        context_len: Tensor,
        block_table: Tensor,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        window: int | None,
        masks: Sequence[str] = (),
        spans: Tensor | None = None,
        chunked: bool = False,
    ) -> Any:
        """The plan, an object only this implementation's `paged_attention` understands.

        Args:
            cache: of any layer of the group; only its shape, type and device are read.
            query_start: [R + 1] int32, first token of each row.
            context_len: [R] int32, tokens of the row in the cache, this step's included.
            block_table: [R, B] int32, block ids; entries beyond a row's context or before its window are not read.
            query_lens: query_start's differences as ints.
            context_lens: context_len as ints.
            window: positions a query sees, its own included; None for all. A query of a bidirectional row sees
                window // 2 positions on either side of its own.
            masks: "causal", "bidirectional", "cross" or "spans" a row; () where all are causal. "cross" rows attend to
                all of another sequence's context_len tokens, whatever the window.
            spans: [T, 2] int32, first position and end of the span each token lies in (its own and the next where in
                none), read for rows of mask "spans": a query also sees all of its span, whatever the window. A span's
                tokens are in the cache before any of them attends.
            chunked: a causal query sees the positions from the last multiple of `window` up to its own.
        """


class PagedAttention(Protocol):
    """Attention of the step's queries, each to what its mask shows it (Kwon et al. 2023, arXiv:2309.06180)."""

    def __call__(
        self,
        query: Tensor,
        cache: KvTensors,
        plan: Any,
        scale: float,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """Attention with grouped queries (query head h reads KV head h · K // H) and float32 softmax.

        Args:
            query: [T, H, D] or [T, H · D].
            cache: the layer's.
            plan: what `plan_attention` returned for this step and group.
            scale: multiplies the scores.
            sinks: [H] float32, a score per head that takes part in the softmax and adds no value, or None.
            soft_cap: scores become soft_cap · tanh(score / soft_cap); None for no cap.
            slopes: [H] float32, at last a score gains slope · (position of the key - that of the query) (ALiBi, Press
                et al. 2021, arXiv:2108.12409); None for nothing. Not together with sinks.

        Returns:
            [T, H · Dv]. Slots no query of a row may see are never read, so what lies in them has no influence; a query
            that sees none, since it attends to another sequence without entries, gets zeros.
        """


class KeyScores(Protocol):
    """What a row's last queries make of its keys (SnapKV, arXiv:2404.14469), beside attention."""

    def __call__(
        self,
        query: Tensor,
        cache: KvTensors,
        plan: Any,
        queries: int,
        scale: float,
        sinks: Tensor | None = None,
        soft_cap: float | None = None,
        slopes: Tensor | None = None,
    ) -> Tensor:
        """[R, K, largest context] float32: for each key of a row, the softmax weights that its last `queries` of the

        step give it, summed over them and over the query heads that read its KV head; zeros behind a row's context.
        The arguments are attention's; what a query does not see has no weight. Not recorded.
        """


class Split(Protocol):
    """Parts of a merged projection, without a copy."""

    def __call__(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """x [T, sum of sizes] → one [T, size] each. Ops that say so take such parts; others need a whole activation."""


class ShortConv(Protocol):
    """Causal depthwise convolution over the last W tokens (Mamba, arXiv:2312.00752; gated: LFM2, arXiv:2511.23404)."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        rows: StateRows,
        activation: Literal["silu"] | None = None,
        before: Tensor | None = None,
        after: Tensor | None = None,
    ) -> Tensor:
        """after[t] · f(bias + Σ_j weight[j] · in[t - W + 1 + j]) with in = before · x, as [T, C].

        Args:
            x: [T, C]; may be a part.
            weight: [W, C] float32, W 2 to 4, the oldest token's first.
            bias: [C] float32 or None.
            state: [slots, W - 1, C] float32, each row's last inputs, oldest first; written in place.
            rows: of the step.
            activation: f.
            before, after: [T, C], factors; may be parts.
        """


class SelectiveScan(Protocol):
    """Selective state space, token by token: Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), Mamba (arXiv:2312.00752)."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        state: Tensor,
        rows: StateRows,
        dt_bias: Tensor | None = None,
        skip: Tensor | None = None,
        gate: Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
    ) -> Tensor:
        """h ← exp(dt · a) · h + dt · b ⊗ x; out = (c · h + skip · x) · silu(gate), as [T, H · P].

        With `a` [H] (Mamba-2), steps and decays belong to heads. With `a` [N, C] (Mamba), they belong to channels, and
        H is 1, P is C. The sum over N runs upwards, so that any cut of a row into steps gives the same bits.

        Args:
            x: [T, H · P]; may be a part, as may dt, b, c and gate.
            dt: [T, H] (or [T, C]); the step is clamp(softplus(dt + dt_bias), *dt_limit).
            a: [H] or [N, C] float32, negative.
            b, c: [T, G · N]; head h reads group h // (H / G).
            state: [slots, H, N, P] float32, written in place.
            rows: of the step.
            dt_bias: float32, as wide as dt.
            skip: [H] (or [C]) float32.
            gate: [T, H · P].
        """


class GatedDeltaRule(Protocol):
    """Gated delta rule (Yang et al. 2024, arXiv:2412.06464), token by token."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: Tensor,
        beta: Tensor,
        a: Tensor,
        state: Tensor,
        rows: StateRows,
        bias: Tensor | None = None,
        eps: float = 1e-6,
        tiled: bool = False,
    ) -> Tensor:
        """s ← exp(g) · s; s ← s + k ⊗ sigmoid(beta) · (v - k · s); out = q · s, as [T, H · Dv].

        g = a · softplus(step + bias). Heads of k, and of q, are divided by √(Σ k² + eps), those of q by √D besides.

        Args:
            q, k: [T, K · D]; head h of v reads head h // (H / K). May be parts, as may v, step and beta.
            v: [T, H · Dv].
            step, beta: [T, H].
            a: [H] float32, negative.
            state: [slots, H, D, Dv] float32, written in place.
            rows: of the step.
            bias: [H] float32.
            eps: in the lengths.
            tiled: head h of v reads head h % K.
        """


class GatedRmsNorm(Protocol):
    """RMS norm of groups of elements with a SiLU gate, as after a recurrent layer (Mamba-2, arXiv:2405.21060)."""

    def __call__(
        self,
        x: Tensor,
        gate: Tensor | None,
        weight: Tensor,
        eps: float,
        group_size: int | None = None,
        gate_first: bool = False,
        segment: int = 0,
    ) -> Tensor:
        """norm(x) · weight · silu(gate), or norm(x · silu(gate)) · weight if `gate_first`, as [T, N].

        x [T, N] and gate [T, N] may be parts, weight is [N] float32; every `group_size` elements have a norm of their
        own (None: all of them have one). Of a group that ranks may share each rank has multiples of `segment`
        elements, which are summed in segments as in PackLinear; 0 where they are not shared.
        """


class MakeAdapters(Protocol):
    """The adapters of one projection; filled and emptied between steps."""

    def __call__(self, slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1) -> AdapterSlots:
        """Slots 0 … slots - 1, all empty; slot 0 stands for none and stays so."""


class Adapter(Protocol):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685), others for each token (Punica, arXiv:2310.18547)."""

    def __call__(
        self, x: Tensor, out: Tensor, adapters: Adapted, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """out[:, offset : offset + M] += w · scale · up · (down · x) for each adapter, in place; returns `out`.

        w is the token's own factor. Where an adapter has factors c of columns (DoRA, arXiv:2402.09353), a column gains
        w · ((c - 1) · W · x + c · scale · up · (down · x)). Tokens without adapters stay as they are, to the bit.

        Args:
            x: [T, K], the projection's input, or of those tokens that `adapters.tokens.rows` tells.
            out: [T, N], its output.
            adapters: of the projection.
            bias: [N] and
            residual: [T, N]: what `out` has besides W · x; looked at for factors of columns alone.
        """


class TableAdapter(Protocol):
    """Low-rank adapters of a table whose rows are looked up: `Adapter` of inputs that are 1 at a number and else 0."""

    def __call__(self, numbers: Tensor, out: Tensor, adapters: Adapted, scale: float = 1.0) -> Tensor:
        """out[t] += w · scale · s · up · down[:, numbers[t]] for each adapter, in place; returns `out`.

        Args:
            numbers: [T] int64.
            out: [T, M], the rows that were looked up, times `scale`; factors of columns multiply these too.
            adapters: of the table, with K its rows.
            scale: of the looked up rows.
        """


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The implementation of every op for one engine, and why each was chosen.

    `sampling` makes a new `kernels.sampling.SamplingKernel`; all others are the ops themselves.
    """

    embedding: EmbeddingOp
    rms_norm: RmsNormOp
    layer_norm: LayerNormOp
    inject: Inject
    rope_tables: RopeTables
    rope_and_cache_write: RopeAndCacheWrite
    rotate_heads: RotateHeads
    latent_cache_write: LatentCacheWrite
    head_linear: HeadLinear
    packable: Packable
    pack_table: PackTable
    pack_linear: PackLinear
    linear: LinearOp
    shared_linear: SharedLinear
    gather_columns: GatherColumns
    shared_embedding: SharedEmbedding
    gated_linear: GatedLinear
    activate: Activate
    add: Add
    multiply: Multiply
    weighted_sum: WeightedSum
    match_rms: MatchRms
    statistical_topk: StatisticalTopk
    sigmoid_gate: SigmoidGate
    soft_cap: SoftCap
    scale_rows: ScaleRows
    position_scales: PositionScales
    take_rows: TakeRows
    route_experts: RouteExperts
    pack_experts: PackExperts
    pack_heads: PackHeads
    grouped_experts: GroupedExperts
    shared_experts: SharedExperts
    make_cache: MakeCache
    cache_block_bytes: CacheBlockBytes
    plan_attention: PlanAttention
    paged_attention: PagedAttention
    shared_attention: SharedAttention
    key_scores: KeyScores
    split: Split
    short_conv: ShortConv
    selective_scan: SelectiveScan
    gated_delta_rule: GatedDeltaRule
    gated_rms_norm: GatedRmsNorm
    make_adapters: MakeAdapters
    adapter: Adapter
    table_adapter: TableAdapter
    sampling: Callable[[], SamplingKernel]
    choices: tuple[Choice, ...]


def resolve_kernels(context: KernelContext) -> KernelSet:
    """Chooses every op for a device, dtype and instruction set: native or Triton first, the reference last.

    Raises:
        ConfigError: an op has no implementation that serves the context; the message lists the reasons.
    """
    declared = tuple(field.name for field in fields(KernelSet) if field.name != "choices")
    available = (
        *native_implementations(declared),
        *onednn.implementations(),
        *triton.implementations(context.device, declared),
        *reference.implementations(declared),
    )
    choices = {op: choose(op, [item for item in available if item.op == op], context) for op in declared}
    chosen: dict[str, Any] = {op: choice.chosen.function for op, choice in choices.items()}
    return KernelSet(**chosen, choices=tuple(choices.values()))
