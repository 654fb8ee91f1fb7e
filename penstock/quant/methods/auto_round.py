"""AutoRound checkpoints (Cheng et al., arXiv:2309.05516): packed as GPTQ or AWQ pack, or as compressed-tensors do.

Packings "auto_round" and "auto_round:gptqmodel" store GPTQ zero points as they are, "auto_round:auto_gptq" less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.quant.methods.awq import awq_method
from penstock.quant.methods.compressed_tensors import compressed_tensors
from penstock.quant.methods.gptq import gptq_method
from penstock.quant.methods.record import Method, unsupported

_RAW = ("auto_round", "auto_round:gptqmodel")
_LESS_ONE = ("auto", "auto_round:auto_gptq", "auto_round:gptq")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_COMPRESSED = "auto_round:llm_compressor"


def auto_round(config: Mapping[str, Any]) -> Method:
    """The method of a `quantization_config`.

    Raises:
        CheckpointError: a bit width or packing that cannot be read.
    """
    packing, bits = config.get("packing_format") or "auto", config.get("bits", 4)
    if packing in (*_RAW, *_LESS_ONE):
        return gptq_method("auto-round", bits, less_one=packing in _LESS_ONE)
    if packing in _AWQ:
        return awq_method("auto-round", bits, "gemm", config.get("group_size", 128))
    if packing == _COMPRESSED:
        return compressed_tensors(config)
    raise unsupported(f"packing_format {packing!r}", (*_RAW, *_LESS_ONE, *_AWQ, _COMPRESSED))
