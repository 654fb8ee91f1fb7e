"""Adapters, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.kernels.adapters import Adapted, PlacedAdapters, TokenAdapters
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_adapters import (
    compare_adapter,
    compare_company,
    compare_expert_adapters,
    compare_gated,
    compare_head_adapters,
    compare_table_adapter,
)

FLOAT, BRAIN = torch.float32, torch.bfloat16


@pytest.mark.parametrize(("dtype", "stored"), [(FLOAT, FLOAT), (BRAIN, FLOAT), (torch.float16, torch.float16)])
def test_every_token_gets_its_own_adapters(device, dtype, stored):
    compare_adapter(device, dtype, stored)


def test_a_part_of_a_merged_projection(device):
    compare_adapter(device, FLOAT, FLOAT, offset=30)


def test_some_tokens_of_a_step(device):
    compare_adapter(device, FLOAT, FLOAT, some=True)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_factors_of_columns(device, dtype):
    compare_adapter(device, dtype, FLOAT, offset=10, columns=True)


@pytest.mark.parametrize(("dtype", "columns"), [(FLOAT, False), (FLOAT, True), (BRAIN, False)])
def test_rows_of_a_table(device, dtype, columns):
    compare_table_adapter(device, dtype, FLOAT, columns)


def test_a_token_has_the_same_bits_among_others(device):
    compare_company(device)


@pytest.mark.parametrize(("dtype", "fixed"), [(FLOAT, False), (BRAIN, False), (BRAIN, True)])
def test_gates_and_ups_are_changed_before_their_activation(device, dtype, fixed):
    compare_gated(device, dtype, fixed)


@pytest.mark.parametrize(("dtype", "columns"), [(FLOAT, False), (FLOAT, True), (BRAIN, False)])
def test_experts_have_adapters_each(device, dtype, columns):
    compare_expert_adapters(device, dtype, columns)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_heads_have_adapters_each(device, dtype):
    compare_head_adapters(device, dtype)


def test_empty_slots_change_nothing(device):
    both = sides(device, FLOAT, "adapter")
    x, out = both.here(torch.ones(2, 8)), both.here(torch.ones(2, 8))
    has = TokenAdapters(both.here(torch.tensor([[1], [1]])), both.here(torch.ones(2, 1)), both.here(torch.arange(0)))
    kept = both.ours.adapter(x, out, Adapted((PlacedAdapters(both.ours.make_adapters(3, 8, 8)),), has))
    assert kept is out and bool((out == 1).all())


def test_what_does_not_fit_is_refused(device):
    slots = sides(device, FLOAT, "make_adapters").ours.make_adapters(3, 8, 8, 4)
    with pytest.raises(ConfigError, match="rank 5"):
        slots.fill(1, torch.zeros(5, 8), torch.zeros(8, 5), 1.0)
