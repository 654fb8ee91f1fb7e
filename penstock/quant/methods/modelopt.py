"""Checkpoints of NVIDIA's Model Optimizer: FP8 (one scale, or one a block) and NVFP4.

NVFP4: `weight` uint8 [N, K / 2], `weight_scale` float8 [N, K / 16], `weight_scale_2` one float32: w = value · scale ·
scale_2. Scales of activations and of the KV cache belong to other arithmetic and are left aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.kernels.canonical import Codebook
from penstock.quant.methods.float4 import nvfp4_groups, nvfp4_matrix
from penstock.quant.methods.fp8 import ACTIVATION_SCALES, float_layout
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values, unsupported

_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PB_REAL_QUANT", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def _nvfp4(matrix: Matrix) -> Codebook:
    packed = matrix.array(".weight", "u8", (matrix.shape[0], matrix.shape[1] // 2))
    scales = matrix.floats(".weight_scale", nvfp4_groups(matrix, ".weight_scale"))
    return nvfp4_matrix(matrix, packed, scales * matrix.floats(".weight_scale_2", (1,))[0])


def modelopt(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`, or of the `quantization` in hf_quant_config.json.

    Raises:
        CheckpointError: an algorithm that cannot be read.
    """
    algorithm = config.get("quant_algo", "NVFP4")
    if algorithm not in _ALGORITHMS:
        raise unsupported(f"quant_algo {algorithm!r}", _ALGORITHMS)
    nvfp4 = Layout((".weight", ".weight_scale", ".weight_scale_2"), _nvfp4, packed_values(".weight", 4))
    return Method("modelopt", (nvfp4, float_layout(".weight_scale")), ACTIVATION_SCALES)
