"""Formats of GGUF files whose four-bit codes index a table of 16 values: IQ4_NL, IQ4_XS and NVFP4."""

from __future__ import annotations

import numpy as np

from penstock.quant.formats.fields import NIBBLES, half, low_nibbles_first, nibbles, scaled, unpack, words
from penstock.quant.formats.mxfp4 import E2M1_DOUBLED
from penstock.quant.formats.record import Bytes, Floats, Format

IQ4_VALUES: Floats = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)


def half_ue4m3(codes: Bytes) -> Floats:
    """Half the value of each unsigned E4M3 scale, since the E2M1 values are doubled. The sign bit is not looked at;
    code 127, a NaN in the OCP format, is 0 here as in ggml."""
    exponent, fraction = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    normal = np.ldexp(np.float32(8) + fraction, exponent - 11)
    return np.where(codes == 127, 0, np.where(exponent == 0, fraction * np.float32(2**-10), normal)).astype(np.float32)


def _decode_iq4_nl(blocks: Bytes) -> Floats:
    return half(blocks, 0) * IQ4_VALUES[low_nibbles_first(blocks[:, 2:])]


def _decode_iq4_xs(blocks: Bytes) -> Floats:
    """d, high scale bits (two of each group in a word), low nibbles of the scales, codes."""
    high = words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint32) & 3
    scales = (nibbles(blocks[:, 4:8]) | high << 4).astype(np.float32) - np.float32(32)
    codes = unpack(blocks[:, 8:], 16, NIBBLES, 0x0F)
    return scaled(half(blocks, 0) * scales, IQ4_VALUES[codes]).reshape(-1, 256)


def _decode_nvfp4(blocks: Bytes) -> Floats:
    """Four scales, then eight bytes of codes for each group of 16: low nibbles first."""
    codes = unpack(blocks[:, 4:], 8, NIBBLES, 0x0F)
    return scaled(half_ue4m3(blocks[:, :4]), E2M1_DOUBLED[codes]).reshape(-1, 64)


CODEBOOK_FORMATS: tuple[Format, ...] = (
    Format("iq4_nl", 32, 18, _decode_iq4_nl),
    Format("iq4_xs", 256, 136, _decode_iq4_xs),
    Format("nvfp4", 64, 36, _decode_nvfp4),
)
