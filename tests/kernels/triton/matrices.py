"""Quantised matrices of every kind that kernels of Triton read."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.canonical import Affine, Blocks, Canonical, Codebook, Plain
from penstock.quant.canonical_decode import decode_canonical
from penstock.quant.formats import FORMATS

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
NF4 = np.linspace(-1.0, 1.0, 16, dtype=np.float32) ** 3
ROWS, INPUTS = 70, 320


def blocks(name: str, rows: int = ROWS, inputs: int = INPUTS) -> Blocks:
    """Random bytes whose values are of ordinary size."""
    rng, stored = np.random.default_rng(rows), FORMATS[name]
    inputs = 512 if stored.block_size == 256 else inputs
    data = rng.integers(0, 256, (rows * inputs // stored.block_size, stored.block_bytes), dtype=np.uint8)
    for _ in range(1000):
        values = decode_canonical(Blocks(name, (len(data), stored.block_size), data.reshape(-1)))
        wild = ~np.all(np.abs(np.nan_to_num(values, nan=np.inf)) < 100, axis=1)
        if not wild.any():
            return Blocks(name, (rows, inputs), data.reshape(-1))
        data[wild] = rng.integers(0, 256, (int(wild.sum()), stored.block_bytes), dtype=np.uint8)
    raise AssertionError(name)


def affine(bits: int, group: int, how: str = "zero", rows: int = ROWS, inputs: int = INPUTS) -> Affine:
    """`how`: "zero", "zeros", "fractions" (zero points that are no integers), "minimums" or "order"."""
    rng, shape = np.random.default_rng(bits), (rows, inputs // group)
    scales = rng.uniform(0.01, 1, shape).astype(np.float16).astype(np.float32)
    codes = rng.integers(0, 2**bits, (rows, inputs), dtype=np.uint8)
    zeros = rng.integers(0, 2**bits, shape, dtype=np.uint8) if how == "zeros" else None
    if how == "fractions":
        zeros = rng.normal(size=shape).astype(np.float32)
    minimums = rng.normal(size=shape).astype(np.float16).astype(np.float32) if how == "minimums" else None
    order = rng.permutation(inputs).astype(np.int32) if how == "order" else None
    zero = 2 ** (bits - 1) if how in ("zero", "order") else 0
    return Affine(codes, bits, group, scales, zero, zeros, minimums, order)


def codebook(table: np.ndarray, group: int, rows: int = ROWS, inputs: int = INPUTS) -> Codebook:
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (rows, inputs), dtype=np.uint8)
    scales = rng.normal(size=(rows, inputs // group)).astype(np.float16)
    return Codebook(codes, table, group, scales.astype(np.float32))


def fp8(tile: tuple[int, int] | None, rows: int = ROWS, inputs: int = INPUTS) -> Plain:
    rng = np.random.default_rng(8)
    values = torch.from_numpy(rng.normal(size=(rows, inputs)).astype(np.float32)).to(torch.float8_e4m3fn)
    data = values.view(torch.uint8).numpy().reshape(-1)
    if tile is None:
        return Plain("f8_e4m3", (rows, inputs), data)
    scales = rng.uniform(0.5, 2, (-(-rows // tile[0]), -(-inputs // tile[1]))).astype(np.float32)
    return Plain("f8_e4m3", (rows, inputs), data, scales, tile)


def coded() -> dict[str, Canonical]:
    """Those whose codes are multiplied in the compute type."""
    named = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
    found: dict[str, Canonical] = {name: blocks(name) for name in (*named, "mxfp4", "nvfp4", "iq4_nl", "iq4_xs")}
    for bits in range(1, 9):
        found[f"{bits} bits"] = affine(bits, 32 if bits % 2 else 64)
    found |= {f"4 bits, {how}": affine(4, 64, how) for how in ("zeros", "fractions", "minimums", "order")}
    found |= {"4 bits, group 16": affine(4, 16), "4 bits, a row": affine(4, INPUTS), "nf4": codebook(NF4, 64)}
    return found | {"fp4": codebook(E2M1, 32), "nvfp4 of a tensor": codebook(E2M1, 16)}


def eights(rows: int = ROWS) -> dict[str, Canonical]:
    """Those whose activations are quantised too."""
    tiles = {"none": None, "tensor": (rows, INPUTS), "channel": (1, INPUTS), "blocks": (128, 128)}
    found: dict[str, Canonical] = {f"fp8, {name}": fp8(tile, rows) for name, tile in tiles.items()}
    return found | {"int8": affine(8, INPUTS, rows=rows)}
