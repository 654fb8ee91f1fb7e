"""EXL3 checkpoints (ExLlamaV3, after QTIP: Tseng et al., arXiv:2406.11235). Decoded at load.

`trellis` int16 [K / 16, N / 16, 16 · bits]: the codes of a 16 × 16 tile as one ring of 256 · bits bits, in words of 32,
highest bit first. Each value is a function of the 16 bits that end with its own code. The tile lies in the order of a
tensor core's fragment. Rows and columns are then turned back by Hadamard matrices of 128 and by
`suh` [K] and `svh` [N] (or the signs alone, packed in `su` and `sv`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.canonical import Plain
from penstock.quant.formats.record import Floats
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

_TILE, _TURN = 16, 128
_BATCH = 2048  # tiles decoded at a time, which caches hold
_MULTIPLIERS = {"": (89226354, 64248484), ".mcg": (0xCBAC1FED, 0), ".mul1": (0x83DCD12D, 0)}


@functools.cache
def _codebook(name: str) -> Floats:
    """[65536] values of every state."""
    factor, addend = _MULTIPLIERS[name]
    states = np.arange(2**16, dtype=np.uint32) * np.uint32(factor) + np.uint32(addend)
    if name == ".mul1":  # the sum of the four bytes, centred and scaled in float16
        total = states.view(np.uint8).reshape(-1, 4).sum(axis=1) + 0x6400
        step, shift = np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        values = total.astype(np.uint16).view(np.float16).astype(np.float64) * step + shift
        sums: Floats = values.astype(np.float16).astype(np.float32)
        return sums
    halves = ((states & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
    found: Floats = (halves[:, 0] + halves[:, 1]).astype(np.float32)
    return found


@functools.cache
def _fragment() -> npt.NDArray[np.int64]:
    """Place in the row-major 16 × 16 tile (inputs by outputs) of each of its 256 values as they are stored."""
    lane, item = np.divmod(np.arange(_TILE * _TILE), 8)
    rows = 2 * (lane % 4) + item % 2 + 8 * (item // 2 % 2)
    columns = lane // 4 + 8 * (item // 4)
    places: npt.NDArray[np.int64] = rows * _TILE + columns
    return places


def _tiles(words: npt.NDArray[np.uint32], bits: int, table: Floats) -> Floats:
    """[n, 8 · bits] words of n tiles → [256, n] values of row-major tiles."""
    out = np.empty((_TILE * _TILE, len(words)), dtype=np.float32)
    turned, length = np.ascontiguousarray(words.T), 256 * bits
    for index, place in enumerate(_fragment()):
        end = (index + 1) * bits
        first, last = (end - 16) % length // 32, (end - 1) % length // 32
        shift = np.uint32(31 - (end - 1) % 32)
        state = turned[last] >> shift
        if first != last:
            state |= turned[first] << (np.uint32(32) - shift)
        np.take(table, state & np.uint32(0xFFFF), out=out[place], mode="clip")
    return out


@functools.cache
def _hadamard() -> Floats:
    """Sylvester's matrix of 128, orthonormal."""
    matrix = np.ones((1, 1), dtype=np.float32)
    while len(matrix) < _TURN:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * np.float32(_TURN**-0.5)


def _signs(matrix: Matrix, suffix: str, size: int) -> Floats:
    if matrix.has(suffix + "h"):
        return matrix.floats(suffix + "h", (size,))
    packed = matrix.array(suffix, "i16", (size // 16,)).view(np.uint8)
    return np.float32(1) - np.float32(2) * np.unpackbits(packed, bitorder="little").astype(np.float32)


def _decode(matrix: Matrix) -> Plain:
    outputs, inputs = matrix.shape
    bits, odd = divmod(matrix.stored_shape(".trellis")[-1], _TILE)
    if odd or not 1 <= bits <= 8 or outputs % _TURN or inputs % _TURN:
        raise matrix.error(".trellis", f"has {bits} bits for {list(matrix.shape)}; 1 to 8 in tiles of 128 can be read")
    for suffix in (".su", ".sv"):
        if not matrix.has(suffix) and not matrix.has(suffix + "h"):
            raise matrix.error(".trellis", f"has neither {suffix} nor {suffix}h beside it")
    down, across = inputs // _TILE, outputs // _TILE
    words = matrix.array(".trellis", "i16", (down, across, _TILE * bits)).view(np.uint32)
    table = _codebook(next((name for name in (".mcg", ".mul1") if matrix.has(name)), ""))
    inner = np.empty((down, _TILE, across, _TILE), dtype=np.float32)
    step = max(1, _BATCH // across)
    for row in range(0, down, step):
        part = words[row : row + step]
        values = _tiles(part.reshape(-1, part.shape[-1]), bits, table).reshape(_TILE, _TILE, len(part), across)
        inner[row : row + step] = values.transpose(2, 0, 3, 1)
    turn = _hadamard()
    rows = turn @ inner.reshape(-1, _TURN, outputs)  # [K / 128, 128, N]
    full = (rows.reshape(inputs, -1, _TURN) @ turn).reshape(inputs, outputs)
    full *= _signs(matrix, ".su", inputs)[:, None]
    full *= _signs(matrix, ".sv", outputs)
    return Plain("f32", matrix.shape, np.ascontiguousarray(full.T).reshape(-1).view(np.uint8))


def _values(infos: Mapping[str, TensorInfo]) -> int:
    shape = infos[".trellis"].shape
    return shape[0] * shape[1] * _TILE * _TILE


def exl3(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # widths differ by layer
    optional = (".suh", ".svh", ".su", ".sv", ".mcg", ".mul1")
    return Method("exl3", (Layout((".trellis",), _decode, _values, optional),), converted=True)
