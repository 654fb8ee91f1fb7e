"""Paged attention in Triton."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_paged_attention import MASKED, ROWS, Case, build, masked
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_attention import (
    attend,
    compare_attention,
    compare_chunks,
    compare_company,
    compare_masks,
)

LONG = ((1, 530), (3, 270), (12, 270), (1, 256))  # one part, several, and rows of both kinds
CHANGES = [(False, None, False), (True, None, False), (True, 1.5, False), (False, 1.5, True), (False, None, True)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (6, False), (6, True)])
def test_windows(device, rows, window, chunked):
    compare_attention(device, Case(ROWS[rows], window=window, chunked=chunked))


@pytest.mark.parametrize(("sinks", "soft_cap", "sloped"), CHANGES)
@pytest.mark.parametrize("rows", [ROWS["mixed"], LONG])
def test_changed_scores(device, rows, sinks, soft_cap, sloped):
    compare_attention(device, Case(rows, 6, 2, 8, 8, 16, None, sinks, soft_cap, sloped=sloped))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(device, dim):
    compare_attention(device, Case(((1, 70), (20, 45)), 4, 2, dim, dim, 16))


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (24, 96), (80, 64), (576, 512)])
def test_values_have_sizes_of_their_own(device, dim, value_dim):
    compare_attention(device, Case(((1, 70), (9, 45)), 2, 1, dim, value_dim, 16))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16, 71, 130])
def test_query_heads_of_a_kv_head(device, group):
    compare_attention(device, Case(((1, 40), (3, 35), (12, 20)), 2 * group, 2, 16, 16, 16))


@pytest.mark.parametrize("kv_type", ["float32", "bfloat16", "float16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_types(device, dtype, kv_type):
    compare_attention(device, Case(((1, 60), (9, 20)), 4, 2, 64, 64, 16, dtype=dtype), kv_type)


@pytest.mark.parametrize(("block_size", "window"), [(1, None), (3, 300), (16, 300), (64, None), (64, 300), (128, None)])
def test_block_sizes(device, block_size, window):
    compare_attention(device, Case(LONG, block_size=block_size, window=window))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", MASKED)
def test_masks(device, name, window):
    compare_masks(device, *masked(name, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "sinks", "soft_cap"), [(None, False, None), (300, True, 5.0)])
def test_rows_do_not_depend_on_their_mates(device, dtype, window, sinks, soft_cap):
    case = Case(LONG, 6, 2, 32, 32, 16, window, sinks, soft_cap, dtype)
    compare_company(device, case, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize(("window", "chunked", "soft_cap"), [(None, False, None), (25, False, 3.0), (30, True, None)])
def test_chunks_of_a_prompt_give_what_the_whole_gives(device, window, chunked, soft_cap):
    """All of more than eight queries."""
    case = Case(((70, 100),), 6, 2, 32, 32, 16, window, True, soft_cap, chunked=chunked)
    compare_chunks(device, case, (9, 30, 51))


@pytest.mark.parametrize("window", [None, 270])
def test_drafts_are_attended_as_if_one_followed_another(device, window):
    compare_chunks(device, Case(((8, 530),), 6, 2, 32, 32, 16, window), (1, 2, 4))


@pytest.mark.parametrize(
    ("window", "chunked", "sinks", "soft_cap", "dtype", "dims"),
    [
        (None, False, False, None, torch.float32, (16, 16)),
        (None, False, True, None, torch.bfloat16, (24, 24)),
        (270, False, True, 3.0, torch.float32, (16, 16)),
        (300, True, False, None, torch.float32, (16, 24)),
    ],
)
def test_a_token_is_the_same_in_chunks_of_any_length_where_order_is_fixed(
    device, window, chunked, sinks, soft_cap, dtype, dims
):
    """Over several parts; alone, among eight, and in longer chunks."""
    case = Case(((22, 530),), 2, 1, *dims, 16, window, sinks, soft_cap, dtype, chunked=chunked)
    compare_chunks(device, case, (1, 3, 14), str(dtype).removeprefix("torch."), fixed=True)


def test_an_empty_step(device):
    both, case = sides(device, torch.float32, "paged_attention"), Case(((0, 7), (0, 3)))
    assert attend(both, case, build(case), "float32", 0.3).shape == (0, 32)
