"""Recurrent ops of Triton against the reference, and any cut of rows into steps against the whole, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.kernels.cache import StateRows
from tests.kernels.triton.compare import TOLERANCE, sides

TOKENS = 9
OPS = ("short_conv", "selective_scan", "gated_delta_rule", "split")
Run = Callable[[KernelSet, Sequence[Tensor], Sequence[Tensor | None], Tensor, StateRows], Tensor]


@dataclass(frozen=True)
class Case:
    """An op over two sequences: `inputs` [2, TOKENS, width] each, then constants, a slot's shape, and the call."""

    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor | None, ...]
    state: tuple[int, ...]
    run: Run


def conv(channels: int, taps: int, bias: bool, activation: str | None, gated: bool) -> Case:
    def run(ops: KernelSet, inputs: Sequence[Tensor], constants: Sequence[Tensor | None], *where: object) -> Tensor:
        before, x, after = ops.split(inputs[0], (channels,) * 3)
        gates = (before, after) if gated else (None, None)
        return ops.short_conv(x, *constants, *where, activation, *gates)  # type: ignore[arg-type]

    constants = torch.randn(taps, channels), torch.randn(channels) if bias else None
    return Case((torch.randn(2, TOKENS, 3 * channels),), constants, (taps - 1, channels), run)


def scan(heads: int, size: int, states: int, groups: int, full: bool) -> Case:
    """Mamba-2, its inputs parts of one activation."""
    sizes = (heads * size, heads * size, groups * states, groups * states, heads)

    def run(ops: KernelSet, inputs: Sequence[Tensor], constants: Sequence[Tensor | None], *where: object) -> Tensor:
        gate, x, b, c, dt = ops.split(inputs[0], sizes)
        rates, bias, skip = constants
        limit = (0.3, 0.9) if full else (0.0, float("inf"))
        return ops.selective_scan(x, dt, rates, b, c, *where, bias, skip, gate if full else None, limit)  # type: ignore[arg-type]

    constants = -torch.rand(heads) * 3, torch.randn(heads), torch.randn(heads) if full else None
    return Case((torch.randn(2, TOKENS, sum(sizes)),), constants, (heads, states, size), run)


def channel_scan(channels: int, states: int, full: bool) -> Case:
    """Mamba: every channel has steps and decays of its own."""

    def run(ops: KernelSet, inputs: Sequence[Tensor], constants: Sequence[Tensor | None], *where: object) -> Tensor:
        x, dt, b, c, gate = inputs
        rates, bias, skip = constants
        return ops.selective_scan(x, dt, rates, b, c, *where, bias, skip, gate if full else None)  # type: ignore[arg-type]

    inputs = tuple(torch.randn(2, TOKENS, width) for width in (channels, channels, states, states, channels))
    vectors = (torch.randn(channels), torch.randn(channels)) if full else (None, None)
    return Case(inputs, (-torch.rand(states, channels) * 4, *vectors), (1, states, channels), run)


def delta(heads: int, keys: int, dim: int, width: int, tiled: bool) -> Case:
    sizes = (keys * dim, keys * dim, heads * width)

    def run(ops: KernelSet, inputs: Sequence[Tensor], constants: Sequence[Tensor | None], *where: object) -> Tensor:
        parts = *ops.split(inputs[0], sizes), *ops.split(inputs[1], (heads, heads))
        rates, bias = constants
        return ops.gated_delta_rule(*parts, rates, *where, bias, tiled=tiled)  # type: ignore[arg-type,misc]

    inputs = torch.randn(2, TOKENS, sum(sizes)), torch.randn(2, TOKENS, 2 * heads)
    return Case(inputs, (-torch.rand(heads) * 2, torch.randn(heads) if tiled else None), (heads, dim, width), run)


CASES: dict[str, Callable[[], Case]] = {
    "conv 4": lambda: conv(150, 4, True, "silu", False),
    "conv 3, gated": lambda: conv(24, 3, False, None, True),
    "conv 2": lambda: conv(7, 2, True, None, False),
    "scan": lambda: scan(4, 6, 5, 2, False),
    "scan, gated": lambda: scan(2, 20, 128, 1, True),
    "channels": lambda: channel_scan(70, 16, True),
    "channels, bare": lambda: channel_scan(8, 1, False),
    "delta": lambda: delta(2, 1, 20, 12, False),
    "delta, tiled": lambda: delta(4, 2, 16, 8, True),
}


def step(
    case: Case, ops: KernelSet, here: Callable[[Tensor], Tensor], memory: Tensor,
    spans: Sequence[tuple[int, int, int]], slots: Sequence[int], after: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """One step over (sequence, first token, last + 1); `slots` of both sequences."""
    counts = torch.tensor([0, *(end - begin for _, begin, end in spans)]).cumsum(0).int()
    contexts = torch.tensor([end for _, _, end in spans], dtype=torch.int32)
    named = torch.tensor([slots[sequence] for sequence, _, _ in spans])
    inputs = [here(torch.cat([x[sequence, begin:end] for sequence, begin, end in spans])) for x in case.inputs]
    constants = [None if one is None else here(one) for one in case.constants]
    places = None if after is None else here(after)
    return case.run(ops, inputs, constants, memory, StateRows(here(named), here(counts), here(contexts), places))


def compare_recurrent(device: str, dtype: torch.dtype, make: Callable[[], Case]) -> None:
    """The reference's outputs and states; whatever a slot held before; the same bits for any cut and any company."""
    both = sides(device, dtype, *OPS)
    torch.manual_seed(0)
    case = make()
    case = Case(tuple(x.to(dtype) for x in case.inputs), case.constants, case.state, case.run)
    spans = [(0, 0, TOKENS), (1, 0, TOKENS)]
    memory, expected = (torch.full((4, *case.state), float("nan")) for _ in range(2))
    ours = both.here(memory)
    out = step(case, both.ours, both.here, ours, spans, (2, 1))
    limit = max(1e-4, TOLERANCE[dtype])
    both.close(out, step(case, both.reference, torch.clone, expected, spans, (2, 1)), limit)
    torch.testing.assert_close(ours.cpu()[[2, 1]], expected[[2, 1]], rtol=1e-4, atol=1e-4)
    assert ours[[0, 3]].isnan().all()
    again, pieces = both.here(memory), []
    for begin, end in ((0, 1), (1, 3), (3, 4), (4, TOKENS)):  # the second sequence in pieces, in company or alone
        company = [(0, 0, TOKENS)] if begin == 1 else []
        pieces.append(step(case, both.ours, both.here, again, [*company, (1, begin, end)], (0, 3))[begin - end :])
    assert torch.equal(torch.cat(pieces), out[TOKENS:])
    assert torch.equal(again[[0, 3]], ours[[2, 1]])


def compare_places(device: str, make: Callable[[], Case]) -> None:
    """States behind each draft, in slots of their own: those of a row that ends there, to the bit."""
    both = sides(device, torch.float32, *OPS)
    torch.manual_seed(0)
    case = make()
    out = step(
        case, both.ours, both.here, both.here(torch.zeros(4, *case.state)), [(0, 0, TOKENS), (1, 0, TOKENS)], (2, 1)
    )
    for begin in (0, 2):
        memory = both.here(torch.full((9, *case.state), float("nan")))
        if begin:
            step(case, both.ours, both.here, memory, [(0, 0, begin), (1, 0, begin)], (1, 3))
        before, places = memory[1].clone(), (5, 4, 7, 8)
        after = torch.tensor([*(3,) * (TOKENS - begin), places[0], *places])  # two known tokens and three drafts
        found = step(case, both.ours, both.here, memory, [(1, begin, TOKENS), (0, begin, begin + 5)], (1, 3), after)
        assert torch.equal(found, torch.cat((out[TOKENS + begin :], out[begin : begin + 5])))
        assert not begin or torch.equal(memory[1], before)
        for count, place in enumerate((*places, 3), begin + 2):
            alone = both.here(torch.full((4, *case.state), float("nan")))
            row = int(place == 3)
            step(case, both.ours, both.here, alone, [(row, 0, TOKENS if row else count)], (0, 0))
            assert torch.equal(memory[place], alone[0])
        assert memory[[0, 2, 6]].isnan().all()
