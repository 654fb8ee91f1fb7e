"""Floats quantised where the model goes, a piece at a time: the bits of the host's encoders, much sooner.

What needs a search for scales, or a sum whose order counts, is left to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.canonical import Affine, Blocks, Canonical, Plain
from penstock.kernels.plain import FLOAT_FORMATS
from penstock.kernels.staging import to_device
from penstock.quant.encode import require_finite

_PIECE = 1 << 24  # values that are float32 at once
_TILE = 128
_BLOCK = 32

Encoder = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows of float32 → their codes as bytes, and scales."""


def device_encoder(format: str, matrix: Plain) -> Callable[[torch.device], Canonical] | None:
    """What `quantize_matrix(format, …)` gives, made on a device; None where only the host makes it.

    Raises:
        ConfigError: (when called) a value is not finite.
    """
    floats = matrix.scales is None and matrix.format in ("f32", "f16", "bf16")
    if not floats or format not in _ENCODERS or (format == "q8_0" and matrix.shape[1] % _BLOCK):
        return None
    return lambda device: _encoded(format, matrix, device)


def _encoded(format: str, matrix: Plain, device: torch.device) -> Canonical:
    rows, inputs = matrix.shape
    pieces = [tuple(part.cpu().numpy() for part in _ENCODERS[format](piece)) for piece in _pieces(matrix, device)]
    codes, scales = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    if format == "q8_0":
        return Blocks("q8_0", (rows, inputs), codes.reshape(-1))
    if format == "int8":
        return Affine(codes, 8, inputs, scales, zero=128)
    tile = (1, inputs) if format == "fp8" else (_TILE, _TILE)
    return Plain("f8_e4m3", (rows, inputs), codes.reshape(-1), scales, tile)


def _pieces(matrix: Plain, device: torch.device) -> Iterator[Tensor]:
    """Rows in float32, whole tiles of them."""
    rows, inputs = matrix.shape
    stored = to_device(matrix.data, device).view(FLOAT_FORMATS[matrix.format]).view(rows, inputs)
    size = max(1, _PIECE // (inputs * _TILE)) * _TILE
    for begin in range(0, rows, size):
        piece = stored[begin : begin + size].float()
        if not bool(torch.isfinite(piece).all()):
            require_finite(piece.cpu().numpy())
        yield piece


def _over(values: Tensor, divisor: float) -> Tensor:
    """Quotients; where a divisor is a number, torch multiplies by its inverse, which is rounded, on some devices."""
    return values / torch.full((), divisor, device=values.device).expand_as(values)


def _safe(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, scales, 1.0)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def _fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _safe(_over(values.abs().amax(dim=1, keepdim=True), 448.0))
    return _e4m3(values / scales), scales


def _fp8_block(values: Tensor) -> tuple[Tensor, Tensor]:
    rows, inputs = values.shape
    down, across = -(-rows // _TILE), -(-inputs // _TILE)
    padded = torch.nn.functional.pad(values, (0, across * _TILE - inputs, 0, down * _TILE - rows))
    tiles = padded.view(down, _TILE, across, _TILE)
    scales = _safe(_over(tiles.abs().amax(dim=(1, 3)), 448.0))
    codes = _e4m3((tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :inputs])
    return codes.contiguous(), scales


def _int8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _safe(_over(values.abs().amax(dim=1, keepdim=True), 127.0).bfloat16().float())
    return ((values / scales).round_().clamp_(-127, 127) + 128).to(torch.uint8), scales


def _q8_0(values: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of bytes: a half-precision scale, then 32 codes; halves go away from zero. There are no other scales."""
    blocks = values.reshape(len(values), -1, _BLOCK)
    scales = _over(blocks.abs().amax(dim=2, keepdim=True), 127.0)
    scaled = blocks * torch.where(scales == 0, 0.0, scales.reciprocal())
    codes = torch.copysign((scaled.abs() + 0.5).floor_(), scaled).to(torch.int8).view(torch.uint8)
    halves = scales.clamp(max=65504.0).half().view(torch.uint8)
    return torch.cat((halves, codes), dim=2).flatten(1), scales[:0]


_ENCODERS: dict[str, Encoder] = {"fp8": _fp8, "fp8_block": _fp8_block, "int8": _int8, "q8_0": _q8_0}
