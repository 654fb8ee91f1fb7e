"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form.

A token leaves one latent vector [C] and one rotated key part [P] in the cache, which all heads share. A head's key and
value would be products of the latent; instead its query is multiplied by the key's matrix and what it attends to by the
value's, so that attention works on latents alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.config.errors import ConfigError
from penstock.kernels.adapters import Adapted, AdapterSlots, LowRank, PlacedAdapters
from penstock.kernels.api import KernelSet
from penstock.layers.linear import AdapterTarget, Linear, ProjectionAdapters
from penstock.layers.norm import RmsNorm
from penstock.layers.rotary import Rotary, Temperature
from penstock.layers.sharding import Shards, rows_of
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart


@dataclass(frozen=True, slots=True)
class LatentOptions:
    """What distinguishes one family's latent attention from another's.

    Attributes:
        hidden_size, num_heads: sizes.
        query_rank: size of the compressed query; None where queries are not compressed.
        latent: C, size of a latent.
        rotated: P, rotated elements of a head's query, and of the shared key part.
        unrotated: other elements of a head's query.
        value_dim: elements of a head's value.
        rotary: the positions' rotation, of P elements.
        scale: of the scores; None for (unrotated + rotated) ** -0.5.
        interleaved: the checkpoint has rotated pairs side by side.
        bias: the compressing projections and the output's have biases.
        norm_eps: of the norms of latents and compressed queries.
        temperature: of the queries.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent: int
    rotated: int
    unrotated: int
    value_dim: int
    rotary: Rotary
    scale: float | None = None
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6
    temperature: Temperature | None = None


class LatentAttention(Layer):
    """Attention number `index` of a model, with weights under `prefix`."""

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: LatentOptions) -> None:
        heads, size = options.num_heads, options.unrotated + options.rotated
        self._write = kernels.latent_cache_write
        self._attend: Callable[..., Tensor] = kernels.paged_attention
        self._attend_shared = kernels.shared_attention
        self._per_head = kernels.head_linear
        self._scale_rows, self._pack_heads = kernels.scale_rows, kernels.pack_heads
        self.index = index
        self.options, self.prefix = options, prefix
        self.adapters: tuple[PlacedAdapters, PlacedAdapters] | None = None
        self.scale = size**-0.5 if options.scale is None else options.scale
        self.spec = CacheSpec(CacheKind.LATENT, 1, options.latent + options.rotated, options.latent)
        linear = partial(Linear, kernels)
        self.query_down: Linear | None = None
        if options.query_rank is None:
            self.query = linear(((f"{prefix}.q_proj", heads * size),), options.hidden_size, bias=False)
        else:
            down = ((f"{prefix}.q_a_proj", options.query_rank),)
            self.query_down = linear(down, options.hidden_size, bias=options.bias)
            self.query_norm = RmsNorm(kernels, f"{prefix}.q_a_layernorm.weight", options.query_rank, options.norm_eps)
            self.query = linear(((f"{prefix}.q_b_proj", heads * size),), options.query_rank, bias=False)
        entry = ((f"{prefix}.kv_a_proj_with_mqa", options.latent + options.rotated),)
        self.entry = linear(entry, options.hidden_size, bias=options.bias)
        self.latent_norm = RmsNorm(kernels, f"{prefix}.kv_a_layernorm.weight", options.latent, options.norm_eps)
        self.key_up = self._part(kernels, prefix, "k_b_proj", (options.latent, options.unrotated), self._keys)
        self.value_up = self._part(kernels, prefix, "v_b_proj", (options.value_dim, options.latent), self._values)
        size = options.value_dim
        rows = ((f"{prefix}.o_proj", options.hidden_size),)
        self.output = linear(rows, heads * size, bias=options.bias, segment=size)

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the heads; all have the latents, which are read by every head, or share them."""
        options = self.options
        columns = shards.columns(self.output.weight)
        if columns is None or shards.adapters:
            shards.keep_whole(self, "adapters may change it" if columns else "its heads are fewer segments than ranks")
            return
        first, end = columns.first // options.value_dim, columns.end // options.value_dim
        self.query.take_rows(rows_of(range(first, end), options.unrotated + options.rotated))
        for weight in (self.key_up, self.value_up):
            weight.take_entries(first, end)
            weight.pack = partial(self._pack_heads, count=end - first)
        self.output.take_columns(columns, shards.group)
        if shards.contexts > 1:
            heads = tuple(width // options.value_dim for width in columns.widths)
            self._attend = partial(self._attend_shared, group=shards.group, heads=heads)
            self.spec = replace(self.spec, stripe=shards.stripe)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        cache, interleaved = step.caches[self.index], self.options.interleaved
        cos, sin = step.rotation(self.options.rotary)
        norm, slot = self.latent_norm, step.batch.groups[cache.group].slot
        self._write(self.entry(hidden, step), norm.weight.value, norm.eps, cos, sin, slot, cache.kv, interleaved)
        if self.query_down is not None:
            hidden, _ = self.query_norm(self.query_down(hidden, step))
        keys, values = self._adapted(step)
        query = self._per_head(self.query(hidden, step), self.key_up.value, cos, sin, interleaved, keys)
        if self.options.temperature is not None:
            query = self._scale_rows(query, step.temperature(self.options.temperature))
        attended = step.wanted(self._attend(query, cache.kv, step.plan(cache, None), self.scale))
        residual = None if residual is None else step.wanted(residual)
        return self.output(self._per_head(attended, self.value_up.value, adapters=values), step, residual)

    def _adapted(self, step: ForwardStep) -> tuple[Adapted | None, Adapted | None]:
        """The adapters of a step's tokens of keys and of values."""
        tokens = step.adapters if self.adapters else None
        if tokens is None or self.adapters is None:
            return None, None
        return Adapted((self.adapters[0],), tokens), Adapted((self.adapters[1],), tokens)

    def make_adapters(self, kernels: KernelSet, slots: int, max_rank: int) -> Iterator[tuple[str, AdapterTarget]]:
        """Slots for adapters of the heads' matrices, under names of their own: `k_b_proj` [H, C, unrotated] and

        `v_b_proj` [H, value_dim, C]. An adapter of the merged matrix, B · A, is (Aᵀ, B_hᵀ) of a head's keys.
        """
        options, heads = self.options, self.options.num_heads
        keys = kernels.make_adapters(slots, options.unrotated, options.latent, max_rank, heads)
        values = kernels.make_adapters(slots, options.latent, options.value_dim, max_rank, heads)
        self.adapters = PlacedAdapters(keys), PlacedAdapters(values)
        yield f"{self.prefix}.k_b_proj", ProjectionAdapters(keys)
        yield f"{self.prefix}.v_b_proj", ProjectionAdapters(values)
        yield f"{self.prefix}.kv_b_proj", _MergedAdapters(keys, values, options)

    def _part(
        self, kernels: KernelSet, prefix: str, name: str, shape: tuple[int, int], take: Callable[[Tensor], Tensor]
    ) -> Weight:
        """One matrix a head, out of the merged one that expands latents to keys and values or stored under `name`."""
        options = self.options
        stored = (options.num_heads * (options.unrotated + options.value_dim), options.latent)
        return Weight(
            (options.num_heads, *shape),
            (WeightPart(f"{prefix}.kv_b_proj.weight", stored, transform=take),),
            alternatives=((WeightPart(f"{prefix}.{name}.weight", (options.num_heads, *shape)),),),
            pack=partial(kernels.pack_heads, count=options.num_heads),
            packable=kernels.packable,
            experts=options.num_heads,
            quantize_policy="eight bits",
        )

    def _keys(self, merged: Tensor) -> Tensor:
        """[H · (unrotated + value_dim), C] → [H, C, unrotated]."""
        heads = merged.view(self.options.num_heads, -1, self.options.latent)
        return heads[:, : self.options.unrotated].transpose(1, 2).contiguous()

    def _values(self, merged: Tensor) -> Tensor:
        """The same → [H, value_dim, C]."""
        heads = merged.view(self.options.num_heads, -1, self.options.latent)
        return heads[:, self.options.unrotated :].contiguous()


@dataclass(frozen=True, slots=True)
class _MergedAdapters:
    """The adapters of the matrix that expands latents to all heads' keys and values."""

    keys: AdapterSlots
    values: AdapterSlots
    options: LatentOptions

    def entries(
        self, down: Tensor, up: Tensor, scale: float, columns: Tensor | None = None
    ) -> tuple[tuple[AdapterSlots, LowRank], ...]:
        """As AdapterTarget: cut by heads; of keys transposed, as queries are multiplied with them."""
        options, heads = self.options, self.options.num_heads
        if columns is not None:
            raise ConfigError("an adapter is DoRA of kv_b_proj, which is not served; take one of LoRA.")
        if len(up) != heads * (options.unrotated + options.value_dim):
            raise ConfigError(f"an adapter changes {len(up)} outputs of kv_b_proj; take one made for this model.")
        of_heads = up.view(heads, -1, len(down))
        keys, values = of_heads[:, : options.unrotated], of_heads[:, options.unrotated :]
        of_keys = self.keys.prepared(keys.transpose(1, 2), down.T.expand(heads, -1, -1), scale)
        return (self.keys, of_keys), (self.values, self.values.prepared(down.expand(heads, -1, -1), values, scale))
