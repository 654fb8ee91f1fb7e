"""StoredTensor → torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.config.errors import CheckpointError
from penstock.quant import decode
from penstock.quant.decode import dequantize
from penstock.quant.formats import FORMATS, decode_to_float32
from penstock.quant.tensor import StoredTensor, TensorInfo

RandomBlocks = Callable[[str, int], np.ndarray]
BLOCK_NAMES = [name for name, block in FORMATS.items() if block.block_size > 1]


def stored(fmt: str, shape: tuple[int, ...], data: np.ndarray) -> StoredTensor:
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    raw.flags.writeable = False
    return StoredTensor(TensorInfo("w", shape, fmt, raw.size), raw)


@pytest.mark.parametrize("fmt", decode._TORCH_TYPES)
def test_every_plain_format_round_trips(fmt: str) -> None:
    kind = decode._TORCH_TYPES[fmt]
    source = (torch.arange(35) % 2).to(kind) if fmt == "bool" else (torch.arange(35) % 5).to(kind)
    one = stored(fmt, (5, 7), source.view(torch.uint8).numpy())
    same = dequantize(one, kind)
    assert same.dtype == kind
    assert torch.equal(same.view(torch.uint8).reshape(-1), source.view(torch.uint8).reshape(-1))
    assert torch.equal(dequantize(one, torch.float32), source.to(torch.float32).reshape(5, 7))


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_block_formats_equal_the_numpy_reference(
    name: str, random_blocks: RandomBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_CHUNK_ELEMENTS", 512)  # several chunks, and a partial last one
    size = FORMATS[name].block_size
    data = random_blocks(name.upper(), 15)
    expected = torch.from_numpy(decode_to_float32(name, data.reshape(-1))).reshape(5, 3 * size)
    one = stored(name, (5, 3 * size), data)
    assert torch.equal(dequantize(one, torch.float32), expected)
    assert torch.equal(dequantize(one, torch.bfloat16), expected.to(torch.bfloat16))
    monkeypatch.setattr(decode, "native_block_decoder", lambda: None)
    assert torch.equal(dequantize(one, torch.float32), expected)


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_native_decoder_equals_numpy_to_the_bit(name: str, random_blocks: RandomBlocks) -> None:
    native = decode.native_block_decoder()
    if native is None:
        pytest.skip("the native library is not built here")
    data = random_blocks(name.upper(), 777).reshape(-1)
    out = np.empty(777 * FORMATS[name].block_size, dtype=np.float32)
    native(name, data, out)
    assert np.array_equal(out.view(np.uint32), decode_to_float32(name, data).view(np.uint32))


def test_disagreeing_bytes_and_unknown_formats_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"'w' of shape \(3,\) in f32 does not match its 8 bytes"):
        dequantize(stored("f32", (3,), np.zeros(2, np.float32)), torch.float32)
    with pytest.raises(CheckpointError, match="q8_1, which has no decoder"):
        dequantize(stored("q8_1", (256,), np.zeros(320, np.uint8)), torch.float32)


def test_result_owns_its_memory() -> None:
    data = np.zeros(4, np.float32)
    tensor = dequantize(stored("f32", (4,), data), torch.float32)
    tensor += 1
    assert data.sum() == 0
