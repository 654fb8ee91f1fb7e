"""Adapters of Triton against the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.adapters import AdapterSlots
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_linear import SPREAD, near

INPUTS, OUTPUTS, RANKS = 1100, 70, (3, 20, 16)
SLOT, START = torch.tensor([2, 0, 1, 4, 2, 3]), torch.tensor([0, 1, 3, 4, 7, 8, 9], dtype=torch.int32)


def fill(slots: AdapterSlots, dtype: torch.dtype, move: torch.device | str = "cpu") -> AdapterSlots:
    """Slots 1, 2 and 4; 3 is emptied again."""
    generator = torch.Generator().manual_seed(1)
    for slot, rank in zip((1, 3, 2, 4), (*RANKS, 5), strict=True):
        down, up = torch.randn(rank, INPUTS, generator=generator), torch.randn(OUTPUTS, rank, generator=generator)
        slots.fill(slot, (down / 30).to(dtype).to(move), up.to(dtype).to(move), 0.5 * slot)
    slots.clear(3)
    return slots


def compare_adapter(device: str, dtype: torch.dtype, stored: torch.dtype, offset: int = 0, some: bool = False) -> None:
    both = sides(device, dtype, "make_adapters", "adapter")
    torch.manual_seed(4)
    x, out = torch.randn(9, INPUTS).to(dtype), torch.randn(9, OUTPUTS + 40).to(dtype)
    rows = torch.tensor([0, 3, 5, 8]) if some else None
    x, out = (x, out) if rows is None else (x[rows], out[rows])
    ours = fill(both.ours.make_adapters(5, INPUTS, OUTPUTS), stored, both.torch_device)
    theirs = fill(both.reference.make_adapters(5, INPUTS, OUTPUTS), torch.float32)
    here: list[Tensor] = [both.here(part) for part in (x, out, SLOT, START)]
    given = None if rows is None else both.here(rows)
    found = both.ours.adapter(here[0], here[1], ours, *here[2:], offset=offset, rows=given)
    assert found is here[1]
    expected = both.reference.adapter(x.float(), out.float(), theirs, SLOT, START, offset=offset, rows=rows)
    near(both, found, expected, 8 * SPREAD[dtype])
    untouched = torch.isin(torch.arange(9) if rows is None else rows, torch.tensor([1, 2, 8]))
    assert torch.equal(found.cpu()[untouched], out[untouched])
    assert torch.equal(found.cpu()[:, :offset], out[:, :offset])
    assert torch.equal(found.cpu()[:, offset + OUTPUTS :], out[:, offset + OUTPUTS :])


def compare_company(device: str) -> None:
    """The same bits of a row alone and among others."""
    both = sides(device, torch.float32, "adapter")
    ours = fill(both.ours.make_adapters(5, INPUTS, OUTPUTS), torch.float32, both.torch_device)
    x, out = both.here(torch.randn(9, INPUTS)), both.here(torch.zeros(9, OUTPUTS))
    every = both.ours.adapter(x, out, ours, both.here(SLOT), both.here(START))
    one, start = both.here(torch.zeros(1, OUTPUTS)), both.here(torch.tensor([0, 1], dtype=torch.int32))
    both.ours.adapter(x[5:6], one, ours, both.here(SLOT[3:4]), start)
    assert torch.equal(one[0], every[5]) and one.any()
