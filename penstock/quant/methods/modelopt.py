"""Checkpoints of NVIDIA's Model Optimizer: FP8 (one scale, or one a block) and NVFP4.

NVFP4: `weight` uint8 [N, K / 2], `weight_scale` float8 [N, K / 16], `weight_scale_2` one float32: w = value · scale ·
scale_2. Scales of activations and of the KV cache belong to other arithmetic and are left aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from penstock.quant.methods.float4 import nvfp4_stored
from penstock.quant.methods.fp8 import ACTIVATION_SCALES, float_layout
from penstock.quant.methods.record import Layout, Method, packed_values, unsupported

_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PB_REAL_QUANT", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def modelopt(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`, or of the `quantization` in hf_quant_config.json.

    Raises:
        CheckpointError: an algorithm that cannot be read.
    """
    algorithm = config.get("quant_algo", "NVFP4")
    if algorithm not in _ALGORITHMS:
        raise unsupported(f"quant_algo {algorithm!r}", _ALGORITHMS)
    decode = partial(nvfp4_stored, packed=".weight", whole=".weight_scale_2", divide=False)
    nvfp4 = Layout((".weight", ".weight_scale", ".weight_scale_2"), decode, packed_values(".weight", 4))
    return Method("modelopt", (nvfp4, float_layout(".weight_scale")), ACTIVATION_SCALES)
