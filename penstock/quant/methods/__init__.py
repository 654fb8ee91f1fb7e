"""Quantised Hugging Face checkpoints: each method turns stored tensors into canonical matrices. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.quant.methods.gptq import gptq
from penstock.quant.methods.mxfp4 import mxfp4
from penstock.quant.methods.record import Layout, Matrix, Method
from penstock.quant.tensor import TensorInfo

__all__ = ["METHODS", "Layout", "Matrix", "Method", "checkpoint_method", "method_of"]

METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = MappingProxyType({"gptq": gptq, "mxfp4": mxfp4})


def method_of(quantization_config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Method:
    """The method that a `quantization_config` names.

    Args:
        quantization_config: as in config.json.
        tensors: the checkpoint's headers, which settle what the configuration leaves open.

    Raises:
        CheckpointError: an unknown method, or one of its settings that cannot be read.
    """
    name = quantization_config.get("quant_method")
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
        found = values.get("quantization_config")
        if found is not None and not isinstance(found, Mapping):
            raise CheckpointError(f"config.json: quantization_config is {str(found)[:80]!r}; an object is needed.")
        if found:
            return method_of(found, tensors)
    return Method("none")
