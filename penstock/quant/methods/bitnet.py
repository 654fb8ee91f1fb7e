"""BitNet b1.58 checkpoints (Ma et al., arXiv:2402.17764) as transformers packs them: `weight` uint8 [N / 4, K].

Bits 2i and 2i + 1 of a byte hold the ternary value, plus one, of row r + i · N / 4. `weight_scale` is one number, which
"bitlinear" layers divide by and "autobitlinear" layers multiply with. The published layers round activations to eight
bits as well; weights are used as they are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from penstock.kernels.canonical import Affine
from penstock.quant.methods.record import Layout, Matrix, Method, packed_values, unsupported


def _decode(matrix: Matrix, *, divided: bool) -> Affine:
    outputs, inputs = matrix.shape
    if outputs % 4:
        raise matrix.error(".weight", f"packs four rows a byte, which do not divide {outputs} rows")
    packed = matrix.array(".weight", "u8", (outputs // 4, inputs))
    codes = np.concatenate([(packed >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)])
    scale = matrix.floats(".weight_scale", (1,))[0]
    if divided and scale == 0:
        raise matrix.error(".weight_scale", "is zero, and weights are divided by it")
    step = np.float32(1) / scale if divided else scale
    return Affine(codes, 2, inputs, np.full((outputs, 1), step, dtype=np.float32), zero=1)


def bitnet(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: weights that are quantised only while running, or layers with norms of their own.
    """
    kind, mode = config.get("linear_class", "bitlinear"), config.get("quantization_mode", "offline")
    if kind not in ("bitlinear", "autobitlinear") or mode != "offline" or config.get("use_rms_norm"):
        raise unsupported(
            f"linear_class {kind!r}, quantization_mode {mode!r}, use_rms_norm {config.get('use_rms_norm')!r}",
            ("bitlinear or autobitlinear", "offline", "false"),
        )
    decode = partial(_decode, divided=kind == "bitlinear")
    return Method("bitnet", (Layout((".weight", ".weight_scale"), decode, packed_values(".weight", 2)),))
