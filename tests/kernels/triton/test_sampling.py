"""Sampling, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.sampling import RowSettings
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_sampling import (
    compare_chains,
    compare_errors,
    compare_followers,
    compare_logprobs,
    compare_processors,
    compare_samplers,
    compare_sampling,
    compare_tokens_left_on_the_device,
    compare_verified,
)


@pytest.mark.parametrize(("kind", "steps"), [("spread", 2), ("ties", 1), ("flat", 1)])
def test_the_same_tokens(device, kind, steps):
    compare_sampling(device, kind, steps)


def test_drafts_are_verified_alike(device):
    compare_verified(device, 2)


def test_errors(device):
    compare_errors(device)


@pytest.mark.parametrize("ties", [False, True])
def test_logprobs(device, ties):
    compare_logprobs(device, ties)


def test_tokens_left_on_the_device(device):
    compare_tokens_left_on_the_device(device)


def test_rows_that_follow_count_what_they_take(device):
    compare_followers(device)


def test_the_sampler_leaves_logits_where_they_are(device):
    compare_samplers(device)


def test_misuse_is_refused(device):
    kernel = sides(device, torch.float32, "sampling").ours.sampling()
    row = kernel.row(RowSettings(40))
    for name in ("stop_ids", "allowed_ids", "prompt_ids", "generated_ids"):
        with pytest.raises(ValueError, match="40"):
            kernel.row(RowSettings(40, **{name: (40,)}))
    with pytest.raises(ValueError, match="40"):
        row.extend(40)
    with pytest.raises(ValueError, match="length"):
        kernel.sample(torch.zeros(2, 40), [row], np.arange(2))
    with pytest.raises(ValueError, match="more than once"):
        kernel.sample(torch.zeros(2, 40), [row, row], np.arange(2))
    with pytest.raises(ValueError, match="target"):
        kernel.logprobs(torch.zeros(1, 40), np.array([40]), 0)


def test_rows_with_chains_are_drawn_as_on_the_host(device):
    compare_chains(device)


def test_rows_with_processors_are_processed_as_on_the_host(device):
    compare_processors(device)
