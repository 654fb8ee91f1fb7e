"""Ops over streams, parts and rows: by their definition in double precision, on every instruction set, recorded too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import ops, parts, recurrent
from penstock.kernels.plain import plain_matrix
from penstock.kernels.reference import dense, experts

SIZES = (1, 15, 16, 67, 256)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, exact: Tensor) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact.double(), rtol=3e-6, atol=3e-6)


def both(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return getattr(parts, name), getattr(dense, name)


@pytest.mark.parametrize("size", SIZES)
def test_multiply(isa: str, size: int) -> None:
    x, merged, row = rand(5, size), rand(5, 3 * size, seed=1), rand(size, seed=2)
    middle = recurrent.split(merged, (size, size, size))[1]
    for run in both("multiply"):
        close(run(x, merged[:, :size].contiguous()), x.double() * merged[:, :size].double())
        close(run(x, middle), x.double() * merged[:, size : 2 * size].double())
        close(run(x, row), x.double() * row.double())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 4, 8])
def test_weighted_sum(isa: str, size: int, count: int) -> None:
    base, merged = rand(6, size), rand(6, 2 * count, seed=1)
    terms = [rand(6, size, seed=2 + index) for index in range(count)]
    weights = recurrent.split(merged, (count, count))[1]
    exact = base.double() + sum(merged[:, count + i, None].double() * terms[i].double() for i in range(count))
    for run in both("weighted_sum"):
        close(run(base, terms, weights), exact)


@pytest.mark.parametrize("size", SIZES)
def test_match_rms(isa: str, size: int) -> None:
    x, like = rand(4, size), rand(4, size, seed=1) * 3
    x[2] = 1e-4  # its mean square counts for more than it is
    x[3] = 0
    own, wanted = x.double().square().mean(1, True), like.double().square().mean(1, True)
    for run in both("match_rms"):
        close(run(x, like, 1e-5), x.double() * wanted.sqrt() / own.clamp(min=1e-5).sqrt())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("deviations", [-0.5, 0.0, 1.6448536])
def test_statistical_topk(isa: str, size: int, deviations: float) -> None:
    merged = rand(5, 2 * size) + 0.3
    gate = recurrent.split(merged, (size, size))[1]
    wide = merged[:, size:].double()
    exact = (wide - wide.mean(1, True) - deviations * wide.std(1, correction=0, keepdim=True)).relu()
    for run in both("statistical_topk"):
        close(run(gate, deviations), exact)


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(3, 8, 8), (2, 6, 4), (5, 64, 64), (1, 20, 10)])
def test_rotate_heads(isa: str, heads: int, dim: int, rotary: int) -> None:
    x, positions = rand(5, heads * dim), torch.arange(5) + 11
    cos, sin = ops.rope_tables(positions, rand(rotary // 2, seed=1).abs())
    exact = x.double().view(5, heads, dim).clone()
    first, second = exact[..., : rotary // 2].clone(), exact[..., rotary // 2 : rotary].clone()
    c, s = cos.double()[..., : rotary // 2], sin.double()[..., rotary // 2 :]
    exact[..., : rotary // 2], exact[..., rotary // 2 : rotary] = first * c - second * s, second * c + first * s
    for run in both("rotate_heads"):
        close(run(x, cos, sin, heads), exact)


@pytest.mark.parametrize("routing", ["softmax_topk", "topk_softmax", "sigmoid_topk"])
def test_routing_weights_times_the_experts_own(isa: str, routing: str) -> None:
    logits, factors = rand(9, 7), rand(7, seed=1)
    for run in (ops.route_experts, experts.route_experts):
        plain, ids = run(logits, 3, routing, True)
        weights, same = run(logits, 3, routing, True, factors=factors)
        assert torch.equal(ids, same) and torch.equal(weights, plain * factors[ids])


@pytest.mark.parametrize("activation", ["relu2", "silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_without_gates(isa: str, activation: str, biased: bool) -> None:
    count, inner, outer, tokens = 4, 35, 64, 9
    up, down = rand(count, inner, outer, seed=1) / 8, rand(count, outer, inner, seed=2) / 8
    biases = (rand(count, inner, seed=3), rand(count, outer, seed=4)) if biased else (None, None)
    x, residual = rand(tokens, outer), rand(tokens, outer, seed=5)
    weights, ids = experts.route_experts(rand(tokens, count, seed=6), 2, "softmax_topk", True)
    exact = residual.double()
    for token in range(tokens):
        for weight, expert in zip(weights[token].double(), ids[token].tolist(), strict=True):
            hidden = up[expert].double() @ x[token].double()
            hidden = hidden if biases[0] is None else hidden + biases[0][expert]
            out = down[expert].double() @ dense.activate(hidden, activation)
            exact[token] += weight * (out if biases[1] is None else out + biases[1][expert])
    matrices = up.flatten(0, 1), down.flatten(0, 1)
    native = [ops.pack_experts([plain_matrix(matrix)], count) for matrix in matrices]
    plain = [experts.pack_experts([matrix], count) for matrix in matrices]
    for run, stored in ((ops.grouped_experts, native), (experts.grouped_experts, plain)):
        ours = run(x, weights, ids, *stored, activation, *biases, residual=residual, gated=False)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)
