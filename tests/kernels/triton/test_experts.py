"""Mixtures of experts, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_experts import OPS, compare_experts, compare_routing, compare_sorting

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("routing", "experts", "top_k", "groups", "biased"),
    [
        ("sigmoid_topk", 16, 4, (4, 2), True),
        ("sigmoid_topk", 256, 8, (8, 4), True),
        ("sigmoid_topk", 6, 2, (6, 3), False),
        ("softmax_topk", 24, 5, (6, 3), False),
        ("softmax_topk", 70, 4, (1, 1), True),
        ("topk_softmax", 32, 4, (1, 1), False),
        ("topk_softmax", 24, 5, (6, 3), False),
    ],
)
def test_routing(device, routing, experts, top_k, groups, biased, renormalize):
    compare_routing(device, routing, experts, top_k, groups, biased, renormalize, factored=experts == 24)


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3, 10.0])
def test_sparsemixer(device, jitter):
    compare_routing(device, "sparsemixer", 16, 3, jitter=jitter)


@pytest.mark.parametrize("kind", ["plain", "q4_0", "zeros", "order", "fp4", "fp8", "blocks", "int8"])
def test_experts(device, kind):
    compare_experts(device, torch.float32, kind, 6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["plain", "fp4"])
def test_experts_with_biases(device, dtype, kind):
    compare_experts(device, dtype, kind, 3, "swigluoai", biased=True)


def test_experts_without_gates(device):
    compare_experts(device, torch.float32, "plain", 3, "relu2", gated=False, biased=True)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 3), (50, 3), (700, 9)])
def test_tiles_hold_every_row_once_and_in_order(device, tokens, experts):
    compare_sorting(device, tokens, experts)


def test_no_tokens(device):
    ours = sides(device, torch.float32, "grouped_experts").ours
    weight = ours.pack_experts([torch.randn(3 * 8, 16)], 3)
    empty = torch.zeros(0, 16).to("cpu" if device == "interpreter" else device)
    ids = torch.zeros(0, 2, dtype=torch.int64, device=empty.device)
    out = ours.grouped_experts(empty, ids.float(), ids, weight, weight, "relu", gated=False)
    assert out.shape == (0, 8)


def test_an_unknown_routing_is_refused(device):
    with pytest.raises(ValueError, match="softmax_topk"):
        compare_routing(device, "softmax", 8, 2)


def test_experts_are_added_by_rising_expert(device):
    both = sides(device, torch.float32, *OPS)
    ours, generator = both.ours, torch.Generator().manual_seed(2)
    gate_up = ours.pack_experts([both.here(torch.randn(5 * 32, 16, generator=generator)) for _ in range(2)], 5)
    down = ours.pack_experts([both.here(torch.randn(5 * 16, 32, generator=generator))], 5)
    x, weights = torch.randn(3, 16, generator=generator), torch.rand(3, 3, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(3)])
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        routed = both.here(weights[:, order].contiguous()), both.here(ids[:, order].contiguous())
        results.append(ours.grouped_experts(both.here(x), *routed, gate_up, down, "silu"))
    assert torch.equal(*results)
