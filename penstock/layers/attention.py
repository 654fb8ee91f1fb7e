"""Self-attention over the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import KernelSet
from penstock.kernels.segments import MAX_SEGMENTS
from penstock.layers.attention_options import AttentionOptions
from penstock.layers.batch import LayerCache
from penstock.layers.linear import Linear, StoredRows
from penstock.layers.norm import scale_weight
from penstock.layers.sharding import Columns, Shards, rows_of
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer, Weight, WeightPart


class Attention(Layer):
    """Attention number `index` of a model, with weights under `prefix`.

    On disk the projections are `q_proj`, `k_proj` and `v_proj`, or fused in `qkv_proj`.
    """

    def __init__(self, kernels: KernelSet, prefix: str, index: int, options: AttentionOptions) -> None:
        heads = options.num_heads
        kv_heads = options.num_kv_heads
        dim = options.head_dim
        self._write = kernels.rope_and_cache_write
        self._attend: Callable[..., Tensor] = kernels.paged_attention
        self._attend_shared, self._score = kernels.shared_attention, kernels.key_scores
        self._activate = kernels.activate
        self.clip = options.projections.clip
        self.head_norm = options.norms.head_norm
        self.index = index
        self.rotary = options.rotary
        self.scale = dim**-0.5 if options.scores.scale is None else options.scores.scale
        self.soft_cap = options.scores.soft_cap
        self.norm_eps = options.norms.norm_eps
        kind = CacheKind.FULL if options.sees.window is None else CacheKind.SLIDING
        self.spec = None if options.projections.shared else CacheSpec(kind, kv_heads, dim, dim, options.sees.window)
        self.window = options.sees.window
        self.heads, self.kv_heads = heads, kv_heads
        self.dim = dim
        self._kept_whole = _kept_whole(options)
        self._norm, self._rotate = kernels.gated_rms_norm, kernels.rotate_heads
        self._normed_first = options.projections.shared or options.norms.value_norm
        self.qkv = _projection(kernels, prefix, options)
        self.gate = _gate(kernels, prefix, options) if options.projections.output_gate else None
        self._weigh = kernels.sigmoid_gate
        rows = StoredRows(f"{prefix}.o_proj", options.hidden_size, factor=options.projections.output_factor)
        self._together = _heads_together(heads, kv_heads)
        segment = self._together * dim
        self.output = Linear(kernels, (rows,), heads * dim, bias=options.projections.output_bias, segment=segment)
        self.qk_norm = _head_norms(prefix, options) if options.norms.qk_norm else None
        self._unit = torch.ones(heads + kv_heads, dim) if options.norms.unit_norm else None
        self._scale_rows = kernels.scale_rows
        self._chunked = options.sees.chunked
        self._temperature = options.scores.temperature
        self._slopes = None if options.scores.slopes is None else torch.tensor(options.scores.slopes)
        self.sinks = (
            Weight((heads,), (WeightPart(f"{prefix}.sinks", (heads,)),), keep_float32=True)
            if options.scores.sinks
            else None
        )

    def shard(self, shards: Shards) -> None:
        """Each rank has some of the KV heads, with the query heads that read them; several may have one."""
        why = self._kept_whole if shards.heads else "a layer reads another's keys and values"
        if why is not None:
            shards.keep_whole(self, why)
            return
        columns = shards.columns(self.output.weight)
        if columns is None:
            shards.keep_whole(self, "its heads are fewer segments than ranks")
            return
        kv_heads, group = self.kv_heads, self.heads // self.kv_heads
        heads = range(columns.first // self.dim, columns.end // self.dim)
        keys = _read_by(heads, group)
        together = self._sharing(columns, group, shards)
        if together is not None:
            keys = _read_by(together, group)
        places = [*heads, *(self.heads + key for key in keys)]
        values = [self.heads + kv_heads + key for key in keys]
        self.qkv.take_rows(rows_of((*places, *values), self.dim))
        if self.gate is not None:
            self.gate.take_rows(rows_of(heads, self.dim))
        if self.qk_norm is not None:
            normed = len(places) + len(values) if self.qk_norm.shape[0] > self.heads + kv_heads else len(places)
            self.qk_norm.own = np.array([*places, *values][:normed], np.int64)
        if self._unit is not None:
            self._unit = self._unit[: len(places)]
        if self._slopes is not None:
            of = heads if together is None else together
            self._slopes = self._slopes[of.start : of.stop].contiguous()
        if self.sinks is not None:
            self.sinks.own = np.array(heads, np.int64)
        self.output.take_columns(columns, shards.group)
        self.heads, self.kv_heads = len(heads), len(keys)
        assert self.spec is not None
        self.spec = replace(self.spec, num_kv_heads=len(keys))
        if together is not None:
            of_ranks = tuple(width // self.dim for width in columns.widths)
            self._attend = partial(self._attend_shared, group=shards.group, heads=of_ranks)
            self.spec = replace(self.spec, stripe=shards.stripe)

    def _sharing(self, columns: Columns, group: int, shards: Shards) -> range | None:
        """The query heads of the ranks that share contexts with this one; None where that would save no rank memory, or
        ranks would keep different numbers of KV heads: all of them plan the same rounds.
        """
        if shards.contexts == 1 or self.window is not None:
            return None

        def heads_of(ranks: range) -> range:
            inputs = columns.of_ranks(ranks)
            return range(inputs.start // self.dim, inputs.stop // self.dim)

        kept = set()
        for first in range(0, shards.ranks.count, shards.contexts):
            ranks = shards.neighbours(first)
            most = max(len(_read_by(heads_of(range(rank, rank + 1)), group)) for rank in ranks)
            together = len(_read_by(heads_of(ranks), group))
            if together >= most * shards.contexts:
                return None
            kept.add(together)
        if len(kept) > 1:
            return None
        return heads_of(shards.neighbours(shards.ranks.rank))

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        """hidden [T, hidden_size], normalised → the layer's output (+ residual), of all tokens or of `step.wanted`."""
        cache: LayerCache = step.caches[self.index]
        cos, sin = step.rotation(self.rotary)
        qkv = self.qkv(hidden, step)
        if self.clip is not None:
            qkv = self._activate(qkv, "clip", self.clip)
        scales = self._unit if self.qk_norm is None else self.qk_norm.value
        if self._normed_first and scales is not None:
            qkv, scales = self._norm(qkv, None, scales.view(-1), self.norm_eps, self.dim), None
        if self.spec is None:
            query = self._rotate(qkv, cos, sin, self.heads)
        else:
            slot = step.batch.groups[cache.group].slot
            query = self._write(qkv, cos, sin, slot, cache.kv, scales, self.norm_eps, self.head_norm)
        if self._temperature is not None:
            query = self._scale_rows(query, step.temperature(self._temperature))
        attended = self._attend(
            query,
            cache.kv,
            step.plan(cache, self.window, self._chunked),
            self.scale,
            None if self.sinks is None else self.sinks.value,
            self.soft_cap,
            self._slopes,
        )
        if step.scored:
            step.scores[self.index] = self._score(
                query,
                cache.kv,
                step.plan(cache, self.window, self._chunked),
                step.scored,
                self.scale,
                None if self.sinks is None else self.sinks.value,
                self.soft_cap,
                self._slopes,
            )
        attended = step.wanted(attended)
        if self.gate is not None:
            attended = self._weigh(attended, self.gate(step.wanted(hidden), step))
        return self.output(attended, step, None if residual is None else step.wanted(residual))


def _read_by(heads: range, group: int) -> list[int]:
    """The KV heads of query heads, a group of which reads one: each as many as there are beside each other, so that one
    stands several times where the run begins or ends within a group."""
    edges = sorted({heads.start, heads.stop, *range(-(-heads.start // group) * group, heads.stop, group)})
    each = gcd(*(end - start for start, end in pairwise(edges)))
    return [head // group for head in heads[::each]]


def _heads_together(heads: int, kv_heads: int) -> int:
    """Query heads whose outputs one rank has: those of a KV head, or an even part of them where KV heads are few."""
    if heads % kv_heads:
        return 1
    group = heads // kv_heads
    parts = max(count for count in range(1, max(1, MAX_SEGMENTS // kv_heads) + 1) if group % count == 0)
    return group // parts


def _kept_whole(options: AttentionOptions) -> str | None:
    """Why ranks cannot share the heads, or None."""
    if options.num_heads % options.num_kv_heads:
        return "its query heads are no multiple of its KV heads"
    if options.norms.qk_norm and options.norms.head_norm == "all":
        return "its norms are over all heads"
    return None


def _gate(kernels: KernelSet, prefix: str, options: AttentionOptions) -> Linear:
    """The projection of the heads' gates."""
    heads = np.arange(2 * options.num_heads * options.head_dim, dtype=np.int64).reshape(-1, 2, options.head_dim)
    rows = StoredRows(f"{prefix}.q_proj", heads.size, heads[:, 1].reshape(-1))
    return Linear(kernels, (rows,), options.hidden_size, bias=options.projections.qkv_bias)


def _head_order(options: AttentionOptions) -> npt.NDArray[np.int64]:
    """Where each element of a head lies in the checkpoint."""
    order = np.arange(options.head_dim, dtype=np.int64)
    if options.projections.interleaved:
        rotated = options.rotary.rope.rotary_dim
        order[:rotated] = order[:rotated].reshape(-1, 2).T.reshape(-1)
    return order


def _projection(kernels: KernelSet, prefix: str, options: AttentionOptions) -> Linear:
    """The merged projection of queries, keys and values."""
    heads = options.num_heads
    kv_heads = options.num_kv_heads
    dim = options.head_dim
    inner, plain = _head_order(options), np.arange(dim, dtype=np.int64)

    def rows(first: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of heads that start at rows `first`."""
        return (first[:, None] + order).reshape(-1)

    if options.projections.grouped:
        group = heads // kv_heads
        groups = dim * np.arange(kv_heads * (group + 2), dtype=np.int64).reshape(kv_heads, group + 2)
        query = groups[:, :group].reshape(-1)
        key = groups[:, group]
        value = groups[:, group + 1]
    else:
        starts = dim * np.arange(heads + 2 * kv_heads, dtype=np.int64)
        query, key, value = np.split(starts, (heads, heads + kv_heads))
    order = np.concatenate((rows(query, inner), rows(key, inner), rows(value, plain)))
    count = (heads + 2 * kv_heads) * dim
    same = bool((order == np.arange(count)).all())
    fused = StoredRows(f"{prefix}.qkv_proj", count, None if same else order)

    def separate(name: str, count: int, inner: npt.NDArray[np.int64]) -> StoredRows:
        order = rows(dim * np.arange(count, dtype=np.int64), inner) if options.projections.interleaved else None
        return StoredRows(f"{prefix}.{name}", count * dim, order)

    width = 2 * dim if options.projections.output_gate else dim
    first = rows(width * np.arange(heads, dtype=np.int64), inner)
    parts = (
        StoredRows(f"{prefix}.q_proj", heads * width, first)
        if options.projections.output_gate
        else separate("q_proj", heads, inner),
        separate("k_proj", kv_heads, inner),
        StoredRows(f"{prefix}.{'k_proj' if options.projections.keys_as_values else 'v_proj'}", kv_heads * dim),
    )[: 1 if options.projections.shared else 3]
    whole = not (options.projections.output_gate or options.projections.shared or options.projections.keys_as_values)
    return Linear(
        kernels, parts, options.hidden_size, bias=options.projections.qkv_bias, fused=(fused,) if whole else ()
    )


def _ones(_: Tensor, shape: tuple[int, int]) -> Tensor:
    return torch.ones(shape)


def _head_norms(prefix: str, options: AttentionOptions) -> Weight:
    """The scales of all query heads, then of all key heads, [H + K, D]; on disk one of D for all, or one a head.

    Those of values, ones, follow where they are normalised too. Where keys are another layer's, only queries have any.
    """
    heads = options.num_heads
    kv_heads = options.num_kv_heads
    dim = options.head_dim
    near = options.norms.around_one
    order = torch.from_numpy(_head_order(options))
    places = (("q_norm", heads, 0), ("k_norm", kv_heads, heads))
    own = options.norms.head_norm in ("all", "layer")

    def heads_of(scale: Tensor) -> Tensor:
        return scale.reshape(-1, dim)[:, order]

    def shared(name: str, count: int, offset: int) -> WeightPart:
        return replace(scale_weight(f"{prefix}.{name}.weight", dim, around_one=near, repeat=count), offset=offset)

    if not own:
        count = heads if options.projections.shared else heads + kv_heads * (2 if options.norms.value_norm else 1)
        parts = tuple(shared(*place) for place in places[: 1 if options.projections.shared else 2])
        if options.norms.value_norm and not options.projections.shared:
            ones = replace(parts[1], offset=heads + kv_heads, transform=partial(_ones, shape=(kv_heads, dim)))
            parts = (*parts, ones)
        return Weight((count, dim), parts, keep_float32=True)
    flat = options.norms.head_norm == "all"
    whole = tuple(
        WeightPart(f"{prefix}.{name}.weight", (count * dim,) if flat else (count, dim), offset, transform=heads_of)
        for name, count, offset in places
    )
    single = tuple(
        WeightPart(f"{prefix}.{name}.norms.{head}.weight", (dim,), offset + head, transform=heads_of)
        for name, count, offset in places
        for head in range(count)
    )
    return Weight((heads + kv_heads, dim), whole, keep_float32=True, alternatives=(single,))
