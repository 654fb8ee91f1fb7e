"""MXFP4: 32 E2M1 values under one E8M0 power-of-two scale (OCP Microscaling Formats MX v1.0), in its two layouts.

Hugging Face GPT-OSS checkpoints keep `*_blocks` [..., G, 16] and `*_scales` [..., G] as uint8; byte i of a block holds
values 2i (low nibble) and 2i + 1 (high nibble). GGUF keeps one 17-byte block: the scale, then 16 bytes whose byte i
holds values i (low) and i + 16 (high).
"""

from __future__ import annotations

import numpy as np

from penstock.quant.formats.record import Bytes, Floats

BLOCK_VALUES = 32
PACKED_BYTES = 16

# E2M1 magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6, doubled so that they are whole; the scale is halved in turn.
E2M1_DOUBLED: Floats = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def half_scale(codes: Bytes) -> Floats:
    """Half the scale of each E8M0 code: 2 ** (code - 128), exact also where it is a float32 subnormal."""
    wide = codes.astype(np.uint32)
    subnormal = np.uint32(1 << 21) << np.minimum(wide, 1)
    return np.where(wide < 2, subnormal, (wide - (wide > 0)) << np.uint32(23)).astype(np.uint32).view(np.float32)


def _check_pair(blocks: Bytes, scales: Bytes) -> None:
    if blocks.shape != (*scales.shape, PACKED_BYTES):
        raise ValueError(f"MXFP4 blocks {blocks.shape} and scales {scales.shape} do not belong together")


def to_gguf_blocks(blocks: Bytes, scales: Bytes) -> Bytes:
    """Hugging Face pair → GGUF blocks.

    Args:
        blocks: [..., G, 16] uint8.
        scales: [..., G] uint8.

    Returns:
        [..., G, 17] uint8.

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check_pair(blocks, scales)
    low, high = blocks & 0x0F, blocks >> 4  # values 2i, 2i + 1
    out = np.empty((*scales.shape, 1 + PACKED_BYTES), dtype=np.uint8)
    out[..., 0] = scales
    out[..., 1::2] = low[..., :8] | (low[..., 8:] << np.uint8(4))
    out[..., 2::2] = high[..., :8] | (high[..., 8:] << np.uint8(4))
    return out


def from_gguf_blocks(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """GGUF blocks [..., G, 17] → the Hugging Face pair ([..., G, 16], [..., G]). Inverse of to_gguf_blocks."""
    low, high = blocks[..., 1:] & 0x0F, blocks[..., 1:] >> 4  # values i, i + 16
    out = np.empty((*blocks.shape[:-1], PACKED_BYTES), dtype=np.uint8)
    out[..., :8] = low[..., ::2] | (low[..., 1::2] << np.uint8(4))
    out[..., 8:] = high[..., ::2] | (high[..., 1::2] << np.uint8(4))
    return out, np.ascontiguousarray(blocks[..., 0])


def decode_pair(blocks: Bytes, scales: Bytes) -> Floats:
    """Decodes a Hugging Face pair.

    Args:
        blocks: [..., G, 16] uint8.
        scales: [..., G] uint8.

    Returns:
        [..., G × 32] float32.

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check_pair(blocks, scales)
    nibbles = np.stack([blocks & 0x0F, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK_VALUES)
    with np.errstate(over="ignore"):
        values = E2M1_DOUBLED[nibbles] * half_scale(scales)[..., None]
    return values.reshape(*scales.shape[:-1], -1)
