"""Low-rank adapters: native against the reference and plain arithmetic, ragged rows with adapters of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.kernels.adapters import AdapterSlots
from penstock.kernels.cpu import native, recurrent
from penstock.kernels.reference import recurrent as reference

INPUTS, OUTPUTS = 72, 300
STARTS = torch.tensor([0, 1, 8, 9, 13, 13, 30], dtype=torch.int32)
SLOTS = torch.tensor([1, 2, 0, 3, 1, 4])
RANKS = {1: 8, 2: 3, 3: 17, 4: 64}
OPS = {"native": recurrent, "reference": reference}


def filled(ops: Any, dtype: torch.dtype = torch.float32) -> AdapterSlots:
    generator = torch.Generator().manual_seed(5)
    slots = ops.make_adapters(6, INPUTS, OUTPUTS, 64)
    for slot, rank in RANKS.items():
        down = torch.randn(rank, INPUTS, generator=generator) * INPUTS**-0.5
        up = torch.randn(OUTPUTS, rank, generator=generator)
        slots.fill(slot, down.to(dtype), up.to(dtype), 0.5 * slot)
    return slots


def activations(width: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(30, INPUTS, generator=generator), torch.randn(30, width, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_every_row_gets_its_own_adapter(ops, dtype):
    adapters = filled(ops, dtype)
    x, base = activations()
    out = ops.adapter(x, base.clone(), adapters, SLOTS, STARTS)
    for row, slot in enumerate(SLOTS.tolist()):
        begin, end = STARTS[row], STARTS[row + 1]
        expected = base[begin:end].double()
        if slot:
            entry = adapters.entries[slot]
            low = x[begin:end].double() @ entry.down.double().T
            expected = expected + entry.scale * low @ entry.up.double()
        torch.testing.assert_close(out[begin:end].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[8:9], base[8:9])


def test_instruction_sets_threads_and_company_give_the_same_bits():
    x, base = activations()
    results = []
    for threads, isa in enumerate(native.usable_isas(), start=1):
        native.select_isa(isa)
        native.set_num_threads(threads)
        results.append(recurrent.adapter(x, base.clone(), filled(recurrent), SLOTS, STARTS))
    native.select_isa("auto")
    native.set_num_threads(1)
    assert len(results) > 1 and all(torch.equal(result, results[0]) for result in results)
    for row, slot in enumerate(SLOTS.tolist()):
        for token in range(STARTS[row], STARTS[row + 1]):
            one = torch.tensor([slot]), torch.tensor([0, 1], dtype=torch.int32)
            alone = recurrent.adapter(x[token : token + 1], base[token : token + 1].clone(), filled(recurrent), *one)
            assert torch.equal(alone, results[0][token : token + 1])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_a_part_of_a_merged_projection(ops):
    x, base = activations(OUTPUTS + 50)
    out = ops.adapter(x, base.clone(), filled(ops), SLOTS, STARTS, 20)
    alone = ops.adapter(x, base[:, 20 : 20 + OUTPUTS].clone(), filled(ops), SLOTS, STARTS)
    assert torch.equal(out[:, 20 : 20 + OUTPUTS], alone)
    assert torch.equal(out[:, :20], base[:, :20]) and torch.equal(out[:, 20 + OUTPUTS :], base[:, 20 + OUTPUTS :])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_some_tokens_of_a_step(ops):
    x, base = activations()
    out = ops.adapter(x, base.clone(), filled(ops), SLOTS, STARTS)
    rows = torch.tensor([29, 0, 8, 12, 7])
    some = ops.adapter(x[rows], base[rows], filled(ops), SLOTS, STARTS, 0, rows)
    torch.testing.assert_close(some, out[rows], rtol=1e-5, atol=1e-5)
    assert ops is reference or torch.equal(some, out[rows])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_an_emptied_slot_changes_nothing(ops):
    adapters = filled(ops)
    for slot in RANKS:
        adapters.clear(slot)
    x, base = activations()
    assert torch.equal(ops.adapter(x, base.clone(), adapters, SLOTS, STARTS), base)
    assert torch.equal(ops.adapter(x, base.clone(), filled(ops), SLOTS * 0 + 99, STARTS), base)  # no such slot


@pytest.mark.parametrize(
    ("slot", "down", "up", "message"),
    [
        (6, (4, INPUTS), (OUTPUTS, 4), "slot 6 is not one of 1 to 5"),
        (0, (4, INPUTS), (OUTPUTS, 4), "slot 0 is not one of 1 to 5"),
        (1, (4, INPUTS + 1), (OUTPUTS, 4), "needs \\(rank, 72\\)"),
        (1, (4, INPUTS), (OUTPUTS, 5), "needs \\(rank, 72\\)"),
        (1, (65, INPUTS), (OUTPUTS, 65), "rank 65; at most 64"),
    ],
)
def test_what_does_not_fit_is_refused(slot, down, up, message):
    with pytest.raises(ConfigError, match=message):
        recurrent.make_adapters(6, INPUTS, OUTPUTS, 64).fill(slot, torch.zeros(down), torch.zeros(up), 1.0)


def test_types_must_agree():
    with pytest.raises(ConfigError, match=r"torch\.float64"):
        recurrent.make_adapters(2, 4, 4).fill(1, torch.zeros(2, 4).double(), torch.zeros(4, 2).double(), 1.0)
