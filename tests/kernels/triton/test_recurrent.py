"""Recurrent ops, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels.cache import StateRows
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_recurrent import CASES, OPS, compare_places, compare_recurrent


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference_for_any_cut(device, name):
    compare_recurrent(device, torch.float32, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_states_go_where_each_token_says(device, name):
    compare_places(device, CASES[name])


@pytest.mark.parametrize("name", ["conv 4", "scan, gated", "delta"])
def test_half_precision(device, name):
    compare_recurrent(device, torch.bfloat16, CASES[name])


def test_rows_without_tokens_leave_their_states(device):
    both = sides(device, torch.float32, *OPS)
    rows = StateRows(*(both.here(torch.tensor(x, dtype=t)) for x, t in (
        ([0, 1], torch.int64), ([0, 0, 1], torch.int32), ([0, 1], torch.int32)
    )))  # fmt: skip
    state, x, one = both.here(torch.ones(2, 1, 4)), both.here(torch.ones(1, 4)), both.here(torch.ones(1, 1))
    both.ours.short_conv(x, both.here(torch.ones(2, 4)), None, state, rows)
    both.ours.selective_scan(x, one, -one[0], one, one, state.unsqueeze(1), rows)
    both.ours.gated_delta_rule(one, one, x, one, one, -one[0], state.unsqueeze(1), rows)
    assert torch.equal(state[0].cpu(), torch.ones(1, 4)) and not torch.equal(state[1].cpu(), torch.ones(1, 4))
    none = both.ours.selective_scan(x[:0], one[:0], -one[0], one[:0], one[:0], state.unsqueeze(1), rows)
    assert none.shape == both.ours.short_conv(x[:0], both.here(torch.ones(2, 4)), None, state, rows).shape == (0, 4)


def test_steps_far_from_zero_are_exact_in_proportion(device):
    """ln(1 + e^x) where e^x is tiny, 1, and huge; h = dt · x, as everything else is 1 or 0; no number stays none."""
    both = sides(device, torch.float32, *OPS)
    dt = torch.tensor([-80.0, -30.0, -9.0, -1e-6, 0.0, 0.5, 20.0, 87.0, float("nan")]).unsqueeze(1)
    ones, count = torch.ones(len(dt), 1), len(dt)
    rows = StateRows(*(both.here(x) for x in (torch.arange(count), torch.arange(count + 1).int(), ones[:, 0].int())))
    one, state = both.here(ones), both.here(torch.zeros(count, 1, 1, 1))
    out = both.ours.selective_scan(one, both.here(dt), -one[0], one, one, state, rows).cpu()
    exact = torch.nn.functional.softplus(dt.double())
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=0.0, equal_nan=True)
