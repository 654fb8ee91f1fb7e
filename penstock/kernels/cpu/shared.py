"""Ops over the ranks of a group, as in `kernels.api`, over the native library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu import ops
from penstock.kernels.cpu.packed import Packed
from penstock.kernels.cpu.rank_group import RankGroup
from penstock.kernels.cpu.recording import Eager, Handle, extent_of, tape_of, width_of
from penstock.kernels.shared_ops import ExpertPlaces


def _only(weight: Packed, op: str) -> Any:
    if len(weight.parts) != 1:
        raise ValueError(f"{op} takes a weight of one matrix, not of {len(weight.parts)}")
    return weight.parts[0]


def shared_linear(
    x: Any,
    weight: Packed | None,
    group: RankGroup,
    place: tuple[int, int],
    bias: Tensor | None = None,
    residual: Any = None,
    width: int = 0,
) -> Any:
    if weight is None and not width:
        raise ValueError("a rank without a weight has to be told the width of the output")
    tape = tape_of(x)
    matrix = None if weight is None else _only(weight, "shared_linear")
    columns = width if matrix is None else matrix.rows
    out = tape.new(columns, extent_of(x))
    tape.refs.append((weight, group))
    tape.program.shared_linear(
        matrix,
        tape.index(None if matrix is None else x),
        group.native,
        place[0],
        place[1],
        columns,
        tape.index(bias),
        tape.index(residual),
        tape.index(out),
        extent_of(x),
    )
    return tape.done(out)


def gather_columns(x: Any, widths: Sequence[int], group: RankGroup) -> Any:
    return _gathered(x, widths, group, range(group.count))


def _gathered(x: Any, widths: Sequence[int], group: RankGroup, taken: range) -> Any:
    """Of the ranks' columns those of some neighbours."""
    if width_of(x) != widths[group.rank]:
        raise ValueError(f"rank {group.rank} has {width_of(x)} columns, not {widths[group.rank]} as it says")
    tape = tape_of(x)
    out = tape.new(sum(widths[rank] for rank in taken), extent_of(x))
    tape.refs.append(group)
    index = tape.index(x) if width_of(x) else tape.index(None)
    tape.program.gather_columns(
        index, list(widths), group.native, tape.index(out), extent_of(x), taken.start, taken.stop
    )
    return tape.done(out)


def shared_attention(
    query: Any,
    cache: KvTensors,
    plan: ops.NativeAttentionPlan,
    scale: float,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    slopes: Tensor | None = None,
    *,
    group: RankGroup,
    heads: Sequence[int],
) -> Any:
    ranks, dim = cache.stripe.ranks, cache.layout.key_dim
    first = group.rank // ranks * ranks
    others = range(first, first + ranks)
    together = [sum(heads[start : start + ranks]) for start in range(0, len(heads), ranks)]
    if not isinstance(query, Handle):
        query = query.flatten(1)
    query = _gathered(query, [count * dim for count in heads], group, others)
    tape, own = tape_of(query), heads[group.rank]
    index = ops.planned(tape, plan, cache, max(together), group.native.slot_bytes)
    out = tape.new(own * cache.layout.value_dim)
    tape.refs.append(group)
    tape.program.shared_attention(
        tape.index(query),
        index,
        plan.group,
        plan.window,
        plan.chunked,
        ops.buffers(tape, cache),
        group.native,
        together[group.rank // ranks],
        sum(heads[first : group.rank]),
        own,
        scale,
        tape.index(sinks),
        soft_cap or 0.0,
        tape.index(slopes),
        tape.index(out),
    )
    return tape.done(out)


def shared_embedding(
    numbers: Any, table: Packed | None, scale: float, first: int, group: RankGroup, width: int = 0
) -> Any:
    if table is None and not width:
        raise ValueError("a rank without a table has to be told the width of the output")
    tape = tape_of(numbers)
    if isinstance(tape, Eager):
        tape.step.set(tape.rows, 0, numbers.data_ptr(), 0, 0, 0)
    matrix = None if table is None else _only(table, "shared_embedding")
    columns = width if matrix is None else matrix.cols
    out = tape.new(columns)
    tape.refs.append((table, group))
    lookup = numbers.lookup if isinstance(numbers, Handle) else "token_ids"
    tape.program.shared_embedding(matrix, columns, scale, first, group.native, tape.index(out), lookup)
    return tape.done(out)


def shared_experts(
    x: Any,
    weights: Any,
    ids: Any,
    gate_up: Packed,
    down: Packed,
    activation: str,
    group: RankGroup,
    first: int,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    residual: Any = None,
    gated: bool = True,
    places: ExpertPlaces | None = None,
) -> Any:
    return ops.grouped_experts(
        x,
        weights,
        ids,
        gate_up,
        down,
        activation,
        gate_up_bias,
        down_bias,
        alpha,
        limit,
        residual,
        gated,
        group=group,
        first=first,
        places=places,
    )
