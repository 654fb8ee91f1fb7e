"""Encoders of the safetensors formats, and quantize_matrix over all formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.config.errors import ConfigError
from penstock.config.quantisation import QUANTIZE_FORMATS
from penstock.kernels.canonical import Affine, Blocks, Codebook, Plain
from penstock.kernels.cpu import native
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.encode import quantize_matrix
from penstock.quant.encode.groups import e4m3_codes, fp8_tiles, int4_groups, nvfp4

# Relative squared error on normal weights, a little above what was measured.
BOUNDS = {
    "f32": 1e-15, "f16": 1e-6, "bf16": 5e-6, "q8_0": 3e-5, "q6_k": 3e-4, "q5_k": 1.3e-3, "q5_1": 1.5e-3, "q5_0": 1.9e-3,
    "q4_k": 5.2e-3, "iq4": 5.8e-3, "q4_1": 6.3e-3, "q4_0": 7.6e-3, "q3_k": 2.2e-2, "q2_k": 7.2e-2, "tq": 0.2,
    "mxfp4": 1.4e-2, "int8": 8e-5, "int4": 1.1e-2, "fp8": 7.5e-4, "nvfp4": 9.5e-3,
}  # fmt: skip


def weights(rows: int = 96, inputs: int = 512) -> np.ndarray:
    return np.random.default_rng(3).normal(0, 0.02, (rows, inputs)).astype(np.float32)


def error(values: np.ndarray, back: np.ndarray) -> float:
    return float(((back.astype(np.float64) - values) ** 2).sum() / (values.astype(np.float64) ** 2).sum())


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("name", QUANTIZE_FORMATS)
def test_every_format_stays_within_its_error(name: str) -> None:
    values = weights()
    matrix = quantize_matrix(name, values)
    assert matrix.shape == values.shape
    bound = next(bound for start, bound in BOUNDS.items() if name.startswith(start))
    assert error(values, decode_canonical(matrix)) < bound


def test_e4m3_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(4)
    spread = [rng.normal(0, scale, 5000) for scale in (1e-3, 0.02, 1, 100)]
    values = np.concatenate([*spread, np.arange(-448, 449) / 7, [0.0, -0.0, 2.0**-10, 3 * 2.0**-10]]).astype(np.float32)
    expected = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(e4m3_codes(values), expected)


def test_layouts() -> None:
    values = weights()
    int8, int4 = quantize_matrix("int8", values), quantize_matrix("int4", values)
    assert isinstance(int8, Affine) and (int8.bits, int8.group, int8.zero) == (8, 512, 128)
    assert isinstance(int4, Affine) and (int4.bits, int4.group, int4.zero, int4.scales.shape) == (4, 128, 8, (96, 4))
    fp8, tiles = quantize_matrix("fp8", values), quantize_matrix("fp8_block", values)
    assert isinstance(fp8, Plain) and fp8.tile == (1, 512)
    assert isinstance(tiles, Plain) and tiles.scales is not None and tiles.scales.shape == (1, 4)
    assert isinstance(quantize_matrix("nvfp4", values), Codebook)
    assert isinstance(quantize_matrix("bf16", values), Plain)
    q8 = quantize_matrix("q8_0", values)
    assert isinstance(q8, Blocks) and q8.format == "q8_0"


def test_scales_of_integers_are_exact_in_bfloat16() -> None:
    for name in ("int8", "int4"):
        matrix = quantize_matrix(name, weights())
        assert isinstance(matrix, Affine)
        assert (matrix.scales.view(np.uint32) & 0xFFFF == 0).all()


def test_int4_beats_rounding_to_the_largest_and_heeds_importance() -> None:
    values = weights()
    grouped = values.reshape(96, -1, 128)
    scales = np.abs(grouped).max(axis=2, keepdims=True) / 7
    naive = (np.rint(grouped / scales) * scales).reshape(values.shape)
    assert error(values, decode_canonical(int4_groups(values, 128))) < 0.9 * error(values, naive)
    matter = np.where(np.arange(512) % 4 == 0, 1.0, 1e-3).astype(np.float32)
    plain, weighted = (decode_canonical(int4_groups(values, 128, given)) for given in (None, matter))
    assert error(values[:, ::4], weighted[:, ::4]) < error(values[:, ::4], plain[:, ::4])


def test_tiles_at_the_edges() -> None:
    values = weights(130, 200)
    matrix = fp8_tiles(values)
    assert matrix.scales is not None and matrix.scales.shape == (2, 2)
    assert error(values, decode_canonical(matrix)) < 1e-3


def test_rows_that_do_not_divide_take_the_next_format() -> None:
    values = weights(4, 172)
    int4, nv, k = quantize_matrix("int4", values), quantize_matrix("nvfp4", values), quantize_matrix("q4_k_m", values)
    assert isinstance(int4, Affine) and int4.bits == 8
    assert isinstance(nv, Plain) and nv.format == "f8_e4m3"
    assert isinstance(k, Plain) and k.format == "f16"


def test_zeros_and_bad_values() -> None:
    for name in ("int8", "int4", "fp8", "fp8_block", "nvfp4", "q8_0", "mxfp4"):
        zeros = np.zeros((3, 256), np.float32)
        assert (decode_canonical(quantize_matrix(name, zeros)) == 0).all()
        zeros[1, 1] = np.nan
        with pytest.raises(ConfigError, match="infinite or not a number"):
            quantize_matrix(name, zeros)
    assert (decode_canonical(nvfp4(np.zeros((1, 16), np.float32))) == 0).all()
    with pytest.raises(ConfigError, match="'q9_k' is no format to quantise to; allowed: f32, f16"):
        quantize_matrix("q9_k", weights())
