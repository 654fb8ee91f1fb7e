"""Packings without a library that runs here, against encoders written from their published descriptions."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.kernels.canonical import Affine, Plain
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.methods import method_of
from penstock.quant.tensor import StoredTensor
from tests.quant.stored import stored
from tests.quant.test_methods_gptq import pack

Tensors = dict[str, StoredTensor]


def integers(rows: int, inputs: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Four-bit codes [N, K], zero points and scales [N, K / g]."""
    rng = np.random.default_rng(rows)
    shape = rows, inputs // group
    return rng.integers(0, 16, (rows, inputs)), rng.integers(0, 16, shape), rng.uniform(0.01, 0.1, shape).astype("f2")


def weights(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    group = codes.shape[1] // zeros.shape[1]
    spread = np.repeat(zeros, group, axis=1), np.repeat(scales.astype(np.float32), group, axis=1)
    return ((codes - spread[0]) * spread[1]).astype(np.float32)


@pytest.mark.parametrize("group", [32, 64])
def test_awq_gemv(group: int) -> None:
    codes, zeros, scales = integers(6, 128, group)
    width = 8  # words a row of zero points and scales is padded to
    padded = [np.pad(values, ((0, 0), (0, 8 * width - values.shape[1]))) for values in (zeros, scales)]
    tensors = {
        ".qweight": stored("q", pack(codes.T, 4).T),
        ".qzeros": stored("z", pack(padded[0].T, 4).T),
        ".scales": stored("s", padded[1]),
    }
    method = method_of({"quant_method": "awq", "bits": 4, "group_size": group, "version": "GEMV"}, {})
    matrix = method.canonical("w", tensors, codes.shape)
    assert isinstance(matrix, Affine) and matrix.group == group
    assert np.array_equal(decode_canonical(matrix), weights(codes, zeros, scales))
    with pytest.raises(CheckpointError, match="which groups of 96 do not divide"):
        method_of({"quant_method": "awq", "group_size": 96, "version": "gemv"}, {}).canonical("w", tensors, codes.shape)


@pytest.mark.parametrize(("version", "zeros_name"), [("gemv_fast", ".qzeros"), ("llm-awq", ".scaled_zeros")])
def test_awq_gemv_fast(version: str, zeros_name: str) -> None:
    codes, zeros, scales = integers(8, 128, 32)
    words = np.zeros((2, 128), dtype=np.uint16)
    for (row, column), code in np.ndenumerate(codes):
        tile, pair, bit = column % 32 // 8, column % 8 // 2, column % 2
        place = tile * 2 + bit  # of the eight at `pair`: four tiles' pairs side by side
        column = column // 32 * 32 + pair * 8 + place // 2 + 4 * (place % 2)  # even places before odd ones
        flat = row % 4 * 64 + column % 64  # 64 inputs of four rows in turn, four codes a word
        words[row // 4, column // 64 * 64 + flat // 4] |= code << 4 * (flat % 4)
    minimums = (-zeros * scales.astype(np.float32)).astype(np.float16)
    tensors = {
        ".qweight": stored("q", words.view(np.int16)),
        zeros_name: stored("z", np.pad(minimums.T, ((0, 4), (0, 0)))),
        ".scales": stored("s", np.pad(scales.T, ((0, 4), (0, 0)))),
    }
    method = method_of({"quant_method": "awq", "bits": 4, "group_size": 32, "version": version}, {})
    spread = np.repeat(scales.astype(np.float32), 32, axis=1), np.repeat(minimums.astype(np.float32), 32, axis=1)
    expected = codes.astype(np.float32) * spread[0] + spread[1]
    assert np.array_equal(decode_canonical(method.canonical("w", tensors, codes.shape)), expected)


def test_eetq() -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(-128, 128, (4, 128)), rng.uniform(0.01, 0.1, 4).astype(np.float16)
    order = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)  # input at each place of sixteen
    swap = (0, 2, 1, 3)  # byte at each place of four
    flat = np.zeros(4 * 128, dtype=np.uint8)
    for (row, column), code in np.ndenumerate(codes):
        column = column // 16 * 16 + order.index(column % 16)
        place = row // 2 * 256 + column // 64 * 128 + row % 2 * 64 + column % 64  # runs of 64 of two rows in turn
        flat[place // 4 * 4 + swap.index(place % 4)] = code + 128
    tensors = {
        ".weight": stored("w", flat.view(np.int8).reshape(128, 4)),
        ".weight_scales": stored("s", scales),
    }
    method = method_of({"quant_method": "eetq", "weights": "int8"}, {})
    matrix = method.canonical("w.weight", tensors, (4, 128))
    assert isinstance(matrix, Affine) and matrix.zero == 128
    assert np.array_equal(decode_canonical(matrix), codes * scales.astype(np.float32)[:, None])
    with pytest.raises(CheckpointError, match="runs of 64"):
        method.canonical("w.weight", tensors, (16, 32))


def exl2(spans: list[tuple[int, int]], outputs: int) -> tuple[Tensors, np.ndarray]:
    """Groups of (bits, inputs) over 32-padded outputs."""
    rng = np.random.default_rng(0)
    words, groups, rows, width = [], [], [], -(-outputs // 32) * 32
    scale_codes = rng.integers(0, 16, (len(spans), width))
    units = rng.uniform(0.01, 0.1, len(spans)).astype(np.float16)
    for index, (bits, inputs) in enumerate(spans):
        codes = rng.integers(0, 2**bits, (inputs, width))
        groups += [bits, sum(map(len, words))]
        words.append(pack(codes, bits))
        scale = ((scale_codes[index] + 1) ** 2).astype(np.float32) * (np.float32(units[index]) / np.float32(256))
        rows.append((codes - 2 ** (bits - 1)).astype(np.float32) * scale)
    decoded = np.concatenate(rows)
    where = rng.permutation(len(decoded)).astype(np.int32)
    return {
        ".q_weight": stored("q", np.concatenate(words)),
        ".q_scale": stored("s", pack(scale_codes.T, 4).T),
        ".q_scale_max": stored("m", units),
        ".q_groups": stored("g", np.array(groups, dtype=np.int16)),
        ".q_invperm": stored("p", where),
    }, decoded[where, :outputs].T


def test_exl2() -> None:
    """Every width in one matrix, groups of two sizes, inputs out of order and padded outputs."""
    spans = [(8, 128), (6, 128), (5, 128), (4, 32), (3, 32), (2, 32), (2, 32)]
    tensors, expected = exl2(spans, 40)
    method = method_of({"quant_method": "exl2", "bits": 4.0}, {})
    matrix = method.canonical("w", tensors, expected.shape)
    assert isinstance(matrix, Affine) and (matrix.bits, matrix.group, matrix.zero) == (8, 32, 128)
    assert np.array_equal(decode_canonical(matrix), expected)
    tensors, expected = exl2([(4, 64), (3, 64)], 32)
    matrix = method.canonical("w", tensors, expected.shape)
    assert isinstance(matrix, Affine) and (matrix.bits, matrix.group) == (4, 64)
    assert np.array_equal(decode_canonical(matrix), expected)
    with pytest.raises(CheckpointError, match="'g' makes groups that are not 160 inputs"):
        method.canonical("w", tensors, (32, 160))
    twice = stored("p", np.zeros(128, dtype=np.int32))
    with pytest.raises(CheckpointError, match="'p' is no permutation of 128 inputs"):
        method.canonical("w", tensors | {".q_invperm": twice}, expected.shape)


def trellis_value(state: int, kind: str) -> np.float16:
    """A 16-bit state's weight, as the format's three codebooks define it."""
    factor, addend = {"": (89226354, 64248484), ".mcg": (0xCBAC1FED, 0), ".mul1": (0x83DCD12D, 0)}[kind]
    mixed = (state * factor + addend) % 2**32
    if kind == ".mul1":
        total = np.array([0x6400 + sum(mixed.to_bytes(4, "little"))], dtype=np.uint16).view(np.float16)[0]
        step, shift = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16)
        return np.float16(float(total) * float(step) + float(shift))
    halves = np.array([(mixed & 0x8FFF8FFF) ^ 0x3B603B60], dtype=np.uint32).view(np.float16)
    return np.float16(halves[0] + halves[1])


@pytest.mark.parametrize(("bits", "kind"), [(2, ""), (3, ".mcg"), (4, ".mul1"), (5, ""), (8, ".mcg")])
def test_exl3(bits: int, kind: str) -> None:
    rng = np.random.default_rng(bits)
    outputs, inputs = 128, 256
    codes = rng.integers(0, 2**bits, (inputs // 16, outputs // 16, 256))
    shifts = np.arange(bits)[::-1]
    ring = ((codes[..., None] >> shifts) & 1).reshape(*codes.shape[:2], -1)  # highest bit first
    words = np.packbits(ring, axis=-1).view(">u4").astype("<u4").view(np.int16)
    signs = rng.choice([-1.0, 1.0], inputs)
    column_scales = rng.uniform(0.5, 1.5, outputs).astype(np.float16)
    tensors = {
        ".trellis": stored("t", words),
        ".su": stored("su", np.packbits(signs < 0, bitorder="little").view(np.int16)),
        ".svh": stored("svh", column_scales),
    }
    if kind:
        tensors[kind] = stored("k", np.zeros((), dtype=np.int32))
    inner = np.zeros((inputs, outputs))
    for (down, across, index), _ in np.ndenumerate(codes):
        if (down, across) not in ((0, 0), (3, 5)):
            continue  # two tiles tell the order; the others are compared through the transform below
        window = [int(ring[down, across, (index * bits + bits - 16 + bit) % (256 * bits)]) for bit in range(16)]
        lane, item = divmod(index, 8)
        row = lane % 4 * 2 + item % 2 + item // 2 % 2 * 8
        inner[down * 16 + row, across * 16 + lane // 4 + item // 4 * 8] = trellis_value(
            int("".join(map(str, window)), 2), kind
        )
    method = method_of({"quant_method": "exl3", "bits": float(bits)}, {})
    matrix = method.canonical("w", tensors, (outputs, inputs))
    assert isinstance(matrix, Plain) and matrix.format == "f32" and method.converted
    turn = np.array([[(-1) ** (i & j).bit_count() for j in range(128)] for i in range(128)]) / 128**0.5
    back = decode_canonical(matrix).T / signs[:, None] / column_scales.astype(np.float64)
    back = np.einsum("ij,ajkl,lm->aikm", turn, back.reshape(2, 128, 1, 128), turn).reshape(inputs, outputs)
    for down, across in ((0, 0), (3, 5)):
        part = slice(down * 16, down * 16 + 16), slice(across * 16, across * 16 + 16)
        assert np.abs(back[part] - inner[part]).max() < 2e-5
    assert method.count({"w.trellis": tensors[".trellis"].info, "w.su": tensors[".su"].info})[0] == inputs * outputs
