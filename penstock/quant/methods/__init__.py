"""Quantised Hugging Face checkpoints: each method turns stored tensors into canonical matrices. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.quant.methods.aqlm import aqlm
from penstock.quant.methods.auto_round import auto_round
from penstock.quant.methods.awq import awq
from penstock.quant.methods.bitnet import bitnet
from penstock.quant.methods.bitsandbytes import bitsandbytes
from penstock.quant.methods.compressed_tensors import compressed_tensors
from penstock.quant.methods.eetq import eetq
from penstock.quant.methods.exl2 import exl2
from penstock.quant.methods.exl3 import exl3
from penstock.quant.methods.fp8 import fbgemm_fp8, fp8
from penstock.quant.methods.gptq import gptq
from penstock.quant.methods.hqq import hqq
from penstock.quant.methods.mlx import metal, mlx
from penstock.quant.methods.modelopt import modelopt
from penstock.quant.methods.mxfp4 import mxfp4
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

__all__ = ["METHODS", "Layout", "Matrix", "Method", "checkpoint_method", "method_of"]

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = MappingProxyType(
    {
        "aqlm": aqlm,
        "auto-round": auto_round,
        "awq": awq,
        "bitnet": bitnet,
        "bitsandbytes": bitsandbytes,
        "compressed-tensors": compressed_tensors,
        "eetq": eetq,
        "exl2": exl2,
        "exl3": exl3,
        "fbgemm_fp8": fbgemm_fp8,
        "fp8": fp8,
        "gptq": gptq,
        "hqq": hqq,
        "metal": metal,
        "mlx": mlx,
        "modelopt": modelopt,
        "mxfp4": mxfp4,
    }
)
ALIASES: Mapping[str, str] = MappingProxyType({"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt"})


def method_of(quantization_config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Method:
    """The method that a `quantization_config` names; MLX writes bits and group_size alone.

    Args:
        quantization_config: as in config.json.
        tensors: the checkpoint's headers, which settle what the configuration leaves open.

    Raises:
        CheckpointError: an unknown method, or one of its settings that cannot be read.
    """
    name = quantization_config.get("quant_method")
    if name is None and {"bits", "group_size"} <= quantization_config.keys():
        packed = any(info.format == "u32" and tensor.endswith(".weight") for tensor, info in tensors.items())
        name = "mlx" if packed or not tensors else "gptq"
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    found = METHODS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(
            f"config.json: quantization_config.quant_method is {name!r}; supported: {', '.join(METHODS)}. "
            "Use the unquantised checkpoint or a GGUF file of the model."
        )
    return found(quantization_config)


def checkpoint_method(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Method:
    """The method of a whole config.json; one without layouts where the checkpoint is not quantised.

    Raises:
        CheckpointError: as `method_of`.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, Mapping) else {}):
        for name in ("quantization_config", "compression_config", "quantization"):
            found = values.get(name)
            if found is not None and not isinstance(found, Mapping):
                raise CheckpointError(f"config.json: {name} is {str(found)[:80]!r}; an object is needed.")
            if found:
                return method_of(found, tensors)
    return Method("none")
