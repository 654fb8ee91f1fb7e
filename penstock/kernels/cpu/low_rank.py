"""Adapters, as in `kernels.api`, over the native library: on tensors at once, on handles recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.kernels.adapters import Adapted, AdapterSlots, PlacedAdapters, TokenAdapters, rows_of
from penstock.kernels.cpu import native
from penstock.kernels.cpu.recording import Eager, Recording, extent_of, tape_of, width_of


def make_adapters(slots: int, inputs: int, outputs: int, max_rank: int = 256, experts: int = 1) -> AdapterSlots:
    table = native.library().AdapterTable(slots, inputs, outputs, max_rank, experts)
    return AdapterSlots(slots, inputs, outputs, max_rank, experts, table)


def _tell(tape: Recording, tokens: TokenAdapters, x: Any) -> None:
    """Tells a tape that runs at once which adapters the rows of x have; a recording is told with each step."""
    if not isinstance(tape, Eager):
        return
    rows = rows_of(tokens, x)
    slot, scale = rows.slot.contiguous(), rows.scale.contiguous()
    tape.refs.append((slot, scale))
    tape.step.set_adapters(slot.data_ptr(), scale.data_ptr(), slot.shape[1])


def adapter_uses(tape: Recording, parts: Sequence[PlacedAdapters], tokens: TokenAdapters, x: Any) -> list[Any]:
    """The tables of an op's adapters, with the columns where they begin."""
    _tell(tape, tokens, x)
    tape.refs.append(parts)
    make = native.library().AdapterUse
    return [make(part.slots.table, part.offset) for part in parts]


def table_adapter(numbers: Any, out: Any, adapters: Adapted, scale: float = 1.0) -> Any:
    for part in adapters.parts:
        tape = tape_of(out)
        _tell(tape, adapters.tokens, out)
        if isinstance(tape, Eager):
            tape.step.set(tape.rows, 0, numbers.data_ptr(), 0, 0, 0)
        tape.refs.append(part)
        tape.program.table_adapter(part.slots.table, scale, tape.index(out))
        tape.done()
    return out


def adapter(x: Any, out: Any, adapters: Adapted, bias: Tensor | None = None, residual: Any = None) -> Any:
    for part in adapters.parts:
        tape = tape_of(x)
        _tell(tape, adapters.tokens, x)
        tape.refs.append(part)
        tape.program.adapter(
            tape.index(x),
            part.slots.table,
            width_of(out),
            part.offset,
            tape.index(bias),
            tape.index(residual),
            tape.index(out),
            extent_of(x),
        )
        tape.done()
    return out
