"""Which block format each tensor of a GGUF file gets under a recipe such as Q4_K_M. No torch here.

A recipe is a base format and exceptions for the tensors that lose most: the output layer, attention values and the
second feed-forward matrix of some layers. The exceptions are those under which ggml's `llama-quantize` writes files of
the same name, so that equal names mean equal sizes and comparable quality.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.quant.encode import fallback
from penstock.quant.formats import FORMATS

_LAYER = re.compile(r"blk\.(\d+)\.")
_MIXED = re.compile(r"(q\d_k)_[sml]")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight")  # small, and all else depends on them
# recipe → format of the attention output, in models with and without eight experts
_ATTENTION_OUTPUT: Mapping[str, str] = MappingProxyType({"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"})
_EIGHT_EXPERTS_OUTPUT = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the exceptions depend on.

    Attributes:
        layers: blocks of the model.
        experts: experts of a layer; 0 for a dense model.
        query_groups: query heads that share one key-value head.
        tied: the embedding is the output layer too.
        has_importance: an importance matrix is at hand.
    """

    layers: int
    experts: int
    query_groups: int
    tied: bool
    has_importance: bool = False


def base_format(recipe: str) -> str:
    """The block format most tensors get: "q4_k" of "q4_k_m"."""
    mixed = _MIXED.fullmatch(recipe)
    return mixed[1] if mixed else recipe


def tensor_format(recipe: str, name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[str, str | None]:
    """The format of one tensor.

    Args:
        recipe: a key of `config.quantisation.GGUF_FILE_TYPES`.
        name: the tensor's name in the GGUF file.
        shape: slowest axis first.
        model: facts of the whole model.

    Returns:
        The format, and what the recipe asked for where the rows do not divide into its blocks (else None).
    """
    if len(shape) < 2 or not name.endswith(".weight") or name.endswith(_KEPT):
        return "f32", None
    if recipe in ("f32", "f16", "bf16"):
        return recipe, None
    wanted = _wanted(recipe, name, shape, model)
    found = fallback(wanted, shape[-1])
    return found, None if found == wanted else wanted


def _wanted(recipe: str, name: str, shape: tuple[int, ...], model: ModelShape) -> str:
    base = base_format(recipe)
    if name == "output.weight" or (name == "token_embd.weight" and model.tied):
        divides = shape[-1] % FORMATS[base].block_size == 0
        return "q6_k" if divides and recipe not in ("q8_0", "mxfp4") else "q8_0"
    if recipe == "mxfp4":
        is_mxfp4 = len(shape) > 2 if model.experts else name != "token_embd.weight"
        return "mxfp4" if is_mxfp4 else "q8_0"
    if name == "token_embd.weight":
        return "q4_k" if recipe in ("tq1_0", "tq2_0") else base
    match = _LAYER.match(name)
    layer = int(match[1]) if match else 0
    if "attn_v." in name:
        return _attention_value(recipe, base, layer, model)
    if "attn_k." in name and model.experts == 8:
        return "q8_0"
    if "ffn_down" in name:
        return _feed_forward_down(recipe, base, layer, model)
    if "attn_output." in name:
        if model.experts == 8:
            return "q5_k" if recipe in _EIGHT_EXPERTS_OUTPUT else base
        return _ATTENTION_OUTPUT.get(recipe, base)
    return base


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _attention_value(recipe: str, base: str, layer: int, model: ModelShape) -> str:
    shared = model.query_groups >= 4
    found = base
    if recipe == "q2_k":
        found = "q4_k" if shared else "q3_k"
    elif recipe == "q3_k_m":
        found = "q5_k" if layer < 2 else "q4_k"
    elif recipe == "q3_k_l" or (base in ("iq4_nl", "iq4_xs") and shared) or (recipe == "q4_k_s" and layer < 4):
        found = "q5_k"
    elif recipe in ("q4_k_m", "q5_k_m") and _more_bits(layer, model.layers):
        found = "q6_k"
    if model.layers == 80 and model.query_groups == 8 and found in ("q3_k", "q4_k"):
        found = "q5_k"
    return "q8_0" if model.experts == 8 else found


def _feed_forward_down(recipe: str, base: str, layer: int, model: ModelShape) -> str:
    first = layer < model.layers // 8
    if recipe == "q2_k":
        return "q3_k"
    if recipe == "q3_k_m":
        return "q5_k" if layer < model.layers // 16 else "q4_k"
    if recipe == "q3_k_l":
        return "q5_k"
    if recipe in ("q4_k_m", "q5_k_m") and _more_bits(layer, model.layers):
        return "q6_k"
    if first and (recipe == "q4_k_s" or (base in ("iq4_nl", "iq4_xs") and not model.has_importance)):
        return "q5_k"
    if first and model.has_importance and recipe in ("q4_0", "q5_0"):
        return recipe[:-1] + "1"
    return base
