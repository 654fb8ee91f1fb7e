"""Routing and experts of Triton against the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.kernels.canonical import Canonical
from tests.kernels.triton import matrices
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_linear import SPREAD, decoded, near

OPS = ("route_experts", "pack_experts", "grouped_experts")
EXPERTS, SIZE = 3, 192


def compare_routing(
    device: str,
    routing: str,
    experts: int,
    top_k: int,
    groups: tuple[int, int] = (1, 1),
    biased: bool = False,
    renormalize: bool = False,
    jitter: float = 0.0,
    factored: bool = False,
) -> None:
    both = sides(device, torch.float32, *OPS)
    torch.manual_seed(experts)
    logits = torch.randn(9, experts) * 2
    bias, factors = torch.randn(experts) if biased else None, torch.rand(experts) if factored else None
    here = [None if part is None else both.here(part) for part in (bias, factors)]
    weights, ids = both.ours.route_experts(
        both.here(logits), top_k, routing, renormalize, here[0], groups, 2.5, jitter, here[1]
    )
    how = top_k, routing, renormalize, bias, groups, 2.5, jitter, factors
    expected, expected_ids = both.reference.route_experts(logits, *how)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-5, atol=1e-6)
    one = both.ours.route_experts(
        both.here(logits[4:5]), top_k, routing, renormalize, here[0], groups, 2.5, jitter, here[1]
    )
    assert torch.equal(one[0], weights[4:5]) and torch.equal(one[1], ids[4:5])


def weight(kind: str, count: int, size: int) -> Canonical | torch.Tensor:
    """[count · size, size] of a kind of matrices, or plain."""
    rows = count * size
    found: dict[str, Callable[[], Canonical | torch.Tensor]] = {
        "plain": lambda: torch.randn(rows, size) / 10,
        "q4_0": lambda: matrices.blocks("q4_0", rows, size),
        "zeros": lambda: matrices.affine(4, 64, "zeros", rows, size),
        "order": lambda: matrices.affine(4, 64, "order", rows, size),
        "fp4": lambda: matrices.codebook(matrices.E2M1, 32, rows, size),
        "fp8": lambda: matrices.fp8((1, size), rows, size),
        "blocks": lambda: matrices.fp8((128, 128), rows, size),
        "int8": lambda: matrices.affine(8, size, rows=rows, inputs=size),
    }
    return found[kind]()


def compare_experts(
    device: str,
    dtype: torch.dtype,
    kind: str,
    tokens: int,
    activation: str = "silu",
    gated: bool = True,
    biased: bool = False,
    count: int = EXPERTS,
    size: int = SIZE,
) -> None:
    """Gates and ups of the same kind; the reference gets decoded matrices."""
    both = sides(device, dtype, *OPS)
    torch.manual_seed(tokens)
    parts = [weight(kind, count, size) for _ in range(2 if gated else 1)]
    last = weight(kind, count, size)
    plain = [part.to(dtype).float() if isinstance(part, torch.Tensor) else decoded(part) for part in (*parts, last)]
    given = [part.to(dtype) if isinstance(part, torch.Tensor) else part for part in (*parts, last)]
    gate_up, down = both.ours.pack_experts(given[:-1], count), both.ours.pack_experts(given[-1:], count)
    x = (torch.randn(tokens, size) / 40).to(dtype)
    biases = [torch.randn(count, n) for n in (len(parts) * size, size)] if biased else [None, None]
    residual = torch.randn(tokens, size).to(dtype) if biased else None
    logits = torch.randn(tokens, count)
    weights, ids = both.reference.route_experts(logits, 2, "softmax_topk", True)
    here = [None if part is None else both.here(part) for part in (*biases, residual)]
    ours = both.ours.grouped_experts(
        both.here(x), both.here(weights), both.here(ids), gate_up, down, activation, *here[:2], 1.7, 7.0, here[2], gated
    )
    packed = [both.reference.pack_experts(plain[:-1], count), both.reference.pack_experts(plain[-1:], count)]
    added = None if residual is None else residual.float()
    expected = both.reference.grouped_experts(
        x.float(), weights, ids, *packed, activation, *biases, 1.7, 7.0, added, gated
    )
    if kind in ("fp8", "blocks", "int8"):  # activations are rounded to eight bits twice, which few outputs show much
        off = (ours.cpu().float() - expected).pow(2).mean().sqrt()
        assert off <= 0.06 * expected.std()
    near(both, ours, expected, 0.3 if kind in ("fp8", "blocks", "int8") else 6 * SPREAD[dtype])
    one = both.ours.grouped_experts(
        both.here(x[-1:]), both.here(weights[-1:]), both.here(ids[-1:]), gate_up, down, activation, *here[:2], 1.7, 7.0,
        None if here[2] is None else here[2][-1:], gated,
    )  # fmt: skip
    assert torch.equal(one[0], ours[-1])


def compare_sorting(device: str, tokens: int, experts: int) -> None:
    both = sides(device, torch.float32, *OPS)
    from penstock.kernels.triton.sorting import sorted_rows  # Triton is loaded by now, for the device

    torch.manual_seed(tokens)
    ids = torch.randint(0, experts, (tokens, 4))
    rows = sorted_rows(both.here(ids), experts)
    found: dict[int, list[int]] = {}
    for expert, places in zip(rows.experts.tolist(), rows.rows.view(-1, rows.size).tolist(), strict=True):
        if expert >= 0:
            found.setdefault(expert, []).extend(row for row in places if row < rows.count)
    flat = ids.flatten().tolist()
    expected = {e: [row for row, expert in enumerate(flat) if expert == e] for e in sorted(set(flat))}
    assert found == expected and list(found) == list(expected)
