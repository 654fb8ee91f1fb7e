"""The numpy decoders against the `gguf` package, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.quant.formats import FORMATS, decode_to_float32, format_bytes, mxfp4

RandomBlocks = Callable[[str, int], np.ndarray]
NOT_IN_GGUF = ("q8_k", "q1_0", "q2_0")  # the package has no decoder of these
BLOCK_TYPES = [name.upper() for name, block in FORMATS.items() if block.block_size > 1 and name not in NOT_IN_GGUF]
QUANTIZABLE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16", "TQ1_0", "TQ2_0"]
# Error of each format, root mean square relative to the source's, on 512 heavy-tailed values that ggml encoded.
GGML_ERRORS = {
    "q4_0": 0.095,
    "q4_1": 0.082,
    "q5_0": 0.048,
    "q5_1": 0.040,
    "q8_0": 0.007,
    "q2_k": 0.300,
    "q3_k": 0.165,
    "q4_k": 0.082,
    "q5_k": 0.043,
    "q6_k": 0.021,
    "q8_k": 0.009,
    "mxfp4": 0.130,
    "iq4_nl": 0.082,
    "iq4_xs": 0.083,
    "nvfp4": 0.094,
    "iq2_xxs": 0.360,
    "iq2_xs": 0.320,
    "iq2_s": 0.275,
    "iq3_xxs": 0.205,
    "iq3_s": 0.150,
    "iq1_s": 0.530,
    "iq1_m": 0.480,
    "tq1_0": 0.840,
    "tq2_0": 0.840,
    "q1_0": 0.680,
    "q2_0": 0.730,
}


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
    assert np.abs(ours - values.reshape(-1)).max() < 3


@pytest.mark.parametrize("name", GGML_ERRORS)
def test_blocks_that_ggml_encoded_come_near_their_source(name: str) -> None:
    """Two rows of 256 values, encoded by libggml (`ggml_quantize_chunk`, weights of one)."""
    with np.load(Path(__file__).parent / "data" / "ggml_blocks.npz") as data:
        source, packed = data["source"].reshape(-1), data[name]
    error = decode_to_float32(name, packed) - source
    assert np.sqrt((error**2).mean() / (source**2).mean()) < GGML_ERRORS[name]


def test_every_block_format_was_encoded_by_ggml() -> None:
    assert set(GGML_ERRORS) == {name for name, block in FORMATS.items() if block.block_size > 1}


def test_formats_without_an_oracle_follow_their_definition() -> None:
    rng = np.random.default_rng(4)
    d = np.float16(-0.37)
    signs, crumbs, wide = rng.integers(0, 2, 128), rng.integers(0, 4, 64), rng.integers(-128, 128, 256)
    one = np.concatenate([np.array([d]).view(np.uint8), np.packbits(signs.astype(np.uint8), bitorder="little")])
    assert np.array_equal(decode_to_float32("q1_0", one), np.float32(d) * (2 * signs - 1))
    fields = (crumbs.reshape(16, 4) << np.array([0, 2, 4, 6])).sum(axis=1).astype(np.uint8)
    two = np.concatenate([np.array([d]).view(np.uint8), fields])
    assert np.array_equal(decode_to_float32("q2_0", two), np.float32(d) * (crumbs - 1))
    scale = np.float32(0.123)
    eight = np.concatenate(
        [np.array([scale]).view(np.uint8), wide.astype(np.int8).view(np.uint8), np.zeros(32, np.uint8)]
    )
    assert np.array_equal(decode_to_float32("q8_k", eight), scale * wide.astype(np.float32))


def test_every_signed_lattice_point_decodes_as_gguf_does() -> None:
    """All indices of the two grids whose index and signs share a word."""
    words = np.arange(65536, dtype="<u2").reshape(-1, 32)
    blocks = np.zeros((len(words), 74), np.uint8)
    blocks[:, :2] = np.array([1.0], np.float16).view(np.uint8)
    blocks[:, 2:66] = words.view(np.uint8)
    theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType.IQ2_XS).reshape(-1)
    assert np.array_equal(bits(decode_to_float32("iq2_xs", blocks.reshape(-1))), bits(theirs))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_decode_as_gguf_does(name: str, random_blocks: RandomBlocks) -> None:
    data = random_blocks(name, 300)
    ours = decode_to_float32(name.lower(), data.reshape(-1))
    theirs = gguf.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(-1)
    assert ours.dtype == np.float32
    assert len(np.unique(ours)) > 50
    assert np.isfinite(ours).mean() > 0.95
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
    with pytest.raises(ValueError, match="q8_1"):
        decode_to_float32("q8_1", np.zeros(40, np.uint8))
