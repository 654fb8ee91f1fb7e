"""The ops of a forward pass, as in `kernels.api`, over the native library: on tensors at once, on handles recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted, ExpertAdapters
from penstock.kernels.cache import KvTensors
from penstock.kernels.canonical import Canonical
from penstock.kernels.cpu import packing
from penstock.kernels.cpu.low_rank import adapter_uses
from penstock.kernels.cpu.packed import Packed, block_bytes, kv_layout, zero_pages
from penstock.kernels.cpu.rank_group import RankGroup
from penstock.kernels.cpu.recording import NONE, Eager, Handle, Recording, extent_of, tape_of, width_of
from penstock.kernels.cpu.step_program import address, mask_kinds
from penstock.kernels.shared_ops import ExpertPlaces

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "swigluoai", "relu", "relu2", "clip")
HEAD_NORMS = ("each", "all", "layer", "rotated")
ROUTINGS = ("softmax_topk", "topk_softmax", "sigmoid_topk", "sparsemixer")


@dataclass(frozen=True, slots=True)
class StepTables:
    """Where the rows of a step begin, how long they are and which blocks they have, as in kernels.api.PlanAttention."""

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class NativeAttentionPlan:
    """What attention needs of a step: a cache group and its window, and the tables where it runs at once."""

    group: int
    window: int
    chunked: bool
    tables: StepTables | None
    masks: npt.NDArray[np.int32] | None = None
    spans: Tensor | None = None


def pack_linear(parts: Sequence[Canonical], segment: int = 0, ends: Sequence[int] = ()) -> Packed:
    return Packed(tuple(packing.pack(part, segment=segment, ends=ends) for part in parts))


def pack_experts(parts: Sequence[Canonical], count: int, segment: int = 0) -> Packed:
    return Packed(tuple(packing.pack(part, count, segment) for part in parts))


def packable(matrix: Canonical) -> str | None:
    return packing.packable(matrix)


pack_table = pack_linear
pack_heads = pack_experts


def embedding(numbers: Any, table: Packed, scale: float = 1.0) -> Any:
    tape = tape_of(numbers)
    if isinstance(tape, Eager):
        tape.step.set(tape.rows, 0, numbers.data_ptr(), 0, 0, 0)
    (matrix,) = table.parts
    out = tape.new(matrix.cols)
    tape.refs.append(table)
    lookup = numbers.lookup if isinstance(numbers, Handle) else "token_ids"
    tape.program.embedding(matrix, scale, tape.index(out), lookup)
    return tape.done(out)


def rms_norm(x: Any, weight: Tensor, eps: float, residual: Any = None) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    total = x if residual is None else tape.new(size, extent_of(x))
    sum_index = NONE if residual is None else tape.index(total)
    tape.program.rms_norm(
        tape.index(x), tape.index(residual), tape.index(weight), size, eps, tape.index(out), sum_index, extent_of(x)
    )
    return tape.done(out, total)


def layer_norm(x: Any, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.layer_norm(
        tape.index(x), tape.index(weight), tape.index(bias), size, eps, tape.index(out), extent_of(x)
    )
    return tape.done(out)


def _linear(
    x: Any,
    weight: Packed,
    width: int,
    bias: Tensor | None,
    residual: Any,
    activation: str,
    alpha: float,
    limit: float,
    adapters: Adapted | None = None,
) -> Any:
    tape = tape_of(x)
    uses = [] if adapters is None else adapter_uses(tape, adapters.parts, adapters.tokens, x)
    out = tape.new(width, extent_of(x))
    tape.refs.append(weight)
    tape.program.linear(
        list(weight.parts),
        tape.index(x),
        tape.index(bias),
        tape.index(residual),
        ACTIVATIONS.index(activation),
        alpha,
        limit,
        tape.index(out),
        extent_of(x),
        uses,
    )
    return tape.done(out)


def linear(x: Any, weight: Packed, bias: Tensor | None = None, residual: Any = None) -> Any:
    return _linear(x, weight, weight.rows, bias, residual, "none", 0.0, 0.0)


def gated_linear(
    x: Any,
    weight: Packed,
    activation: str,
    bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    adapters: Adapted | None = None,
) -> Any:
    return _linear(x, weight, weight.rows // 2, bias, None, activation, alpha, limit, adapters)


def activate(x: Any, activation: str, limit: float = 0.0) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.activate(tape.index(x), size, ACTIVATIONS.index(activation), limit, tape.index(out), extent_of(x))
    return tape.done(out)


def add(a: Any, b: Any) -> Any:
    tape, size = tape_of(a), width_of(a)
    out = tape.new(size, extent_of(a))
    vector = not isinstance(b, Handle) and b.dim() == 1
    tape.program.add(tape.index(a), tape.index(b), size, tape.index(out), vector, extent_of(a))
    return tape.done(out)


def sigmoid_gate(x: Any, gate: Any) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.sigmoid_gate(tape.index(x), tape.index(gate), size, tape.index(out), extent_of(x))
    return tape.done(out)


def soft_cap(x: Any, cap: float) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.soft_cap(tape.index(x), size, cap, tape.index(out), extent_of(x))
    return tape.done(out)


def scale_rows(x: Any, factors: Any) -> Any:
    tape, size = tape_of(x), width_of(x) if isinstance(x, Handle) else x.shape[1:].numel()
    out = tape.new(size, extent_of(x))
    tape.program.scale_rows(tape.index(x), tape.index(factors), size, tape.index(out), extent_of(x))
    out = tape.done(out)
    return out.view(x.shape) if isinstance(tape, Eager) else out


def position_scales(positions: Any, length: float, weight: float, offset: int = 0) -> Any:
    tape = tape_of(positions)
    if isinstance(tape, Eager):
        tape.step.set(tape.rows, 0, 0, positions.data_ptr(), 0, 0)
    out = tape.new(1)
    tape.program.position_scales(length, weight, offset, tape.index(out))
    return tape.done(out)


def take_rows(x: Any, rows: Any) -> Any:
    tape, size = tape_of(rows), width_of(x)
    if isinstance(tape, Eager):
        tape.step.set_logits(len(rows), rows.data_ptr())
    out = tape.new(size, "logit_rows")
    tape.program.take_rows(tape.index(x), size, tape.index(out))
    return tape.done(out)


def inject(x: Any, rows: Any, values: Any, level: int) -> Any:
    tape = tape_of(x)
    if isinstance(tape, Eager):
        values = values.float().contiguous()
        tape.step.set_injected(len(rows), rows.data_ptr(), values.data_ptr())
    tape.program.inject(tape.index(x), level, width_of(x))
    tape.done()
    return x


def rope_tables(positions: Any, frequencies: Tensor, factor: float = 1.0, axes: Tensor | None = None) -> Any:
    tape, half = tape_of(positions if axes is None else positions[0]), frequencies.shape[0]
    if isinstance(tape, Eager):
        positions = positions.contiguous()
        tape.step.set(tape.rows, 0, 0, positions.data_ptr(), 0, 0)
    cos, sin = tape.new(2 * half), tape.new(2 * half)
    tape.program.rope_tables(tape.index(frequencies), half, factor, tape.index(axes), tape.index(cos), tape.index(sin))
    cos, sin = tape.done(cos, sin)
    return (cos.unsqueeze(1), sin.unsqueeze(1)) if isinstance(tape, Eager) else (cos, sin)


def layout_of(cache: KvTensors) -> Any:
    """How a cache's blocks lie here, and which of their positions."""
    stripe = cache.stripe
    return cache.layout if stripe.whole else cache.layout.of_rank(stripe.place, stripe.ranks)


def buffers(tape: Recording, cache: KvTensors) -> Any:
    """A cache's memory, as ops take it."""
    return tape.buffers(layout_of(cache), cache.key, cache.value)


def _target(tape: Recording, x: Any, slot: Any) -> int:
    """The cache group that entries go to; tensors are looked at, since they may come from outside of a step."""
    if not isinstance(tape, Eager):
        return int(slot.group)
    if x.dtype != torch.float32 or slot.dtype != torch.int64 or slot.shape != x.shape[:1]:
        given = f"{x.dtype} {tuple(x.shape)} for slots {slot.dtype} {tuple(slot.shape)}".replace("torch.", "")
        raise ValueError(f"entries for the cache are {given}; allowed are float32, and one int64 slot a row")
    tape.step.set_group(0, 0, 0, slot.data_ptr())
    return 0


def rope_and_cache_write(
    qkv: Any,
    cos: Any,
    sin: Any,
    slot: Any,
    cache: KvTensors,
    qk_norm: Tensor | None = None,
    eps: float = 0.0,
    head_norm: str = "each",
) -> Any:
    tape, layout = tape_of(qkv), cache.layout
    group = _target(tape, qkv, slot)
    keys = layout.heads * layout.key_dim
    heads = (width_of(qkv) - keys - layout.heads * layout.value_dim) // layout.key_dim
    query = tape.new(heads * layout.key_dim)
    tape.program.rope_write(
        tape.index(qkv),
        tape.index(cos),
        tape.index(sin),
        width_of(cos),
        group,
        heads,
        tape.index(qk_norm),
        eps,
        HEAD_NORMS.index(head_norm),
        buffers(tape, cache),
        tape.index(query),
    )
    query = tape.done(query)
    return query.view(-1, heads, layout.key_dim) if isinstance(tape, Eager) else query


def _tables(tape: Recording, cos: Any, sin: Any, interleaved: bool) -> tuple[int, int, int, bool]:
    return tape.index(cos), tape.index(sin), 0 if cos is None else width_of(cos), interleaved


def latent_cache_write(
    x: Any, norm: Tensor, eps: float, cos: Any, sin: Any, slot: Any, cache: KvTensors, interleaved: bool = False
) -> None:
    tape = tape_of(x)
    group = _target(tape, x, slot)
    tables = _tables(tape, cos, sin, interleaved)
    tape.program.latent_write(tape.index(x), tape.index(norm), eps, *tables, group, buffers(tape, cache))
    tape.done()


def head_linear(
    x: Any,
    weight: Packed,
    cos: Any = None,
    sin: Any = None,
    interleaved: bool = False,
    adapters: Adapted | None = None,
) -> Any:
    tape = tape_of(x)
    uses = [] if adapters is None else adapter_uses(tape, adapters.parts, adapters.tokens, x)
    (matrix,) = weight.parts
    out = tape.new(width_of(x) + matrix.experts * (matrix.rows - matrix.cols), extent_of(x))
    tape.refs.append(weight)
    tables = _tables(tape, cos, sin, interleaved)
    tape.program.head_linear(tape.index(x), matrix, *tables, tape.index(out), extent_of(x), uses)
    return tape.done(out)


def route_experts(
    router_logits: Any,
    top_k: int,
    routing: str,
    renormalize: bool,
    bias: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    jitter: float = 0.0,
    factors: Tensor | None = None,
) -> Any:
    tape = tape_of(router_logits)
    extent = extent_of(router_logits)
    weights, ids = tape.new(top_k, extent), tape.new(top_k, extent, dtype=torch.int64)
    logits, results = tape.index(router_logits), (tape.index(weights), tape.index(ids))
    tape.program.route_experts(
        logits,
        width_of(router_logits),
        top_k,
        ROUTINGS.index(routing),
        renormalize,
        *results,
        tape.index(bias),
        groups[0],
        groups[1],
        scale,
        jitter,
        tape.index(factors),
        extent,
    )
    return tape.done(weights, ids)


def grouped_experts(
    x: Any,
    weights: Any,
    ids: Any,
    gate_up: Packed,
    down: Packed,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    residual: Any = None,
    gated: bool = True,
    adapters: ExpertAdapters | None = None,
    group: RankGroup | None = None,
    first: int = 0,
    places: ExpertPlaces | None = None,
) -> Any:
    """As in kernels.api; with a group, of this rank's experts alone, whose first has number `first`, or of `places`."""
    tape = tape_of(x)
    uses: list[list[Any]] = [[], []]
    if adapters is not None:
        uses = [adapter_uses(tape, parts, adapters.tokens, x) for parts in (adapters.gate_up, adapters.down)]
    out = tape.new(width_of(x), extent_of(x))
    tape.refs.append((gate_up, down, group, places))
    table = None if places is None else places.table
    counts = None if places is None else places.counts
    gates = gate_up.parts if gated else 2 * gate_up.parts
    tape.program.experts(
        tape.index(x),
        tape.index(weights),
        tape.index(ids),
        width_of(ids),
        *gates,
        *down.parts,
        tape.index(gate_up_bias),
        tape.index(down_bias),
        tape.index(residual),
        ACTIVATIONS.index(activation),
        alpha,
        limit,
        tape.index(out),
        extent_of(x),
        uses[0],
        uses[1],
        None if group is None else group.native,
        first,
        address(table),
        address(counts),
        0 if counts is None else len(counts),
    )
    return tape.done(out)


def make_cache(
    kv_type: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    device: str = "cpu",
    latent: bool = False,
) -> KvTensors:
    layout = kv_layout(kv_type, block_size, num_kv_heads, key_dim, value_dim, latent)
    sizes = layout.key_block_bytes, layout.value_block_bytes
    key, value = (torch.from_numpy(zero_pages(num_blocks, size)) for size in sizes)
    return KvTensors(key, value, layout, latent)


def cache_block_bytes(
    kv_type: str, block_size: int, num_kv_heads: int, key_dim: int, value_dim: int, latent: bool = False
) -> int:
    return block_bytes(kv_layout(kv_type, block_size, num_kv_heads, key_dim, value_dim, latent))


def plan_attention(
    cache: KvTensors,
    query_start: Any,
    context_len: Any,
    block_table: Any,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    window: int | None,
    masks: Sequence[str] = (),
    spans: Tensor | None = None,
    chunked: bool = False,
) -> NativeAttentionPlan:
    if isinstance(block_table, Handle):
        return NativeAttentionPlan(block_table.group, window or 0, chunked, None)
    return NativeAttentionPlan(
        0, window or 0, chunked, StepTables(query_start, context_len, block_table), mask_kinds(masks), spans
    )


def planned(tape: Recording, plan: NativeAttentionPlan, cache: KvTensors, heads: int, room: int = 0) -> int:
    """The native plan of attention over a cache, for so many heads; one serves all caches of its shape.

    `room`: bytes that ranks leave for each other at a time, where they share contexts.
    """
    if plan.tables is not None and isinstance(tape, Eager):
        tables = plan.tables
        tape.refs.append(plan)
        start, context = tables.query_start.data_ptr(), tables.context_len.data_ptr()
        tape.step.set(tape.rows, len(tables.context_len), 0, 0, start, context)
        tape.step.set_group(0, tables.block_table.data_ptr(), tables.block_table.shape[1], 0)
        tape.step.set_masks(address(plan.masks), address(plan.spans))
    layout = layout_of(cache)
    shape = (layout.block_size, layout.heads, layout.key_dim, layout.value_dim, cache.stripe, room)
    key = (plan.group, plan.window, plan.chunked, heads, *shape)
    index = tape.plans.get(key)
    if index is None:
        made = tape.program.plan_attention(plan.group, plan.window, plan.chunked, layout, heads, room)
        index = tape.plans[key] = int(made)
    return index


def paged_attention(
    query: Any,
    cache: KvTensors,
    plan: NativeAttentionPlan,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
) -> Any:
    tape, layout = tape_of(query), cache.layout
    width = width_of(query) if isinstance(query, Handle) else query.shape[1:].numel()
    heads = width // layout.key_dim
    index = planned(tape, plan, cache, heads)
    out = tape.new(heads * layout.value_dim)
    tape.program.attention(
        tape.index(query),
        index,
        plan.group,
        plan.window,
        plan.chunked,
        buffers(tape, cache),
        heads,
        scale,
        tape.index(sinks),
        soft_cap or 0.0,
        tape.index(slopes),
        tape.index(out),
    )
    return tape.done(out)
