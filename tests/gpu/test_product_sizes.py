"""Products of every packing, experts, adapters, lookups and sampling in the sizes of published models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.kernels.canonical import Canonical
from tests.gpu.sizes import Sizes
from tests.kernels.triton import matrices
from tests.kernels.triton.compare import sides
from tests.kernels.triton.compare_adapters import compare_adapter
from tests.kernels.triton.compare_experts import compare_experts, compare_routing, compare_sorting
from tests.kernels.triton.compare_linear import (
    SPREAD,
    compare_activate,
    compare_gated,
    compare_matrix,
    compare_table,
    fixed_kernels,
    near,
)
from tests.kernels.triton.compare_pointwise import compare_pointwise
from tests.kernels.triton.compare_sampling import (
    compare_errors,
    compare_followers,
    compare_logprobs,
    compare_sampling,
    compare_tokens_left_on_the_device,
)

KINDS: dict[str, Callable[[int, int], Canonical]] = {
    "4 bits": lambda n, k: matrices.affine(4, 128, "zero", n, k),
    "4 bits, zeros": lambda n, k: matrices.affine(4, 128, "zeros", n, k),
    "4 bits, minimums": lambda n, k: matrices.affine(4, 32, "minimums", n, k),
    "4 bits, order": lambda n, k: matrices.affine(4, 128, "order", n, k),
    "3 bits": lambda n, k: matrices.affine(3, 64, "zeros", n, k),
    "8 bits": lambda n, k: matrices.affine(8, 128, "zero", n, k),
    "mxfp4": lambda n, k: matrices.codebook(matrices.E2M1, 32, n, k),
    "nf4": lambda n, k: matrices.codebook(matrices.NF4, 64, n, k),
    "fp8, channel": lambda n, k: matrices.fp8((1, k), n, k),
    "fp8, blocks": lambda n, k: matrices.fp8((128, 128), n, k),
    "int8": lambda n, k: matrices.affine(8, k, rows=n, inputs=k),
}


@pytest.mark.parametrize("kind", KINDS)
def test_products(device: str, sizes: Sizes, kind: str) -> None:
    for at, (outputs, inputs) in enumerate(sizes.matrices):
        matrix = KINDS[kind](outputs, inputs)
        for rows in sizes.rows:
            compare_matrix(device, sizes.dtype, matrix, kind, rows, adds=at == 1)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k", "q8_0", "iq4_nl"])
def test_blocks(device: str, sizes: Sizes, name: str) -> None:
    outputs, inputs = sizes.matrices[0]
    compare_matrix(device, torch.bfloat16, matrices.blocks(name, outputs, inputs), name, sizes.rows[-1], adds=True)


@pytest.mark.parametrize(
    "kind", ["plain", "4 bits", "4 bits, minimums", "mxfp4", "fp8, channel", "fp8, blocks", "int8"]
)
def test_company_changes_no_bit_of_a_product(device: str, sizes: Sizes, kind: str) -> None:
    both, fixed = sides(device, sizes.dtype, "pack_linear"), fixed_kernels(device, sizes.dtype)
    counts = (1, 2, 16, 17, 64, 65, 128, 200) if device == "cuda" else (1, 3)
    for outputs, inputs in sizes.matrices:
        plain = torch.randn(outputs, inputs).to(sizes.dtype) * inputs**-0.5
        weight = fixed.pack_linear([plain if kind == "plain" else KINDS[kind](outputs, inputs)])
        x = both.here(torch.randn(max(counts) + 100, inputs).to(sizes.dtype))
        every, gated = fixed.linear(x, weight), fixed.gated_linear(x, weight, "relu")
        for count in counts:
            assert torch.equal(fixed.linear(x[7 : 7 + count], weight), every[7 : 7 + count])
            assert torch.equal(fixed.gated_linear(x[7 : 7 + count], weight, "relu"), gated[7 : 7 + count])
        if kind == "plain":
            near(both, every, x.cpu().float() @ plain.float().t(), SPREAD[sizes.dtype])


@pytest.mark.parametrize("kind", ["plain", "q4_0", "zeros", "fp4", "fp8", "blocks", "int8"])
def test_experts(device: str, sizes: Sizes, kind: str) -> None:
    count, size = sizes.experts
    for tokens in (1, 30, 700) if device == "cuda" else (3,):
        compare_experts(device, sizes.dtype, kind, tokens, biased=tokens == 30, count=count, size=size)


def test_routing(device: str, sizes: Sizes) -> None:
    compare_routing(device, "softmax_topk", 128, 8, renormalize=True)
    compare_routing(device, "sigmoid_topk", 256, 8, (8, 4), biased=True, renormalize=True)
    compare_sorting(device, *((4096, 128) if device == "cuda" else (20, 8)))


def test_adapters_activations_and_lookups(device: str, sizes: Sizes) -> None:
    compare_adapter(device, sizes.dtype, sizes.dtype, offset=7, some=True)
    for activation in ("silu", "gelu", "gelu_tanh", "relu2"):
        compare_activate(device, sizes.dtype, activation)
    compare_gated(device, sizes.dtype, "swigluoai", mixed=True)
    for name in ("q6_k", "q8_0", "fp8, channel"):
        compare_table(device, sizes.dtype, name)
    for op in ("add", "multiply", "sigmoid_gate", "soft_cap", "scale_rows", "take_rows"):
        compare_pointwise(device, op, sizes.dtype, *((300, 4096) if device == "cuda" else (3, 70)))


def test_sampling(device: str, sizes: Sizes) -> None:
    for vocabulary in sizes.vocabularies:
        for kind in ("normal", "ties"):
            compare_sampling(device, kind, 2, vocabulary)
        compare_logprobs(device, True, vocabulary)
    compare_errors(device)
    compare_followers(device)
    compare_tokens_left_on_the_device(device)
