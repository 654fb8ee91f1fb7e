"""MXFP4 experts of GPT-OSS (OCP Microscaling Formats v1.0): `*_blocks` [E, N, K / 32, 16], `*_scales` [E, N, K / 32].

Gate and up rows stay interleaved as they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.kernels.canonical import Blocks
from penstock.quant.formats.mxfp4 import BLOCK_VALUES, PACKED_BYTES, to_gguf_blocks
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values


def _decode(matrix: Matrix) -> Blocks:
    rows, inputs = matrix.shape
    shape = matrix.stored_shape("_scales")
    groups, odd = divmod(inputs, BLOCK_VALUES)
    if odd or not shape or shape[-1] != groups or matrix.tensors["_scales"].data.size != rows * groups:
        raise matrix.error("_scales", f"has shape {list(shape)} where {rows} rows of {inputs} inputs are needed")
    blocks, scales = matrix.array("_blocks", "u8", (*shape, PACKED_BYTES)), matrix.array("_scales", "u8")
    if (scales == 0xFF).any():
        raise matrix.error("_scales", "holds NaN among its scales")
    return Blocks("mxfp4", matrix.shape, to_gguf_blocks(blocks, scales).reshape(-1))


def mxfp4(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`."""
    del config  # it lists only what is not quantised, which the tensors say as well
    layout = Layout(("_blocks", "_scales"), _decode, packed_values("_blocks", 4), ends="_blocks")
    return Method("mxfp4", (layout,))
