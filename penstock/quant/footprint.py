"""What packed weights take in memory, estimated. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PACKING_SLACK = 1.05  # over the file's bytes, for packed scales and padding
# Estimated bits of a weight, scales included, by the first letters of `--quantize` formats.
_BITS: Mapping[str, float] = MappingProxyType(
    {
    "q2_k": 2.8, "q3_k": 3.7, "q4_0": 4.7, "q4_1": 5.2, "q4_k": 4.8, "q5_0": 5.7, "q5_1": 6.2, "q5_k": 5.8, "q6_k": 6.8,
    "q8_0": 8.7, "iq4_": 4.8, "tq1_": 2.1, "tq2_": 2.4, "mxfp": 4.5, "nvfp": 4.8, "int4": 4.5, "int8": 8.2, "fp8": 8.2,
    "fp8_": 8.2,
    }
)  # fmt: skip


def encoded_bytes(format: str, values: int) -> float:
    """Bytes of so many values once they are quantised."""
    return values * _BITS.get(format[:4], 16.5) / 8
