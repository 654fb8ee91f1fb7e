"""The numpy decoders against the `gguf` package, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from penstock.quant.formats import FORMATS, decode_to_float32, format_bytes, mxfp4

RandomBlocks = Callable[[str, int], np.ndarray]
BLOCK_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
QUANTIZABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16"]


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantised_data_decodes_as_gguf_does(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    values[3] = 0
    packed = gguf.quantize(values, kind)
    ours = decode_to_float32(name.lower(), packed.reshape(-1).view(np.uint8))
    assert np.array_equal(bits(ours), bits(gguf.dequantize(packed, kind).reshape(-1)))
    assert np.abs(ours - values.reshape(-1)).max() < 2


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_decode_as_gguf_does(name: str, random_blocks: RandomBlocks) -> None:
    data = random_blocks(name, 300)
    ours = decode_to_float32(name.lower(), data.reshape(-1))
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert ours.dtype == np.float32
    assert len(np.unique(ours)) > 50
    assert np.array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_geometry_is_ggml_s(name: str) -> None:
    block = FORMATS[name.lower()]
    assert (block.block_size, block.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert format_bytes(name.lower(), 1024) == 1024 // block.block_size * block.block_bytes


def test_mxfp4_scale_covers_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(mxfp4.half_scale(codes), np.ldexp(np.float32(1), codes.astype(int) - 128).astype(np.float32))


def test_mxfp4_pair_layout_round_trips_and_keeps_values() -> None:
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (3, 5, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 5, 4), dtype=np.uint8)
    packed = mxfp4.to_gguf_blocks(blocks, scales)
    back = mxfp4.from_gguf_blocks(packed)
    assert np.array_equal(back[0], blocks)
    assert np.array_equal(back[1], scales)
    pair = mxfp4.decode_pair(blocks, scales)
    assert pair.shape == (3, 5, 128)
    assert np.array_equal(pair.reshape(-1), decode_to_float32("mxfp4", packed.reshape(-1)))


def test_mxfp4_pair_is_what_transformers_decodes() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (2, 6, 4, 16), dtype=np.uint8)
    scales = rng.integers(110, 130, (2, 6, 4), dtype=np.uint8)
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    assert np.array_equal(mxfp4.decode_pair(blocks, scales), theirs.transpose(1, 2).numpy())


def test_mxfp4_pair_of_foreign_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        mxfp4.to_gguf_blocks(np.zeros((2, 16), np.uint8), np.zeros(3, np.uint8))


def test_float8_tables_equal_torch_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name, kind in (("f8_e4m3", torch.float8_e4m3fn), ("f8_e5m2", torch.float8_e5m2)):
        theirs = codes.view(kind).to(torch.float32).numpy()
        assert np.array_equal(decode_to_float32(name, codes.numpy()), theirs, equal_nan=True)


def test_partial_blocks_and_unknown_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number of q4_0 blocks"):
        decode_to_float32("q4_0", np.zeros(19, np.uint8))
    with pytest.raises(ValueError, match="iq4_xs"):
        decode_to_float32("iq4_xs", np.zeros(19, np.uint8))
