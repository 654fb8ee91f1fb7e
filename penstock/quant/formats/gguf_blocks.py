"""Block formats of GGUF files (ggml's `block_q*` structures), little-endian, decoded in numpy.

Every block stores quants plus a float16 scale (and for asymmetric formats a minimum). The K formats group 256 values
in sub-blocks of 16 or 32 with 4- or 6-bit scales of their own. Products and sums are rounded to float32 one by one, in
the order ggml uses, so that results agree with it to the bit.
"""

from __future__ import annotations

import numpy as np

from penstock.quant.formats.fields import BITS, CRUMBS, NIBBLES, half, low_nibbles_first, scaled, unpack
from penstock.quant.formats.mxfp4 import E2M1_DOUBLED, half_scale
from penstock.quant.formats.record import Bytes, Floats, Format


def _fifth_bits(packed: Bytes) -> Bytes:
    """[n, 4] → [n, 32]: bit i, already in place as value bit 4 of value i."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _decode_q4_0(blocks: Bytes) -> Floats:
    quants = low_nibbles_first(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return half(blocks, 0) * quants


def _decode_q4_1(blocks: Bytes) -> Floats:
    quants = low_nibbles_first(blocks[:, 4:]).astype(np.float32)
    return half(blocks, 0) * quants + half(blocks, 2)


def _decode_q5_0(blocks: Bytes) -> Floats:
    quants = low_nibbles_first(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return half(blocks, 0) * (quants.astype(np.float32) - np.float32(16))


def _decode_q5_1(blocks: Bytes) -> Floats:
    quants = low_nibbles_first(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return half(blocks, 0) * quants.astype(np.float32) + half(blocks, 2)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    quants = unpack(blocks[:, 16:80], 32, CRUMBS, 3).astype(np.float32)
    scale = half(blocks, 80) * (scales & 0x0F).astype(np.float32)
    minimum = half(blocks, 82) * (scales >> 4).astype(np.float32)
    return (scaled(scale, quants) - minimum[:, :, None]).reshape(-1, 256)


def _decode_q3_k(blocks: Bytes) -> Floats:
    count = len(blocks)
    high = (blocks[:, None, :32] >> BITS[:, None]) & np.uint8(1)  # [n, 8, 32]; a set bit means "no offset"
    low = unpack(blocks[:, 32:96], 32, CRUMBS, 3).reshape(count, 8, 32)
    quants = (low | (high << np.uint8(2))).astype(np.float32) - np.float32(4)
    packed = blocks[:, 96:108]  # sixteen 6-bit scales: 4 low bits in bytes 0-7, 2 high bits in bytes 8-11
    low_scales = np.concatenate([packed[:, :8] & 0x0F, packed[:, :8] >> 4], axis=1)
    high_scales = unpack(packed[:, 8:], 4, CRUMBS, 3).reshape(count, 16)
    scales = (low_scales | (high_scales << np.uint8(4))).astype(np.float32) - np.float32(32)
    return scaled(half(blocks, 108) * scales, quants).reshape(-1, 256)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """The eight 6-bit scales and eight 6-bit minimums of Q4_K and Q5_K, from [n, 12] bytes."""
    first = packed[:, :4]
    second = packed[:, 4:8]
    third = packed[:, 8:]
    scales = np.concatenate([first & 0x3F, (third & 0x0F) | ((first >> 6) << np.uint8(4))], axis=1)
    minimums = np.concatenate([second & 0x3F, (third >> 4) | ((second >> 6) << np.uint8(4))], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)


def _scaled_minus_minimum(blocks: Bytes, quants: Bytes) -> Floats:
    scales, minimums = _six_bit_pairs(blocks[:, 4:16])
    minimum = half(blocks, 2) * minimums
    return (scaled(half(blocks, 0) * scales, quants.astype(np.float32)) - minimum[:, :, None]).reshape(-1, 256)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _scaled_minus_minimum(blocks, unpack(blocks[:, 16:], 32, NIBBLES, 0x0F))


def _decode_q5_k(blocks: Bytes) -> Floats:
    low = unpack(blocks[:, 48:], 32, NIBBLES, 0x0F).reshape(len(blocks), 8, 32)
    high = (blocks[:, None, 16:48] >> BITS[:, None]) & np.uint8(1)
    return _scaled_minus_minimum(blocks, low | (high << np.uint8(4)))


def _decode_q6_k(blocks: Bytes) -> Floats:
    count = len(blocks)
    low = unpack(blocks[:, :128], 64, NIBBLES, 0x0F).reshape(count, 8, 32)
    high = unpack(blocks[:, 128:192], 32, CRUMBS, 3).reshape(count, 8, 32)
    quants = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return scaled(half(blocks, 208) * scales, quants).reshape(-1, 256)


def _decode_q8_k(blocks: Bytes) -> Floats:
    """A float32 scale, 256 signed bytes, and sums of 16 that a decoder has no use for."""
    scale = np.ascontiguousarray(blocks[:, :4]).view("<f4")
    return scale * blocks[:, 4:260].view(np.int8).astype(np.float32)


def _decode_mxfp4(blocks: Bytes) -> Floats:
    values = E2M1_DOUBLED[low_nibbles_first(blocks[:, 1:])]
    return half_scale(blocks[:, :1]) * values


BLOCK_FORMATS: tuple[Format, ...] = (
    Format("q4_0", 32, 18, _decode_q4_0),
    Format("q4_1", 32, 20, _decode_q4_1),
    Format("q5_0", 32, 22, _decode_q5_0),
    Format("q5_1", 32, 24, _decode_q5_1),
    Format("q8_0", 32, 34, _decode_q8_0),
    Format("q2_k", 256, 84, _decode_q2_k),
    Format("q3_k", 256, 110, _decode_q3_k),
    Format("q4_k", 256, 144, _decode_q4_k),
    Format("q5_k", 256, 176, _decode_q5_k),
    Format("q6_k", 256, 210, _decode_q6_k),
    Format("q8_k", 256, 292, _decode_q8_k),
    Format("mxfp4", 32, 17, _decode_mxfp4),
)
