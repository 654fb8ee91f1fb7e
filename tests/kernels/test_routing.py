"""Routing with sigmoids, a bias on the choice and groups of experts, by the rule and on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import native, ops
from penstock.kernels.reference.experts import route_experts


@pytest.fixture(params=native.built_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    reason = native.library().refusal(request.param)
    if reason is not None:
        pytest.skip(reason)
    native.select_isa(request.param)
    yield request.param
    native.select_isa("auto")


CASES = [
    ("sigmoid_topk", 16, 4, (1, 1), True),
    ("sigmoid_topk", 16, 4, (4, 2), True),
    ("sigmoid_topk", 256, 8, (8, 4), True),
    ("sigmoid_topk", 6, 2, (6, 3), False),
    ("softmax_topk", 24, 5, (6, 3), False),
    ("softmax_topk", 9, 3, (1, 1), False),
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
