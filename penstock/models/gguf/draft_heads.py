"""EAGLE-3 heads in GGUF files: what llama.cpp's converter makes of them, read as the folder they were made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError, quoted
from penstock.models.gguf.metadata import Keys, Tensors

NAMES = MappingProxyType({"attn_norm_2": "hidden_norm"})
TOP_NAMES = MappingProxyType({"fc": "fc", "enc.output_norm": "input_norm"})
EAGLE3 = "eagle3"
_MOST_LAYERS = 64  # of the target that are read


def eagle3(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Fields of the head's config.json.

    Raises:
        CheckpointError: the file does not tell which of the target's layers it reads.
    """
    layers = keys.values.get(f"{keys.arch}.target_layers")
    if (
        not isinstance(layers, list)
        or not 0 < len(layers) <= _MOST_LAYERS
        or any(type(one) is not int for one in layers)
    ):
        raise CheckpointError(
            f"metadata key {keys.arch}.target_layers is {quoted(str(layers), 40)}; the numbers of the target's layers "
            "whose inputs the head reads are needed."
        )
    ids = tensors.get("d2t")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "intermediate_size": keys.integer("feed_forward_length"),
        "vocab_size": keys.integer("vocab_size"),
        **({} if ids is None or not ids.shape else {"draft_vocab_size": ids.shape[0]}),
        "target_hidden_size": keys.integer("target_hidden_size", keys.integer("embedding_length")),
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": bool(keys.flag("norm_before_residual")),
        "norm_before_fc": bool(keys.flag("norm_before_fc")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


BUILDERS: Mapping[str, Callable[[Keys, Tensors], dict[str, Any]]] = MappingProxyType({EAGLE3: eagle3})
