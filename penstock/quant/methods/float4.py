"""Four-bit floats (E2M1), two a byte, the earlier input in the low half, in groups under a scale.

NVFP4: groups of 16 under a float8 E4M3 scale and one float32 scale of the whole matrix. MXFP4: groups of 32 under a
power of two (OCP Microscaling Formats v1.0).
"""

from __future__ import annotations

import numpy as np

from penstock.kernels.canonical import Blocks, Codebook
from penstock.quant.formats import mxfp4
from penstock.quant.formats.record import Bytes, Floats
from penstock.quant.methods.bits import unpack
from penstock.quant.methods.record import Matrix

E2M1: Floats = mxfp4.E2M1_DOUBLED / np.float32(2)
NVFP4_GROUP = 16


def nvfp4_matrix(matrix: Matrix, packed: Bytes, scales: Floats) -> Codebook:
    """Codes [N, K / 2] with scales [N, K / 16], the whole matrix's among them."""
    return Codebook(unpack(packed.reshape(matrix.shape[0], -1), 4), E2M1, NVFP4_GROUP, scales)


def nvfp4_groups(matrix: Matrix, suffix: str) -> tuple[int, int]:
    """Shape of the scales.

    Raises:
        CheckpointError: groups do not divide the row.
    """
    rows, inputs = matrix.shape
    if inputs % NVFP4_GROUP:
        raise matrix.error(suffix, f"scales rows of {inputs} inputs, which groups of {NVFP4_GROUP} do not divide")
    return rows, inputs // NVFP4_GROUP


def nvfp4_stored(matrix: Matrix, packed: str, whole: str, *, divide: bool) -> Codebook:
    """Bytes `packed`, float8 `.weight_scale` and the whole matrix's scale, which multiplies or divides them.

    Raises:
        CheckpointError: their shapes do not belong together, a scale is no number, or a divisor is zero.
    """
    rows, inputs = matrix.shape
    scales, factor = (
        matrix.floats(".weight_scale", nvfp4_groups(matrix, ".weight_scale")),
        matrix.floats(whole, (1,))[0],
    )
    if divide and factor == 0:
        raise matrix.error(whole, "is zero, and scales are divided by it")
    data = matrix.array(packed, "u8", (rows, inputs // 2))
    return nvfp4_matrix(matrix, data, scales / factor if divide else scales * factor)


def mxfp4_matrix(matrix: Matrix, packed: str, scale: str) -> Blocks:
    """Bytes `packed` of any integer type, K / 2 a row, and E8M0 scales [N, K / 32] → MXFP4 blocks.

    Raises:
        CheckpointError: their sizes do not belong together, or a scale is NaN.
    """
    rows, inputs = matrix.shape
    groups, odd = divmod(inputs, mxfp4.BLOCK_VALUES)
    scales, data = matrix.array(scale, "u8"), matrix.tensors[packed].data
    if odd or scales.size != rows * groups or scales.shape[-1] != groups or data.size * 2 != rows * inputs:
        raise matrix.error(scale, f"has shape {list(scales.shape)} where {rows} rows of {inputs} inputs are needed")
    if (scales == 0xFF).any():
        raise matrix.error(scale, "holds NaN among its scales")
    blocks = mxfp4.to_gguf_blocks(data.reshape(rows, groups, mxfp4.PACKED_BYTES), scales.reshape(rows, groups))
    return Blocks("mxfp4", matrix.shape, blocks.reshape(-1))
