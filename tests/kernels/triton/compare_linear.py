"""Products of Triton over packed weights against the decoded ones, multiplied in float32."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torch import Tensor

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.canonical import Canonical
from penstock.kernels.registry import KernelContext
from penstock.quant.canonical_decode import decode_canonical
from tests.kernels.triton import matrices
from tests.kernels.triton.compare import Sides, sides

if TYPE_CHECKING:
    from penstock.kernels.triton.packing import Packed

OPS = ("packable", "pack_linear", "linear", "gated_linear")
SPREAD = {
    torch.float32: 3e-4,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}  # of weights in this type; scales have 11 bits


def decoded(matrix: Canonical) -> Tensor:
    return torch.from_numpy(decode_canonical(matrix))


def rounded(x: Tensor, matrix: Canonical, name: str) -> Tensor:
    """Activations as products of eight bits see them: in float32."""
    if name not in matrices.eights():
        return x.float()
    tiles = x.float().split(128, dim=1) if name == "fp8, blocks" else (x.float(),)
    return torch.cat([_eight_bits(tile, 127 if name == "int8" else 448) for tile in tiles], dim=1)


def _eight_bits(x: Tensor, largest: float) -> Tensor:
    scale = x.abs().amax(dim=1, keepdim=True) / largest
    scaled = x * (1.0 / scale)
    return (scaled.round() if largest == 127 else scaled.to(torch.float8_e4m3fn).float()) * scale


def near(both: Sides, ours: Tensor, expected: Tensor, tolerance: float) -> None:
    """Of float32 expectations: sums of many products may differ by a share of their spread."""
    assert ours.dtype == both.dtype and ours.shape == expected.shape
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=tolerance, atol=tolerance * float(expected.std()))


def compare_linear(device: str, dtype: torch.dtype, name: str, rows: int, adds: bool) -> None:
    compare_matrix(device, dtype, (matrices.coded() | matrices.eights())[name], name, rows, adds)


def compare_matrix(device: str, dtype: torch.dtype, matrix: Canonical, name: str, rows: int, adds: bool) -> None:
    """Of any size; the name tells how activations are rounded."""
    both = sides(device, dtype, *OPS)
    assert both.ours.packable(matrix) is None
    weight = both.ours.pack_linear([matrix])
    torch.manual_seed(rows)
    x = torch.randn(rows, matrix.shape[1]).to(dtype)
    bias = torch.randn(matrix.shape[0]).to(dtype) if adds else None
    residual = torch.randn(rows, matrix.shape[0]).to(dtype) if adds else None
    here = [None if part is None else both.here(part) for part in (bias, residual)]
    expected = rounded(x, matrix, name) @ _as_multiplied(x, matrix, weight).t()
    for part in (bias, residual):
        expected = expected if part is None else expected + part.float()
    near(both, both.ours.linear(both.here(x), weight, *here), expected, SPREAD[dtype])


def _as_multiplied(x: Tensor, matrix: Canonical, weight: Packed) -> Tensor:
    """A matrix, rounded to the type of x where it is unpacked for many rows."""
    unpacked = import_module("penstock.kernels.triton.unpacked")
    exact = decoded(matrix)
    return exact.to(x.dtype).float() if unpacked.serves(x, weight.parts[0]) else exact


def compare_by_torch(device: str, rows: int) -> None:
    """FP8 with a scale a row by torch's product, if there are many rows, and by the kernel."""
    both = sides(device, torch.bfloat16, "pack_linear")
    linear, scaled = (import_module(f"penstock.kernels.triton.{name}") for name in ("linear", "scaled"))
    matrix = matrices.fp8((1, matrices.INPUTS), rows=64)
    weight = both.ours.pack_linear([matrix])
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, matrices.INPUTS).bfloat16(), torch.randn(64).bfloat16()
    residual = torch.randn(rows, 64).bfloat16()
    exact = rounded(x, matrix, "fp8, channel") @ decoded(matrix).t() + bias.float()
    with patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as torch_calls:
        added = both.here(bias), both.here(residual)
        near(both, linear.linear(both.here(x), weight, *added, by_torch=True), exact + residual.float(), 2e-2)
        gated = linear.gated_linear(both.here(x / 30), weight, "silu", by_torch=True)
        assert torch_calls.call_count == (2 if rows >= scaled.MANY else 0)
    small = rounded(x / 30, matrix, "fp8, channel")
    near(both, gated, both.reference.gated_linear(small, decoded(matrix), "silu"), 5e-2)


def compare_gated(device: str, dtype: torch.dtype, activation: str, mixed: bool) -> None:
    """Gates and ups in two packings."""
    both = sides(device, dtype, *OPS)
    up = torch.randn(64, matrices.INPUTS).to(dtype) if mixed else matrices.affine(8, 64, rows=64)
    gate = matrices.affine(4, 64, rows=64)
    weight = both.ours.pack_linear([gate, up])
    assert len(weight.parts) == 2
    plain = torch.cat((decoded(gate), up.float() if isinstance(up, Tensor) else decoded(up))).float()
    x, bias = (torch.randn(3, matrices.INPUTS) / 100).to(dtype), torch.randn(128).to(dtype)
    expected = both.reference.gated_linear(x.float(), plain, activation, bias.float(), 1.5, 0.75)
    ours = both.ours.gated_linear(both.here(x), weight, activation, both.here(bias), 1.5, 0.75)
    near(both, ours, expected, 4 * SPREAD[dtype])


def compare_activate(device: str, dtype: torch.dtype, activation: str) -> None:
    both = sides(device, dtype, "activate")
    x = torch.linspace(-20, 20, 3 * 1100).view(3, 1100).to(dtype)
    both.close(both.ours.activate(both.here(x), activation, 3.0), both.reference.activate(x.clone(), activation, 3.0))


def compare_table(device: str, dtype: torch.dtype, name: str) -> None:
    both = sides(device, dtype, "pack_table", "embedding")
    matrix = (matrices.coded() | matrices.eights())[name]
    table = both.ours.pack_table([matrix])
    numbers = torch.tensor([3, matrices.ROWS - 1, 0, 3])
    for scale in (1.0, 11.3):
        expected = both.reference.embedding(numbers, decoded(matrix).to(dtype), scale)
        both.close(both.ours.embedding(both.here(numbers), table, scale), expected, max(1e-3, SPREAD[dtype]))


def fixed_kernels(device: str, dtype: torch.dtype) -> KernelSet:
    """Kernels whose results do not depend on how many rows there are."""
    kernels = resolve_kernels(KernelContext(device, str(dtype).removeprefix("torch."), batch_invariant=True))
    chosen = {choice.op: choice.chosen.name for choice in kernels.choices}
    assert chosen["linear"].endswith("fixed order") and chosen["gated_linear"].endswith("fixed order")
    return kernels


def compare_row_counts(
    device: str, dtype: torch.dtype, name: str, inputs: int, counts: tuple[int, ...], most: int | None = None
) -> None:
    """The same bits of a row alone and among others, `most` or as many as the largest count; "plain" is floats."""
    both, fixed = sides(device, dtype, *OPS), fixed_kernels(device, dtype)
    torch.manual_seed(inputs)
    matrix = torch.randn(130, inputs).to(dtype) if name == "plain" else (matrices.coded() | matrices.eights())[name]
    weight, most = fixed.pack_linear([matrix]), most or max(counts)
    x = both.here(torch.randn(most, matrix.shape[1]).to(dtype))
    every = fixed.linear(x, weight)
    for count in counts:
        for begin in (0, most - count)[count % 2 :]:
            assert torch.equal(fixed.linear(x[begin : begin + count], weight), every[begin : begin + count])
    if isinstance(matrix, Tensor):
        near(both, every, x.cpu().float() @ matrix.float().t(), SPREAD[dtype])


def compare_gated_rows(device: str, dtype: torch.dtype, name: str, inputs: int) -> None:
    """Gates and ups in one packing, whose products are summed in segments: a row alone and among others."""
    both, fixed = sides(device, dtype, *OPS), fixed_kernels(device, dtype)
    torch.manual_seed(inputs)
    halves = [torch.randn(64, inputs).to(dtype) / 30 for _ in range(2)]
    given = {"plain": halves, "4 bits": [matrices.affine(4, 64, rows=64, inputs=inputs) for _ in range(2)]}[name]
    weight = fixed.pack_linear(given)
    assert len(weight.parts) == 1
    plain = torch.cat([part.float() if isinstance(part, Tensor) else decoded(part) for part in given])  # type: ignore[attr-defined]
    x, bias = torch.randn(20, inputs).to(dtype) / 30, torch.randn(128).to(dtype)
    every = fixed.gated_linear(both.here(x), weight, "silu", both.here(bias))
    near(both, every, both.reference.gated_linear(x.float(), plain, "silu", bias.float()), 4 * SPREAD[dtype])
    assert torch.equal(fixed.gated_linear(both.here(x[7:8]), weight, "silu", both.here(bias))[0], every[7])
