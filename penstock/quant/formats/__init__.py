"""Storage formats of tensors, each a small record with its plain numpy decoder, in one registry. No torch here.

The decoders are the reference that faster ones are tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from penstock.quant.formats.gguf_blocks import BLOCK_FORMATS
from penstock.quant.formats.gguf_codebooks import CODEBOOK_FORMATS
from penstock.quant.formats.gguf_lattice import LATTICE_FORMATS
from penstock.quant.formats.gguf_ternary import TERNARY_FORMATS
from penstock.quant.formats.plain import PLAIN_FORMATS
from penstock.quant.formats.record import Bytes, Floats, Format

__all__ = ["FORMATS", "Format", "decode_to_float32", "format_bytes"]

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        found.name: found
        for formats in (PLAIN_FORMATS, BLOCK_FORMATS, CODEBOOK_FORMATS, LATTICE_FORMATS, TERNARY_FORMATS)
        for found in formats
    }
)


def format_bytes(name: str, elements: int) -> int:
    """Bytes that `elements` values take in format `name`; elements is a multiple of its block size."""
    found = FORMATS[name]
    return elements // found.block_size * found.block_bytes


def decode_to_float32(name: str, data: Bytes) -> Floats:
    """Decodes whole blocks of format `name`.

    Args:
        name: a key of FORMATS.
        data: [n × block bytes] uint8.

    Returns:
        [n × block size] float32.

    Raises:
        ValueError: unknown format, or data is not whole blocks.
    """
    found = FORMATS.get(name)
    if found is None:
        raise ValueError(f"format {name!r} has no decoder; there are: {', '.join(FORMATS)}")
    if data.size % found.block_bytes:
        raise ValueError(f"{data.size} bytes are not a whole number of {name} blocks of {found.block_bytes} bytes")
    blocks = np.ascontiguousarray(data).reshape(-1, found.block_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale is NaN or infinite in the result, no warning
        return found.decode(blocks).reshape(-1)
