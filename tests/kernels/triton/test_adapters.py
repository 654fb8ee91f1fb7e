"""Adapters, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.config.errors import ConfigError
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_adapters import compare_adapter, compare_company


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
)
def test_every_row_gets_its_own_adapter(device, dtype, stored):
    compare_adapter(device, dtype, stored)


def test_a_part_of_a_merged_projection(device):
    compare_adapter(device, torch.float32, torch.float32, offset=30)


def test_some_tokens_of_a_step(device):
    compare_adapter(device, torch.float32, torch.float32, some=True)


def test_a_row_has_the_same_bits_among_others(device):
    compare_company(device)


def test_empty_slots_change_nothing(device):
    both = sides(device, torch.float32, "adapter")
    x, out = both.here(torch.ones(2, 8)), both.here(torch.ones(2, 8))
    start = both.here(torch.tensor([0, 2], dtype=torch.int32))
    kept = both.ours.adapter(x, out, both.ours.make_adapters(3, 8, 8), both.here(torch.tensor([1])), start)
    assert kept is out and bool((out == 1).all())


def test_what_does_not_fit_is_refused(device):
    slots = sides(device, torch.float32, "make_adapters").ours.make_adapters(3, 8, 8, 4)
    with pytest.raises(ConfigError, match="rank 5"):
        slots.fill(1, torch.zeros(5, 8), torch.zeros(8, 5), 1.0)
