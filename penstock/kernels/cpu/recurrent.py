"""Recurrent ops, as in `kernels.api`, over the native library: on tensors at once, on handles recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.kernels.cache import StateRows
from penstock.kernels.cpu.recording import Eager, Handle, Recording, extent_of, tape_of, width_of
from penstock.kernels.cpu.step_program import address


def _tape(x: Any, rows: StateRows) -> Recording:
    """The tape of x, told of the rows where it runs at once."""
    tape = tape_of(x)
    if isinstance(tape, Eager):
        tape.refs.append(rows)
        starts, lengths = rows.query_start.data_ptr(), rows.context_len.data_ptr()
        tape.step.set(tape.rows, len(rows.slot), 0, 0, starts, lengths)
        tape.step.set_states(rows.slot.data_ptr(), address(rows.after))
    return tape


def split(x: Any, sizes: Sequence[int]) -> tuple[Any, ...]:
    if not isinstance(x, Handle):
        return tuple(x.split(list(sizes), dim=-1))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return tuple(x.part(start, size) for start, size in zip(starts, sizes, strict=True))


def short_conv(
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: str | None = None,
    before: Any = None,
    after: Any = None,
) -> Any:
    taps, channels = weight.shape
    if not 2 <= taps <= 4:
        raise ValueError(f"a convolution over {taps} tokens is not served: 2 to 4 are.")
    tape = _tape(x, rows)
    out = tape.new(channels)
    tape.program.short_conv(
        *map(tape.part, (x, before, after)),
        *map(tape.index, (weight, bias)),
        taps,
        channels,
        activation == "silu",
        tape.index(state),
        tape.index(out),
        extent_of(x),
    )
    return tape.done(out)


def selective_scan(
    x: Any,
    dt: Any,
    a: Tensor,
    b: Any,
    c: Any,
    state: Tensor,
    rows: StateRows,
    dt_bias: Tensor | None = None,
    skip: Tensor | None = None,
    gate: Any = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Any:
    tape, (_, heads, states, size) = _tape(x, rows), state.shape
    out = tape.new(heads * size)
    tape.program.selective_scan(
        *map(tape.part, (x, dt, b, c, gate)),
        *map(tape.index, (a, dt_bias, skip)),
        a.dim() == 2,
        dt_limit[0],
        dt_limit[1],
        heads,
        width_of(b) // states,
        size,
        states,
        tape.index(state),
        tape.index(out),
        extent_of(x),
    )
    return tape.done(out)


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    step: Any,
    beta: Any,
    a: Tensor,
    state: Tensor,
    rows: StateRows,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    tiled: bool = False,
) -> Any:
    tape, (_, heads, dim, width) = _tape(q, rows), state.shape
    out = tape.new(heads * width)
    tape.program.delta_rule(
        *map(tape.part, (q, k, v, step, beta)),
        tape.index(a),
        tape.index(bias),
        eps,
        heads,
        width_of(q) // dim,
        dim,
        width,
        tiled,
        tape.index(state),
        tape.index(out),
        extent_of(q),
    )
    return tape.done(out)


def gated_rms_norm(
    x: Any,
    gate: Any,
    weight: Tensor,
    eps: float,
    group_size: int | None = None,
    gate_first: bool = False,
    segment: int = 0,
) -> Any:
    tape, size = tape_of(x), width_of(x)
    out = tape.new(size, extent_of(x))
    tape.program.gated_norm(
        tape.part(x),
        tape.part(gate),
        tape.index(weight),
        size,
        group_size or size,
        eps,
        gate_first,
        segment,
        tape.index(out),
        extent_of(x),
    )
    return tape.done(out)
