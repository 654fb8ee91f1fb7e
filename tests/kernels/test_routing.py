"""Routing by scores, a bias on the choice and groups of experts, by the rule and on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import ops
from penstock.kernels.reference import dense
from penstock.kernels.reference.experts import route_experts

CASES = [
    ("sigmoid_topk", 16, 4, (1, 1), True),
    ("sigmoid_topk", 16, 4, (4, 2), True),
    ("sigmoid_topk", 256, 8, (8, 4), True),
    ("sigmoid_topk", 6, 2, (6, 3), False),
    ("softmax_topk", 24, 5, (6, 3), False),
    ("softmax_topk", 9, 3, (1, 1), False),
    ("softmax_topk", 24, 5, (6, 3), True),
    ("softmax_topk", 70, 4, (1, 1), True),
]


def by_the_rule(
    logits: list[float], top_k: int, routing: str, renormalize: bool, bias: list[float], groups: tuple[int, int]
) -> dict[int, float]:
    if routing == "sigmoid_topk":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        counted = 2
    else:
        total = sum(map(math.exp, logits))
        scores = [math.exp(x) / total for x in logits]
        counted = 1
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(logits) // groups[0]
    worth = [sum(sorted(choice[g * size : (g + 1) * size])[-counted:]) for g in range(groups[0])]
    best = sorted(range(groups[0]), key=lambda g: -worth[g])[: groups[1]]
    allowed = [e for e in range(len(logits)) if e // size in best]
    chosen = sorted(allowed, key=lambda e: -choice[e])[:top_k]
    divisor = sum(scores[e] for e in chosen) if renormalize else 1.0
    return {e: scores[e] / divisor for e in chosen}


@pytest.mark.parametrize(("routing", "experts", "top_k", "groups", "biased"), CASES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(isa, routing, experts, top_k, groups, biased, renormalize):
    torch.manual_seed(experts)
    logits = torch.randn(40, experts) * 2
    bias: Tensor | None = torch.randn(experts) if biased else None
    how = (logits, top_k, routing, renormalize, bias, groups, 2.5)
    weights, ids = route_experts(*how)
    extra = [0.0] * experts if bias is None else bias.tolist()
    for token in range(40):
        expected = by_the_rule(logits[token].tolist(), top_k, routing, renormalize, extra, groups)
        ours = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert ours == pytest.approx({e: 2.5 * weight for e, weight in expected.items()}, rel=1e-5)
    fast, fast_ids = ops.route_experts(*how)
    assert torch.equal(fast_ids, ids)
    torch.testing.assert_close(fast, weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(ops.route_experts(logits[7:8], *how[1:])[0], fast[7:8])


def mixed_sparsely(logits: list[float], top_k: int, jitter: float) -> dict[int, float]:
    left, found = dict(enumerate(logits)), {}
    for _ in range(top_k):
        best = max(left, key=lambda e: left[e])
        near = [x for x in left.values() if not (left[best] - x) / max(abs(x), left[best]) > 2 * jitter]
        found[best] = 1 / sum(math.exp(x - left[best]) for x in near)
        del left[best]
    return found


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3, 10.0])
@pytest.mark.parametrize("shift", [-9.0, 0.0, 4.0])
def test_sparsemixer(isa, jitter, shift):
    torch.manual_seed(3)
    logits = torch.randn(40, 16) + shift
    how = (logits, 3, "sparsemixer", False, None, (1, 1), 1.5, jitter)
    weights, ids = route_experts(*how)
    for token in range(40):
        expected = mixed_sparsely(logits[token].tolist(), 3, jitter)
        ours = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert ours == pytest.approx({e: 1.5 * weight for e, weight in expected.items()}, rel=1e-5)
    fast, fast_ids = ops.route_experts(*how)
    assert torch.equal(fast_ids, ids)
    torch.testing.assert_close(fast, weights, rtol=1e-5, atol=1e-7)


def test_row_factors_and_temperatures(isa):
    positions = torch.tensor([0, 3, 4, 5, 9, 10, 1_000_000])
    factors = ops.position_scales(positions, 5.0, 0.1, 1)
    expected = [1 + 0.1 * math.log1p(steps) for steps in (0, 0, 1, 1, 2, 2, 200_000)]
    assert factors.shape == (7, 1)
    assert factors[:, 0].tolist() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(dense.position_scales(positions, 5.0, 0.1, 1), factors)
    x = torch.randn(7, 3, 9)
    assert torch.equal(ops.scale_rows(x, factors), x * factors[:, :, None])
    assert torch.equal(dense.scale_rows(x, factors), x * factors[:, :, None])
