"""Encoders of scaled integers and 8- and 4-bit floats, as safetensors checkpoints store them: float32 → canonical."""

from __future__ import annotations

import numpy as np

from penstock.kernels.canonical import Affine, Codebook, Plain
from penstock.quant.encode.blocks import e2m1_codes, to_bf16
from penstock.quant.formats import decode_to_float32
from penstock.quant.formats.mxfp4 import E2M1_DOUBLED
from penstock.quant.formats.record import Bytes, Floats

E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0
E2M1: Floats = E2M1_DOUBLED / np.float32(2)
NVFP4_GROUP = 16
_INT4_FACTORS = np.linspace(0.72, 1.06, 18, dtype=np.float32)  # of the scale that just reaches the largest magnitude


def e4m3_codes(values: Floats) -> Bytes:
    """The nearest E4M3 float (OCP 8-bit Floating Point Specification) of each value, ties to even, at most ±448."""
    magnitudes = np.minimum(np.abs(values), np.float32(E4M3_LARGEST))
    bits = magnitudes.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = rounded - np.uint32((127 - 7) << 3)
    subnormal = np.rint(magnitudes * np.float32(512)).astype(np.uint32)
    codes = np.where(magnitudes < np.float32(2**-6), subnormal, normal).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << np.uint8(7))


def from_e4m3(codes: Bytes) -> Floats:
    return decode_to_float32("f8_e4m3", codes.reshape(-1)).reshape(codes.shape)


def _as_bf16(scales: Floats) -> Floats:
    return (to_bf16(np.ascontiguousarray(scales)).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _safe(scales: Floats) -> Floats:
    """Scales without zero: rows of zeros take the scale 1."""
    return np.where(scales > 0, scales, np.float32(1))


def int8_rows(values: Floats, importance: Floats | None = None) -> Affine:
    """One scale a row, codes -127 … 127 stored with 128 added."""
    scales = _safe(_as_bf16(np.abs(values).max(axis=1, keepdims=True) / np.float32(127)))
    codes = (np.clip(np.rint(values / scales), -127, 127) + 128).astype(np.uint8)
    return Affine(codes, 8, values.shape[1], scales, zero=128)


def int4_groups(values: Floats, group: int, importance: Floats | None = None) -> Affine:
    """A scale a group of inputs, codes -8 … 7 stored with 8 added; the scale of least weighted squared error of 18,

    each corrected by least squares. Scales are exact in bfloat16, as checkpoints keep them.
    """
    rows, inputs = values.shape
    groups = values.reshape(rows, -1, group)
    weights = np.ones(inputs, np.float32) if importance is None else importance
    weights = weights.reshape(1, -1, group)
    weighted = weights * groups
    peaks = np.abs(groups).max(axis=2)
    best = np.full(peaks.shape, -1, np.float32)
    scales = np.zeros(peaks.shape, np.float32)
    for factor in _INT4_FACTORS:
        trial = _safe(peaks * (factor / np.float32(7.5)))
        codes = np.clip(np.rint(groups / trial[..., None]), -8, 7)
        across = np.einsum("rgi,rgi->rg", weighted, codes)
        square = np.einsum("rgi,rgi->rg", np.broadcast_to(weights, codes.shape) * codes, codes)
        gain = np.where(square > 0, across * across / np.maximum(square, 1e-30), 0)
        better = gain > best
        best = np.where(better, gain, best)
        scales = np.where(better, across / np.maximum(square, 1e-30), scales)
    scales = _as_bf16(scales)
    codes = np.clip(np.rint(groups / _safe(scales)[..., None]), -8, 7) + 8
    return Affine(codes.astype(np.uint8).reshape(rows, inputs), 4, group, scales, zero=8)


def fp8_rows(values: Floats, importance: Floats | None = None) -> Plain:
    """E4M3 with one scale a row, which brings the row's largest magnitude to 448."""
    scales = _safe(np.abs(values).max(axis=1, keepdims=True) / np.float32(E4M3_LARGEST))
    return Plain("f8_e4m3", _shape(values), e4m3_codes(values / scales).reshape(-1), scales, (1, values.shape[1]))


def fp8_tiles(values: Floats, tile: int = 128) -> Plain:
    """E4M3 with one scale a tile of `tile` × `tile` (DeepSeek-V3, arXiv:2412.19437)."""
    rows, inputs = values.shape
    down, across = -(-rows // tile), -(-inputs // tile)
    padded = np.zeros((down * tile, across * tile), np.float32)
    padded[:rows, :inputs] = values
    tiles: Floats = padded.reshape(down, tile, across, tile)
    peaks: Floats = np.abs(tiles).max(axis=(1, 3))
    scales = _safe(peaks / np.float32(E4M3_LARGEST))
    codes = e4m3_codes((tiles / scales[:, None, :, None]).astype(np.float32)).reshape(padded.shape)[:rows, :inputs]
    return Plain("f8_e4m3", (rows, inputs), np.ascontiguousarray(codes).reshape(-1), scales, (tile, tile))


def nvfp4_scales(values: Floats) -> tuple[Bytes, np.float32]:
    """E4M3 codes of the groups' scales [N, K / 16], and their divisor: 448 · 6 over the largest magnitude."""
    peaks = np.abs(values.reshape(len(values), -1, NVFP4_GROUP)).max(axis=2)
    largest = peaks.max(initial=0)
    divisor = np.float32(E4M3_LARGEST * E2M1_LARGEST / largest if largest > 0 else 1)
    return e4m3_codes(peaks * (divisor / np.float32(E2M1_LARGEST))), divisor


def nvfp4(values: Floats, importance: Floats | None = None) -> Codebook:
    """4-bit floats, an E4M3 scale a group of 16 and one float32 scale for all."""
    codes, divisor = nvfp4_scales(values)
    scales = from_e4m3(codes) / divisor
    scaled = values.reshape(len(values), -1, NVFP4_GROUP) / _safe(scales)[..., None]
    return Codebook(e2m1_codes(scaled).reshape(values.shape), E2M1, NVFP4_GROUP, scales)


def _shape(values: Floats) -> tuple[int, int]:
    return values.shape[0], values.shape[1]
