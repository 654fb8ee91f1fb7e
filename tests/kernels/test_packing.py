"""Native packings: values are the reference decode bit for bit, products near float64 and the same however computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.kernels.cpu import native, ops, packing
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.formats import FORMATS, format_bytes

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
ROWS = 70
BLOCKS = [name for name, stored in FORMATS.items() if stored.block_size > 1]
SHAPES = ((32, "zero"), (128, "zeros"), (16, "minimums"), (64, "order"), (512, "zero"), (64, "fractions"))
NF4 = np.linspace(-1.0, 1.0, 16, dtype=np.float32) ** 3


@pytest.fixture(autouse=True)
def _isa() -> Iterator[None]:
    yield
    native.select_isa("auto")


def random_blocks(name: str, rows: int, seed: int) -> Blocks:
    """Random bytes whose values are of ordinary size."""
    rng, size, bytes_each = np.random.default_rng(seed), FORMATS[name].block_size, FORMATS[name].block_bytes
    inputs = 3 * size
    count = rows * 3
    data = rng.integers(0, 256, (count, bytes_each), dtype=np.uint8)
    for _ in range(1000):
        values = decode_canonical(Blocks(name, (count, size), data.reshape(-1)))
        wild = ~np.all(np.abs(np.nan_to_num(values, nan=np.inf)) < 1e3, axis=1)
        if not wild.any():
            break
        data[wild] = rng.integers(0, 256, (int(wild.sum()), bytes_each), dtype=np.uint8)
    assert not wild.any()
    return Blocks(name, (rows, inputs), data.reshape(-1))


def affine(bits: int, group: int, how: str, seed: int) -> Affine:
    rng, inputs = np.random.default_rng(seed), 512
    shape = (ROWS, inputs // group)
    scales = rng.uniform(0.01, 1, shape).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, 2**bits, (ROWS, inputs), dtype=np.uint8)
    zeros: Any = rng.integers(0, 2**bits, shape, dtype=np.uint8) if how == "zeros" else None
    if how == "fractions":  # signed, and some of another size than the codes
        zeros = (rng.normal(size=shape) * 2.0 ** rng.integers(-12, bits, shape)).astype(np.float16).astype(np.float32)
    minimums = rng.normal(size=shape).astype(np.float32) if how == "minimums" else None
    order = rng.permutation(inputs).astype(np.int32) if how == "order" else None
    zero = 2 ** (bits - 1) if how in ("zero", "order") else 0
    return Affine(codes, bits, group, scales, zero, zeros, minimums, order)


def sorted_by_width(widths: tuple[int, ...], group: int, seed: int) -> Affine:
    """As EXL2: a width a group of inputs, the most important first, and scales that are squares times the group's."""
    rng, bits, inputs = np.random.default_rng(seed), max(widths), len(widths) * group
    each = np.repeat(widths, group)
    codes = rng.integers(0, 2**each, (ROWS, inputs)) + 2 ** (bits - 1) - 2 ** (each - 1)
    units = rng.uniform(0.01, 1, len(widths)).astype(np.float16).astype(np.float32) / np.float32(256)
    scales = rng.integers(1, 17, (ROWS, len(widths))).astype(np.float32) ** 2 * units
    order = rng.permutation(inputs).astype(np.int32)
    return Affine(codes.astype(np.uint8), bits, group, scales, zero=2 ** (bits - 1), order=order)


def codebook(table: np.ndarray, group: int, seed: int) -> Codebook:
    rng, inputs = np.random.default_rng(seed), 320
    codes = rng.integers(0, 16, (ROWS, inputs), dtype=np.uint8)
    return Codebook(codes, table.astype(np.float32), group, rng.normal(size=(ROWS, inputs // group)).astype(np.float32))


def nvfp4(seed: int) -> Codebook:
    """Scales of 8 bits times one number for the tensor."""
    matrix = codebook(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]), 16, seed)
    codes = torch.from_numpy(matrix.scales).abs().to(torch.float8_e4m3fn).float() * torch.tensor(0.0123456)
    return Codebook(matrix.codes, matrix.table, 16, codes.numpy())


def plain(kind: str, tile: tuple[int, int] | None, seed: int) -> Plain:
    rng, inputs = np.random.default_rng(seed), 130
    values = rng.normal(size=(ROWS, inputs)).astype(np.float32)
    if kind == "f32":
        data = values.view(np.uint8)
    elif kind == "bf16":
        data = np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    elif kind == "f16":
        data = values.astype(np.float16).view(np.uint8)
    else:
        data = rng.integers(0, 0x78, (ROWS, inputs), dtype=np.uint8)
    if tile is None:
        return Plain(kind, (ROWS, inputs), data.reshape(-1))
    scales = rng.normal(size=(-(-ROWS // tile[0]), -(-inputs // tile[1]))).astype(np.float32)
    return Plain(kind, (ROWS, inputs), data.reshape(-1), scales, tile)


def matrices() -> Iterator[tuple[str, Canonical]]:
    for seed, name in enumerate(BLOCKS):
        yield name, random_blocks(name, ROWS, seed)
    for bits in (1, 2, 3, 4, 5, 6, 7, 8):
        for group, how in SHAPES:
            yield f"affine {bits} bits, group {group}, {how}", affine(bits, group, how, bits)
    yield "sorted by width, group 32", sorted_by_width((8, 6, 6, 5, 4, 4, 3, 3, 3, 2, 2, 1), 32, 0)
    yield "sorted by width, group 16", sorted_by_width((6, 6, 4, 4, 4, 4, 3, 2, 2), 16, 1)
    yield "sorted by width, group 128", sorted_by_width((5, 4, 3), 128, 2)
    for group in (16, 32, 64):
        yield f"nf4 {group}", codebook(NF4, group, group)
        yield f"whole codebook {group}", codebook(np.arange(-8.0, 8.0) / 2, group, group)
    yield "nvfp4 of a tensor", nvfp4(3)
    for kind in ("f32", "bf16", "f16", "f8_e4m3", "f8_e5m2"):
        for tile in (None, (1, 130), (ROWS, 130), (32, 48)):
            yield f"{kind} {tile}", plain(kind, tile, 1)


ALL = list(matrices())


@pytest.mark.parametrize("matrix", [m for _, m in ALL], ids=[name for name, _ in ALL])
def test_packed_values_and_products(matrix: Canonical) -> None:
    packed, exact = packing.pack(matrix), decode_canonical(matrix)
    values = np.empty(exact.shape, dtype=np.float32)
    packed.unpack(values)
    np.testing.assert_array_equal(values, exact)
    x = torch.randn(33, exact.shape[1], generator=torch.Generator().manual_seed(0))
    weight = ops.pack_linear([matrix])
    many = ops.linear(x, weight)
    assert many.shape == (33, ROWS)
    # Half a step of 8-bit activations for every weight, and what fp32 sums lose.
    reference = x.double().numpy() @ exact.astype(np.float64).T
    inputs = -(-exact.shape[1] // 32) * 32
    most_x = np.abs(np.pad(x.numpy(), ((0, 0), (0, inputs - x.shape[1])))).reshape(33, -1, 32).max(axis=2)
    if isinstance(matrix, Affine) and matrix.order is not None:
        most_x = np.broadcast_to(most_x.max(axis=1, keepdims=True), most_x.shape)
    sums = np.abs(np.pad(exact, ((0, 0), (0, inputs - x.shape[1])))).reshape(ROWS, -1, 32)
    bound = most_x @ (sums.sum(axis=2) * 0.5 / 127 + sums.max(axis=2) * 32 * 1e-5).T + 1e-6
    others: list[torch.Tensor] = []
    for isa in native.usable_isas():
        native.select_isa(isa)
        if native.two_ways():
            continue  # test_tiles.py
        many = ops.linear(x, weight)
        assert np.all(np.abs(many.numpy() - reference) <= bound), isa
        for rows in (1, 2, 3, 5, 8):
            assert torch.equal(ops.linear(x[:rows].contiguous(), weight), many[:rows]), isa
        pairs = isa == "avx512_bf16" and isinstance(matrix, Plain) and matrix.format not in ("f32", "f16")
        if not pairs:  # those round activations to bfloat16
            others.append(many)
    assert all(torch.equal(other, others[0]) for other in others)


@pytest.mark.parametrize("name", BLOCKS)
def test_packed_blocks_are_about_as_large_as_stored(name: str) -> None:
    inputs = 4096
    stored = format_bytes(name, 64 * inputs)
    packed = packing.pack(Blocks(name, (64, inputs), np.zeros(stored, dtype=np.uint8)))
    assert packed.file_bytes == stored
    assert packed.nbytes <= 1.1 * stored


@pytest.mark.parametrize(("widths", "group"), [((4, 4, 3, 3), 128), ((6, 5, 4, 3, 2, 2, 2, 2), 32), ((4,) * 8, 32)])
def test_inputs_sorted_by_width_keep_their_widths(widths: tuple[int, ...], group: int) -> None:
    packed = packing.pack(sorted_by_width(widths * 8, group, 3))
    stored = ROWS * group * sum(widths) + (4 * ROWS + 48) * len(widths) + 32 * group * len(widths)  # bytes of the file
    assert packed.nbytes <= 1.1 * stored * (80 / ROWS)  # panels have sixteen rows
    assert "squared scales" in packed.kind


def test_scales_of_nvfp4_stay_a_byte() -> None:
    assert "group 16, e4m3 scales" in packing.pack(nvfp4(1)).kind


def test_a_matrix_maps_back_from_its_bytes() -> None:
    packed = packing.pack(random_blocks("q4_k", ROWS, 5))
    room = np.empty(packed.nbytes + 64, dtype=np.uint8)
    start = -room.ctypes.data % 64
    room[start : start + packed.nbytes] = packed.data
    again = native.library().PackedMatrix.from_memory(packed.header, room.ctypes.data + start, room)
    first, second = (np.empty((ROWS, packed.cols), dtype=np.float32) for _ in range(2))
    packed.unpack(first)
    again.unpack(second)
    np.testing.assert_array_equal(first, second)
    broken = bytearray(packed.header)
    broken[4] += 1  # version
    with pytest.raises(ValueError, match="another version"):
        native.library().PackedMatrix.from_memory(bytes(broken), room.ctypes.data + start, room)


def test_what_cannot_be_packed_is_refused_with_the_reason() -> None:
    matrix = affine(4, 32, "zero", 0)
    matrix.scales[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"nan.*finite"):
        packing.pack(matrix)
    matrix = affine(4, 32, "zero", 0)
    matrix.codes[2, 2] = 16
    with pytest.raises(ValueError, match="row 2 does not fit in 4 bits"):
        packing.pack(matrix)
    assert packing.packable(affine(4, 8, "zero", 0)) is not None


def test_inputs_that_are_not_finite_reach_the_outputs() -> None:
    weight = ops.pack_linear([random_blocks("q4_0", ROWS, 1)])
    x = torch.zeros(2, weight.parts[0].cols)
    x[0, 5] = float("nan")
    out = ops.linear(x, weight)
    assert torch.isnan(out[0]).all()
    assert torch.equal(out[1], torch.zeros(ROWS))
