"""Methods that transformers itself packs or decodes: FP8, FBGEMM, BitNet, metal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.bitnet import pack_weights
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.metal_quantization import _affine_dequantize_tensor, _affine_quantize_tensor

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Affine, Plain
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import method_of
from tests.quant.stored import stored

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def float8(rows: int, columns: int) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 50
    return values.to(torch.float8_e4m3fn)


def test_blocks_of_float8() -> None:
    values, scales = float8(256, 384), torch.rand(2, 3) + 0.1
    tensors = {".weight": stored("w", values), ".weight_scale_inv": stored("s", scales)}
    matrix = method_of(FP8, {}).canonical("w.weight", tensors, (256, 384))
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.float32)  # type: ignore[arg-type]
    assert isinstance(matrix, Plain) and matrix.tile == (128, 128)
    assert np.array_equal(decode_canonical(matrix), theirs.numpy())
    assert np.shares_memory(matrix.data, tensors[".weight"].data)  # a view of the file


def test_last_blocks_may_be_partial() -> None:
    values, scales = float8(130, 200), torch.rand(2, 2) + 0.1
    tensors = {".weight": stored("w", values), ".weight_scale_inv": stored("s", scales)}
    matrix = method_of(FP8, {}).canonical("w.weight", tensors, (130, 200))
    whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:130, :200]
    assert np.array_equal(decode_canonical(matrix), (values.float() * whole).numpy())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_a_whole_matrix(shape: tuple[int, ...]) -> None:
    values, scale = float8(6, 8), torch.full(shape, 0.3)
    method = method_of({"quant_method": "fp8", "weight_block_size": None}, {})
    for suffix in (".weight_scale_inv", ".weight_scale"):
        tensors = {".weight": stored("w", values), suffix: stored("s", scale)}
        matrix = method.canonical("w.weight", tensors, (6, 8))
        assert np.array_equal(decode_canonical(matrix), (values.float() * np.float32(0.3)).numpy())


def test_fbgemm_scales_rows() -> None:
    values, scale = float8(6, 8), torch.rand(6, 1) + 0.1
    tensors = {".weight": stored("w", values), ".weight_scale": stored("s", scale)}
    method = method_of({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, {})
    matrix = method.canonical("w.weight", tensors, (6, 8))
    assert isinstance(matrix, Plain) and matrix.tile == (1, 8)
    assert np.array_equal(decode_canonical(matrix), (values.float() * scale).numpy())


def test_impossible_float8_is_named() -> None:
    method, values = method_of(FP8, {}), stored("w", float8(256, 128))
    with pytest.raises(CheckpointError, match=r"'s' has shape \[2, 2\], which no tiles of \[256, 128\] values have"):
        method.canonical("w", {".weight": values, ".weight_scale_inv": stored("s", torch.ones(2, 2))}, (256, 128))
    bad = stored("s", torch.tensor([[1.0], [torch.inf]]))
    with pytest.raises(CheckpointError, match="'s' holds NaN or infinity"):
        method.canonical("w", {".weight": values, ".weight_scale_inv": bad}, (256, 128))
    plain = {".weight": stored("w", torch.ones(256, 128)), ".weight_scale_inv": stored("s", torch.ones(2, 1))}
    with pytest.raises(CheckpointError, match=r"'w' is f32\[256, 128\] where a float8 matrix"):
        method.canonical("w", plain, (256, 128))
    with pytest.raises(CheckpointError, match="weight_block_size"):
        method_of(FP8 | {"weight_block_size": [128, 0]}, {})


@pytest.mark.parametrize("kind", ["bitlinear", "autobitlinear"])
def test_bitnet(kind: str) -> None:
    ternary = torch.randint(-1, 2, (12, 8), generator=torch.Generator().manual_seed(0)).float()
    scale = torch.tensor([2.5], dtype=torch.bfloat16)
    tensors = {".weight": stored("w", pack_weights(ternary.clone())), ".weight_scale": stored("s", scale)}
    method = method_of({"quant_method": "bitnet", "linear_class": kind}, {})
    matrix = method.canonical("w.weight", tensors, (12, 8))
    expected = ternary * 2.5 if kind == "autobitlinear" else ternary * np.float32(1 / 2.5)
    assert isinstance(matrix, Affine) and (matrix.bits, matrix.zero, matrix.group) == (2, 1, 8)
    assert np.array_equal(decode_canonical(matrix), expected.numpy())
    assert method.count({"w.weight": tensors[".weight"].info, "w.weight_scale": tensors[".weight_scale"].info})[0] == 96
    with pytest.raises(CheckpointError, match="four rows a byte, which do not divide 10 rows"):
        method.canonical("w.weight", tensors, (10, 8))
    with pytest.raises(CheckpointError, match="'online'"):
        method_of({"quant_method": "bitnet", "quantization_mode": "online"}, {})


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_metal(bits: int) -> None:
    values = torch.randn(6, 128, generator=torch.Generator().manual_seed(0))
    packed, scales, biases = _affine_quantize_tensor(values, 64, bits)
    tensors = {
        ".weight": stored("w", packed.numpy()),
        ".scales": stored("s", scales),
        ".qbiases": stored("b", biases),
    }
    method = method_of({"quant_method": "metal", "bits": bits, "group_size": 64}, {})
    matrix = method.canonical("w.weight", tensors, (6, 128))
    theirs = _affine_dequantize_tensor(packed, scales, biases, 64, bits).numpy()
    assert np.array_equal(decode_canonical(matrix), theirs)
