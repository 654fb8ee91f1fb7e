"""Mixture-of-experts layers and the layouts in which checkpoints store experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.adapters import ExpertAdapters, PlacedAdapters
from penstock.kernels.api import Activation, KernelSet, Routing
from penstock.layers.decoder import FeedForward
from penstock.layers.linear import AdapterTarget, Linear, ProjectionAdapters
from penstock.layers.norm import Norm
from penstock.layers.sharding import Shards
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart
from penstock.parallel.experts import ExpertTable


@dataclass(frozen=True, slots=True)
class ExpertOptions:
    """What distinguishes one family's experts from another's.

    Attributes:
        hidden_size, intermediate_size, num_experts, top_k: sizes.
        routing, renormalize, groups, scale, jitter: how experts are chosen and weighted, see kernels.api.RouteExperts.
        activation, alpha, limit: of the gated MLP, see kernels.api.GatedLinear.
        bias: the router and the experts have biases.
        scale_input: what a token's one expert reads is weighted, not what it gives (Llama 4).
        gated: an expert is a gated MLP; else one without a gate.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: Routing = "softmax_topk"
    renormalize: bool = True
    groups: tuple[int, int] = (1, 1)
    scale: float = 1.0
    jitter: float = 0.0
    activation: Activation = "silu"
    alpha: float = 1.702
    limit: float = 7.0
    bias: bool = False
    scale_input: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The stacked weights of all experts: gate_up [E, 2 · I, N] (gate rows first), down [E, N, I], biases or None.

    gate_up is [E, I, N] where experts have no gate.
    """

    gate_up: Weight
    down: Weight
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None


@dataclass(frozen=True, slots=True)
class Router:
    """What chooses experts.

    Attributes:
        weight: from what a token's router reads to scores.
        bias: added to the product.
        choice_bias: added to scores for the choice alone.
        factors: of the experts' weights.
    """

    weight: Weight
    bias: Weight | None = None
    choice_bias: Weight | None = None
    factors: Weight | None = None


class SparseMoe(Layer):
    """Every token runs through its `top_k` experts; outputs are summed by routing weight."""

    def __init__(
        self,
        kernels: KernelSet,
        router: Router,
        experts: ExpertWeights,
        options: ExpertOptions,
        norms: tuple[Norm, Norm] | None = None,
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        """`norms` are of what the router and what the experts read.

        `latent` are the projections into the experts' space and out of it.
        """
        self._kernels = kernels
        self._experts: Callable[..., Tensor] = kernels.grouped_experts
        self.options = options
        self.router = router.weight
        self.router_bias = router.bias
        self.choice_bias = router.choice_bias
        self.factors = router.factors
        self.norms = norms
        self.latent = latent
        self.gate_up, self.gate_up_bias = experts.gate_up, experts.gate_up_bias
        self.down, self.down_bias = experts.down, experts.down_bias
        self.gate_up.gate_up = options.gated
        before, routed, _ = experts.down.parts[0].key.partition(".experts")
        self.name = before + routed if routed else before.rsplit(".", 2)[0]  # of an expert for all tokens
        self.adapters: tuple[tuple[PlacedAdapters, ...], tuple[PlacedAdapters, ...]] | None = None
        self.places: ExpertTable | None = None
        self.down.segment = 1
        for weight in (self.gate_up, self.down):
            weight.pack = partial(kernels.pack_experts, count=options.num_experts, segment=weight.segment)
            weight.packable, weight.experts = kernels.packable, options.num_experts

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the experts, whole: a run, or what a table says from step to step."""
        count = self.options.num_experts
        if count < shards.ranks.count or shards.adapters:
            shards.keep_whole(self, "adapters may change it" if shards.adapters else "it has fewer experts than ranks")
            return
        first, end = shards.ranks.run(count)
        if shards.copies is not None:
            self.places = ExpertTable(shards.ranks, count, shards.copies)
            own = self.places.holdings[shards.ranks.rank]
            first, end = own[0], own[-1] + 1
        for weight in (self.gate_up, self.down):
            weight.take_entries(first, end)
            weight.pack = partial(self._kernels.pack_experts, count=end - first, segment=weight.segment)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                bias.own = np.arange(first, end, dtype=np.int64)
        start = first if self.places is None else 0
        self._experts = partial(self._kernels.shared_experts, group=shards.group, first=start, places=self.places)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → output (+ residual), [T, hidden_size]."""
        options = self.options
        read, hidden = (norm(hidden)[0] for norm in self.norms) if self.norms else (hidden, hidden)
        scores = self._kernels.linear(read, self.router.value, _value(self.router_bias))
        weights, ids = self._kernels.route_experts(
            scores,
            options.top_k,
            options.routing,
            options.renormalize,
            _value(self.choice_bias),
            options.groups,
            options.scale,
            options.jitter,
            _value(self.factors),
        )
        if options.scale_input:
            hidden = self._kernels.scale_rows(hidden, weights)
            weights, ids = self._kernels.route_experts(scores, 1, "topk_softmax", True)
        given = hidden if self.latent is None else self.latent[0](hidden, step)
        out = self._computed(given, weights, ids, residual if self.latent is None else None, self._adapted(step))
        return out if self.latent is None else self.latent[1](out, step, residual)

    def _computed(
        self, hidden: Tensor, weights: Tensor, ids: Tensor, residual: Tensor | None, adapters: ExpertAdapters | None
    ) -> Tensor:
        """What the chosen experts give, whoever has them, weighted and summed."""
        options = self.options
        changed = {} if adapters is None else {"adapters": adapters}
        return self._experts(
            hidden,
            weights,
            ids,
            self.gate_up.value,
            self.down.value,
            options.activation,
            gate_up_bias=_value(self.gate_up_bias),
            down_bias=_value(self.down_bias),
            alpha=options.alpha,
            limit=options.limit,
            residual=residual,
            gated=options.gated,
            **changed,
        )

    def _adapted(self, step: ForwardStep) -> ExpertAdapters | None:
        tokens = step.adapters if self.adapters else None
        if tokens is None or self.adapters is None:
            return None
        return ExpertAdapters(self.adapters[0], self.adapters[1], tokens)

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Slots for all experts' gates, ups and outputs, under names of the stacked projections."""
        prefix, count = self.name, self.options.num_experts
        rows, inputs = self.gate_up.shape[-2:]
        outputs, inner = self.down.shape[-2:]
        names = ("gate_proj", "up_proj") if self.options.gated else ("up_proj",)
        placed: tuple[PlacedAdapters, ...] = ()
        for index, name in enumerate(names):
            made = kernels.make_adapters(slots, inputs, rows // len(names), max_rank, count)
            placed = (*placed, PlacedAdapters(made, index * (rows // len(names))))
            yield f"{prefix}.{name}", ProjectionAdapters(made)
        down = kernels.make_adapters(slots, inner, outputs, max_rank, count)
        self.adapters = placed, (PlacedAdapters(down),)
        yield f"{prefix}.down_proj", ProjectionAdapters(down)


class SharedExperts(Layer):
    """Routed experts beside an MLP that every token runs through (DeepSeekMoE, arXiv:2401.06066)."""

    def __init__(self, shared: FeedForward, routed: SparseMoe) -> None:
        self.shared, self.routed = shared, routed

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size] → the sum of both (+ residual), [T, hidden_size]."""
        return self.routed(hidden, step, self.shared(hidden, step, residual))


def gated_expert(kernels: KernelSet, prefix: str, gate: str, options: ExpertOptions, size: int) -> SparseMoe:
    """One expert of intermediate size `size` for all tokens, weighted by the sigmoid of a product with `gate`."""
    options = replace(
        options,
        intermediate_size=size,
        num_experts=1,
        top_k=1,
        routing="sigmoid_topk",
        renormalize=False,
        groups=(1, 1),
        scale=1.0,
    )
    outer = options.hidden_size

    def part(name: str, shape: tuple[int, int], offset: int = 0) -> WeightPart:
        return WeightPart(f"{prefix}.{name}_proj.weight", shape, offset, index=0)

    gate_up = Weight((1, 2 * size, outer), (part("gate", (size, outer)), part("up", (size, outer), size)))
    down = Weight((1, outer, size), (part("down", (outer, size)),))
    return SparseMoe(kernels, Router(router_weight(kernels, gate, options)), ExpertWeights(gate_up, down), options)


def float_vector(keys: tuple[str, ...], size: int, stored: tuple[int, ...] | None = None) -> Weight:
    """A vector [size] that stays in float32, under the first of the keys or one of the others; perhaps `stored` so."""
    part = WeightPart(keys[0], stored or (size,), transform=torch.flatten if stored else None, aliases=keys[1:])
    return Weight((size,), (part,), keep_float32=True)


def _value(weight: Weight | None) -> Tensor | None:
    return None if weight is None else weight.value


def router_weight(kernels: KernelSet, key: str, options: ExpertOptions, *aliases: str) -> Weight:
    """The router's matrix [E, N]."""
    shape = (options.num_experts, options.hidden_size)
    part = WeightPart(key, shape, aliases=aliases)
    return Weight(shape, (part,), pack=kernels.pack_linear, packable=kernels.packable, quantize_policy="kept")


def separate_experts(prefixes: tuple[str, ...], options: ExpertOptions, gate: str, up: str, down: str) -> ExpertWeights:
    """Experts stored one by one (`<prefix>.<e>.<gate>.weight` …) or stacked (`<prefix>.gate_up_proj`), no biases.

    The first prefix is the usual one; the others are accepted too.
    """
    inner, outer = options.intermediate_size, options.hidden_size
    first, *others = prefixes

    def part(name: str, expert: int, shape: tuple[int, int], offset: int = 0) -> WeightPart:
        aliases = tuple(f"{prefix}.{expert}.{name}.weight" for prefix in others)
        return WeightPart(f"{first}.{expert}.{name}.weight", shape, offset, aliases=aliases, index=expert)

    def stacked(name: str, shape: tuple[int, ...]) -> tuple[WeightPart]:
        aliases = tuple(f"{prefix}.{name}" for prefix in others)
        return (WeightPart(f"{first}.{name}", shape, aliases=aliases),)

    every = range(options.num_experts)
    halves = ((gate, 0), (up, inner))
    gate_up_shape, down_shape = (len(every), 2 * inner, outer), (len(every), outer, inner)
    return ExpertWeights(
        Weight(
            gate_up_shape,
            tuple(part(name, expert, (inner, outer), offset) for expert in every for name, offset in halves),
            alternatives=(stacked("gate_up_proj", gate_up_shape),),
        ),
        Weight(
            down_shape,
            tuple(part(down, expert, (outer, inner)) for expert in every),
            alternatives=(stacked("down_proj", down_shape),),
        ),
    )


def plain_experts(prefix: str, options: ExpertOptions) -> ExpertWeights:
    """Experts without gates, stored one by one (`<prefix>.<e>.up_proj.weight` …) or stacked (`<prefix>.up_proj`)."""
    count = options.num_experts
    inner = options.intermediate_size
    outer = options.hidden_size

    def weight(name: str, shape: tuple[int, int]) -> Weight:
        single = (WeightPart(f"{prefix}.{e}.{name}.weight", shape, index=e) for e in range(count))
        whole = (WeightPart(f"{prefix}.{name}", (count, *shape)),)
        return Weight((count, *shape), tuple(single), alternatives=(whole,))

    return ExpertWeights(weight("up_proj", (inner, outer)), weight("down_proj", (outer, inner)))


def _transpose(stack: Tensor) -> Tensor:
    return stack.transpose(1, 2)


def transposed_experts(prefix: str, options: ExpertOptions) -> ExpertWeights:
    """Experts stacked as [E, in, out], gates before ups, no biases; or one by one."""
    separate = separate_experts((prefix,), options, "gate_proj", "up_proj", "down_proj")
    count = options.num_experts
    inner = options.intermediate_size
    outer = options.hidden_size

    def weight(name: str, rows: int, columns: int, single: Weight) -> Weight:
        part = WeightPart(f"{prefix}.{name}", (count, columns, rows), transform=_transpose)
        return Weight((count, rows, columns), (part,), alternatives=(single.parts,))

    gate_up = weight("gate_up_proj", 2 * inner, outer, separate.gate_up)
    return ExpertWeights(gate_up, weight("down_proj", outer, inner, separate.down))


def _split_pairs(stack: Tensor) -> Tensor:
    """Rows gate, up, gate, up … of axis 1 → all gates, then all ups."""
    return torch.cat((stack[:, ::2], stack[:, 1::2]), dim=1)


def _transpose_and_split(stack: Tensor) -> Tensor:
    return _split_pairs(stack.transpose(1, 2))


def interleaved_experts(prefix: str, options: ExpertOptions) -> ExpertWeights:
    """GPT-OSS's experts: stacked, gate and up rows interleaved, with biases.

    On disk either [E, in, out] in a float format, or [E, out, in] packed in MXFP4 (OCP Microscaling Formats v1.0).
    """
    count = options.num_experts
    inner = options.intermediate_size
    outer = options.hidden_size

    def weight(name: str, shape: tuple[int, int, int], *, pairs: bool) -> Weight:
        key, flipped = f"{prefix}.{name}", (shape[0], shape[2], shape[1])
        packed = WeightPart(f"{key}_blocks", shape, interleaved=pairs)
        plain = WeightPart(key, flipped, transform=_transpose_and_split if pairs else _transpose)
        return Weight(shape, (plain,), alternatives=((packed,),))

    def bias(name: str, shape: tuple[int, int], *, pairs: bool) -> Weight:
        return Weight(shape, (WeightPart(f"{prefix}.{name}_bias", shape, transform=_split_pairs if pairs else None),))

    return ExpertWeights(
        weight("gate_up_proj", (count, 2 * inner, outer), pairs=True),
        weight("down_proj", (count, outer, inner), pairs=False),
        bias("gate_up_proj", (count, 2 * inner), pairs=True),
        bias("down_proj", (count, outer), pairs=False),
    )
