"""MXFP4 experts of GPT-OSS (OCP Microscaling Formats v1.0): `*_blocks` [E, N, K / 32, 16], `*_scales` [E, N, K / 32].

Gate and up rows stay interleaved as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.kernels.canonical import Blocks
from penstock.quant.formats.mxfp4 import PACKED_BYTES
from penstock.quant.methods.float4 import mxfp4_matrix
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values


def _decode(matrix: Matrix) -> Blocks:
    matrix.array("_blocks", "u8", (*matrix.stored_shape("_scales"), PACKED_BYTES))
    return mxfp4_matrix(matrix, "_blocks", "_scales")


def mxfp4(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # it lists only what is not quantised, which the tensors say as well
    layout = Layout(("_blocks", "_scales"), _decode, packed_values("_blocks", 4), ends="_blocks")
    return Method("mxfp4", (layout,))
