"""The native block decoders give the same bits as the gguf package, on every instruction set."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from penstock.config.errors import ConfigError
from penstock.kernels.cpu import native
from penstock.quant.formats import FORMATS, decode_to_float32

NOT_IN_GGUF = ("q8_k", "q1_0", "q2_0")  # the package has no decoder of these
BLOCK_FORMATS = tuple(name for name, block in FORMATS.items() if block.block_size > 1)
NATIVE_FORMATS = ("f16", "bf16", *BLOCK_FORMATS)


def sizes(name: str) -> tuple[int, int]:
    """(values, bytes) of one block."""
    return FORMATS[name].block_size, FORMATS[name].block_bytes


def reference(name: str, data: np.ndarray) -> np.ndarray:
    if name in NOT_IN_GGUF:
        return decode_to_float32(name, data)
    with np.errstate(all="ignore"):
        return gguf.dequantize(data.reshape(1, -1), gguf.GGMLQuantizationType[name.upper()]).reshape(-1)


@pytest.mark.parametrize("blocks", [1, 2, 5000])
@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_random_bytes_decode_to_the_same_bits(isa: str, name: str, blocks: int) -> None:
    """Random bytes include subnormal, infinite and NaN scales."""
    values, size = sizes(name)
    data = np.random.default_rng(blocks).integers(0, 256, blocks * size, dtype=np.uint8)
    out = np.full(blocks * values, 7.0, np.float32)
    native.dequantize_blocks(name, data, out)
    expected = reference(name, data)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(out[finite].view(np.uint32), expected[finite].astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_sixteen_bit_float(isa: str, name: str) -> None:
    data = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    native.dequantize_blocks(name, data.view(np.uint8), out)
    expected = (
        data.view(np.float16).astype(np.float32) if name == "f16" else (data.astype(np.uint32) << 16).view(np.float32)
    )
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(out[finite].view(np.uint32), expected[finite].view(np.uint32))


def test_every_scale_of_nvfp4(isa: str) -> None:
    blocks = np.empty((64, 36), np.uint8)
    blocks[:, :4] = np.arange(256).reshape(64, 4)
    blocks[:, 4:] = np.tile(np.arange(0, 256, 17), 2)
    out = np.empty(64 * 64, np.float32)
    native.dequantize_blocks("nvfp4", blocks.reshape(-1), out)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4).reshape(-1)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["mxfp4"])
def test_every_shared_exponent(isa: str, name: str) -> None:
    blocks = np.empty((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) * 17
    out = np.empty(256 * 32, np.float32)
    native.dequantize_blocks(name, blocks.reshape(-1), out)
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4).reshape(-1)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", NATIVE_FORMATS)
def test_wrong_lengths_are_refused(name: str) -> None:
    values, size = sizes(name)
    data, out = np.zeros(3 * size, np.uint8), np.full(3 * values, 7.0, np.float32)
    for bytes_, floats in (
        (size * 3 - 1, values * 3),
        (size * 2, values * 3),
        (size * 3, values * 3 - 1),
        (0, values),
        (1, 0),
    ):
        with pytest.raises(ValueError, match=name if bytes_ % size else "blocks"):
            native.dequantize_blocks(name, data[:bytes_], out[:floats])
    assert (out == 7.0).all()
    native.dequantize_blocks(name, data[:0], out[:0])


def test_wrong_formats_and_arrays_are_refused() -> None:
    data, out = np.zeros(34, np.uint8), np.zeros(32, np.float32)
    for name in ("", "q9_9", "Q8_0", "f32"):
        with pytest.raises(ValueError, match="no native decoder"):
            native.dequantize_blocks(name, data, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    for wrong_data, wrong_out in (
        (data.astype(np.int8), out),
        (data[::2], out),
        (data.reshape(2, 17), out),
        (data, out.astype(np.float64)),
        (data, np.zeros(64, np.float32)[::2]),
        (data, read_only),
        (None, out),
        (data, None),
    ):
        with pytest.raises(TypeError):
            native.dequantize_blocks("q8_0", wrong_data, wrong_out)  # type: ignore[arg-type]


def test_read_only_bytes_are_accepted() -> None:
    data = np.frombuffer(bytes(34), np.uint8)
    native.dequantize_blocks("q8_0", data, np.zeros(32, np.float32))


def test_a_missing_library_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "the native library cannot be loaded (gone)"))
    assert not native.available()
    assert native.isa() == "none"
    assert native.cpu_features() == {}
    with pytest.raises(ConfigError, match="gone"):
        native.dequantize_blocks("q8_0", np.zeros(34, np.uint8), np.zeros(32, np.float32))
