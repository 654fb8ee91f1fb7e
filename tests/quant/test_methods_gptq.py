"""GPTQ checkpoints → canonical matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Affine
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import method_of
from tests.quant.stored import stored

N, K, GROUP = 32, 64, 32


def pack(fields: np.ndarray, bits: int) -> np.ndarray:
    """[n, m] fields → int32 [n · bits / 32, m], bit by bit along the first axis."""
    stream = ((fields[:, None, :] >> np.arange(bits)[:, None]) & 1).reshape(-1, 32, fields.shape[1]).astype(np.uint64)
    return (stream << np.arange(32, dtype=np.uint64)[:, None]).sum(axis=1).astype(np.uint32).view(np.int32)


def checkpoint(bits: int, *, v2: bool, order: np.ndarray | None = None, sym: bool = False) -> tuple[Any, np.ndarray]:
    """Stored tensors by suffix, and the weights they stand for."""
    rng = np.random.default_rng(bits)
    codes, zeros = rng.integers(0, 2**bits, (K, N)), rng.integers(1, 2**bits, (K // GROUP, N))
    if sym:
        zeros[:] = 2 ** (bits - 1)
    scales = rng.uniform(0.01, 0.1, (K // GROUP, N)).astype(np.float16)
    groups = np.arange(K, dtype=np.int32) // GROUP if order is None else order
    weights = scales.astype(np.float32)[groups] * (codes - zeros[groups]).astype(np.float32)
    packed = pack((zeros - (not v2)).T, bits).T
    return {
        ".qweight": stored("qweight", pack(codes, bits)),
        ".qzeros": stored("qzeros", packed),
        ".scales": stored("scales", scales),
        ".g_idx": stored("g_idx", groups),
    }, weights.T


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_every_width(bits: int, v2: bool) -> None:
    tensors, weights = checkpoint(bits, v2=v2)
    method = method_of({"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}, {})
    matrix = method.canonical("w", tensors, (N, K))
    assert isinstance(matrix, Affine)
    assert (matrix.bits, matrix.group, matrix.order) == (bits, GROUP, None)
    assert matrix.zeros is not None
    assert np.array_equal(decode_canonical(matrix), weights)
    del tensors[".g_idx"]
    assert np.array_equal(decode_canonical(method.canonical("w", tensors, (N, K))), weights)
    infos = {f"w{suffix}": tensor.info for suffix, tensor in tensors.items()}
    assert method.count(infos)[0] == N * K


def test_symmetric_matrices_have_one_zero_point() -> None:
    tensors, weights = checkpoint(4, v2=False, sym=True)
    matrix = method_of({"quant_method": "gptq", "bits": 4}, {}).canonical("w", tensors, (N, K))
    assert isinstance(matrix, Affine)
    assert (matrix.zero, matrix.zeros) == (8, None)
    assert np.array_equal(decode_canonical(matrix), weights)


@pytest.mark.parametrize("bits", [3, 4])
def test_activation_order(bits: int) -> None:
    order = np.random.default_rng(1).permutation(np.arange(K, dtype=np.int32) // GROUP)
    tensors, weights = checkpoint(bits, v2=False, order=order)
    matrix = method_of({"quant_method": "gptq", "bits": bits}, {}).canonical("w", tensors, (N, K))
    assert isinstance(matrix, Affine) and matrix.order is not None
    assert sorted(matrix.order) == list(range(K))
    assert np.array_equal(decode_canonical(matrix), weights)


@pytest.mark.parametrize("filler", [0, -1])
def test_an_unset_order_is_none(filler: int) -> None:
    tensors, weights = checkpoint(4, v2=False)
    unset = {".g_idx": stored("g_idx", np.full(K, filler, np.int32))}
    matrix = method_of({"quant_method": "gptq", "bits": 4}, {}).canonical("w", tensors | unset, (N, K))
    assert np.array_equal(decode_canonical(matrix), weights)


def test_what_cannot_be_read_is_named() -> None:
    tensors, _ = checkpoint(4, v2=False)
    method = method_of({"quant_method": "gptq", "bits": 4}, {})
    with pytest.raises(CheckpointError, match="5 bits cannot be read; allowed: 2, 3, 4, 8"):
        method_of({"quant_method": "gptq", "bits": 5}, {})
    with pytest.raises(CheckpointError, match="'marlin' cannot be read; allowed: gptq, gptq_v2"):
        method_of({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, {})
    with pytest.raises(CheckpointError, match="'qweight' has 8 rows for 96 inputs"):
        method.canonical("w", tensors, (N, 96))
    scales = np.full((3, N), 0.1, np.float16)
    with pytest.raises(CheckpointError, match="'scales' has 3 groups, which do not divide a row of 64"):
        method.canonical("w", tensors | {".scales": stored("scales", scales)}, (N, K))
    damaged = np.full((2, N), 0.1, np.float16)
    damaged[1, 3] = np.nan
    with pytest.raises(CheckpointError, match="'scales' holds NaN"):
        method.canonical("w", tensors | {".scales": stored("scales", damaged)}, (N, K))
    uneven = np.arange(K, dtype=np.int32) // (K - 1)
    with pytest.raises(CheckpointError, match="'g_idx' does not give each of 2 groups 32 inputs"):
        method.canonical("w", tensors | {".g_idx": stored("g_idx", uneven)}, (N, K))
    with pytest.raises(CheckpointError, match=r"'qzeros' is f32\[2, 4\] where i32\[2, 4\] is needed"):
        method.canonical("w", tensors | {".qzeros": stored("qzeros", np.zeros((2, 4), np.float32))}, (N, K))


def test_weights_kept_plain_have_no_sources() -> None:
    names = {f"a.{name}": f"A.{name}" for name in ("qweight", "qzeros", "scales")} | {"b.weight": "B.weight"}
    method = method_of({"quant_method": "gptq", "bits": 4}, {})
    assert method.sources("b.weight", names) is None
    assert method.sources("a.bias", names) is None
    assert method.sources("a.weight", names) == {".qweight": "A.qweight", ".qzeros": "A.qzeros", ".scales": "A.scales"}
