"""Block encoders: the gguf package is the oracle where rounding is fixed, ggml's errors the bar where it is not."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from penstock.config.errors import ConfigError
from penstock.kernels.cpu import native
from penstock.quant.encode import SEARCHED, encode_blocks, fallback
from penstock.quant.formats import FORMATS

FIXED = ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "mxfp4")
# Relative squared error of ggml's own encoders on `gaussian()`, without and with `importance()`.
GGML_ERRORS = {
    "q2_k": (8.81e-2, 4.28e-2),
    "q3_k": (2.28e-2, 1.54e-2),
    "q4_k": (5.09e-3, 3.41e-3),
    "q5_k": (1.30e-3, 9.13e-4),
    "q6_k": (3.15e-4, 2.26e-4),
    "iq4_nl": (5.79e-3, 4.27e-3),
    "iq4_xs": (5.88e-3, 4.38e-3),
}
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def gaussian(rows: int = 64, inputs: int = 2048) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.02, (rows, inputs)).astype(np.float32)


def importance(inputs: int = 2048) -> np.ndarray:
    return np.random.default_rng(1).lognormal(0, 1.5, inputs).astype(np.float32)


def decoded(name: str, data: np.ndarray, rows: int) -> np.ndarray:
    """By the gguf package."""
    return gguf.dequantize(data.reshape(rows, -1), gguf.GGMLQuantizationType[name.upper()])


def relative_error(values: np.ndarray, found: np.ndarray, weights: np.ndarray | float = 1.0) -> float:
    return float(
        (weights * (found.astype(np.float64) - values) ** 2).sum() / (weights * values.astype(np.float64) ** 2).sum()
    )


@pytest.mark.parametrize("name", FIXED)
def test_fixed_rounding_is_that_of_the_gguf_package(name: str) -> None:
    values = gaussian(32, 1024)
    values[3, :64] = 0
    values[5] *= 1e-6
    values[6] = np.float32(0.125) * np.arange(1024, dtype=np.float32)
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[name.upper()]).view(np.uint8).reshape(-1)
    assert np.array_equal(encode_blocks(name, values), expected)


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
def test_ternary_weights_are_kept_exactly(name: str) -> None:
    values = (np.random.default_rng(2).integers(-1, 2, (16, 512)) * np.float32(0.07)).astype(np.float32)
    expected = gguf.quantize(values, gguf.GGMLQuantizationType[name.upper()]).reshape(-1)
    assert np.array_equal(encode_blocks(name, values), expected)


@pytest.mark.parametrize("name", ["tq1_0", "tq2_0"])
def test_ternary_scales_have_the_least_error_of_all(name: str) -> None:
    values = gaussian(2, 256)
    found = relative_error(values, decoded(name, encode_blocks(name, values), 2))
    tried = [
        relative_error(row, scale * np.clip(np.rint(row / scale), -1, 1))
        for row in values
        for scale in np.abs(row).max() * np.linspace(0.05, 1, 400)
    ]
    least = np.mean([min(tried[:400]), min(tried[400:])])
    assert found <= least * 1.01
    assert found < 0.25 < relative_error(values, gguf.dequantize(*_gguf(name, values)))


def _gguf(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    kind = gguf.GGMLQuantizationType[name.upper()]
    return gguf.quantize(values, kind), kind


@needs_native
@pytest.mark.parametrize("name", SEARCHED)
def test_searched_scales_are_at_least_as_good_as_ggmls(name: str) -> None:
    values, weights = gaussian(), importance()
    plain, weighted = GGML_ERRORS[name]
    assert relative_error(values, decoded(name, encode_blocks(name, values), 64)) < plain
    with_importance = decoded(name, encode_blocks(name, values, weights), 64)
    without = decoded(name, encode_blocks(name, values), 64)
    assert relative_error(values, with_importance, weights) < weighted
    assert relative_error(values, with_importance, weights) < 0.95 * relative_error(values, without, weights)


@needs_native
@pytest.mark.parametrize("name", SEARCHED)
def test_every_instruction_set_finds_the_same_bits(name: str) -> None:
    values, weights = gaussian(8, 512), importance(512)
    before = native.isa()
    try:
        found = []
        for isa in [isa for isa in native.usable_isas() if isa in ("generic", "avx2", "avx512")]:
            native.select_isa(isa)
            found.append(encode_blocks(name, values, weights))
    finally:
        native.select_isa(before)
    assert all(np.array_equal(found[0], other) for other in found[1:])


@needs_native
@pytest.mark.parametrize("name", [*SEARCHED, *FIXED, "tq1_0", "tq2_0"])
def test_special_rows(name: str) -> None:
    """Zeros stay zeros; one outlier, one sign, equal values and tiny values stay near themselves."""
    rows = np.zeros((6, 256), np.float32)
    rows[1, 17] = -3.0
    rows[2] = np.linspace(1.0, 2.0, 256)
    rows[3] = 0.5
    rows[4] = np.linspace(-2.0, -1.0, 256)
    rows[5] = 1e-20
    back = decoded(name, encode_blocks(name, rows), 6)
    assert np.isfinite(back).all()
    assert (back[0] == 0).all()
    assert np.abs(back[5]).max() < 1e-4
    assert abs(back[1, 17] + 3.0) < 0.8
    bound = 0.6 if name.startswith("tq") else 0.35
    for row in (2, 3, 4):
        assert np.abs(back[row] - rows[row]).max() <= bound * np.abs(rows[row]).max()


@needs_native
def test_importance_decides_between_inputs() -> None:
    values = gaussian(4, 256)
    weights = np.where(np.arange(256) % 2 == 0, 1.0, 1e-3).astype(np.float32)
    back = decoded("q2_k", encode_blocks("q2_k", values, weights), 4)
    assert relative_error(values[:, ::2], back[:, ::2]) < 0.7 * relative_error(values[:, 1::2], back[:, 1::2])


def test_what_cannot_be_encoded_is_named() -> None:
    values = gaussian(2, 288)
    with pytest.raises(ConfigError, match="288 values are not whole q4_k blocks of 256"):
        encode_blocks("q4_k", values)
    with pytest.raises(ConfigError, match="'iq1_s' cannot be encoded; formats: f32, f16"):
        encode_blocks("iq1_s", values)
    with pytest.raises(ConfigError, match=r"importance has shape \(7,\)"):
        encode_blocks("q8_0", values, np.ones(7, np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        broken = values.copy()
        broken[1, 5] = bad
        with pytest.raises(ConfigError, match="infinite or not a number"):
            encode_blocks("q8_0", broken)


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 96, "q5_0"),
        ("q5_k", 96, "q5_1"),
        ("q6_k", 96, "q8_0"),
        ("q2_k", 96, "q4_0"),
        ("iq4_xs", 96, "iq4_nl"),
        ("q8_0", 172, "f16"),
        ("q4_k", 172, "f16"),
    ],
)
def test_rows_that_do_not_divide_fall_back(name: str, inputs: int, expected: str) -> None:
    assert fallback(name, inputs) == expected
    assert inputs % FORMATS[expected].block_size == 0
