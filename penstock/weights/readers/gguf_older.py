"""GGUF metadata of families with learned positions or ALiBi, and of Falcon → config.json; their fused projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.quant.formats.record import Bytes
from penstock.quant.tensor import TensorInfo
from penstock.weights.readers.files import shown
from penstock.weights.readers.gguf_file import GgufTensor
from penstock.weights.readers.gguf_keys import Keys

Tensors = Mapping[str, GgufTensor]


def _gpt2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}


def _starcoder(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    shared = keys.integer("attention.head_count_kv", 1) == 1
    return {"architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "multi_query": shared}


def _bloom(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}


def _mpt(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    clip = keys.number("attention.clamp_kqv") if keys.has("attention.clamp_kqv") else None
    steepest = keys.number("attention.max_alibi_bias")
    attention = {"alibi": True, "alibi_bias_max": steepest, "clip_qkv": clip}
    return {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "attn_config": attention}


def _falcon(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Two norms a layer are those of 40B; more keys than one, those of every later model."""
    two = "blk.0.attn_norm_2.weight" in tensors
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": two or keys.integer("attention.head_count_kv") > 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
    }


def _sized(build: Callable[[Keys, Tensors], dict[str, Any]]) -> Callable[[Keys, Tensors], dict[str, Any]]:
    def whole(keys: Keys, tensors: Tensors) -> dict[str, Any]:
        return {"intermediate_size": keys.integer("feed_forward_length"), "hidden_act": None, **build(keys, tensors)}

    return whole


OLDER_BUILDERS: Mapping[str, Callable[[Keys, Tensors], dict[str, Any]]] = MappingProxyType(
    {
        "gpt2": _sized(_gpt2),
        "starcoder": _sized(_starcoder),
        "bloom": _sized(_bloom),
        "mpt": _sized(_mpt),
        "falcon": _sized(_falcon),
    }
)
_TOP = {"output_norm": "model.norm"}
OLDER_TOP_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": _TOP | {"position_embd": "model.wpe"},
        "starcoder": _TOP | {"position_embd": "model.wpe"},
        "bloom": _TOP | {"token_embd_norm": "model.word_embeddings_layernorm"},
        "mpt": _TOP,
        "falcon": _TOP,
    }
)
FALCON_TWO_NORMS = MappingProxyType({"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})


def split_projection(
    layer: str, suffix: str, tensor: GgufTensor, config: Mapping[str, Any], load: Callable[[GgufTensor], Bytes]
) -> Iterator[tuple[TensorInfo, Callable[[], Bytes]]]:
    """All queries, all keys, all values of a fused projection, as tensors of their own and how each is read.

    Raises:
        CheckpointError: its rows are not those of the heads.
    """
    size = config["head_dim"]
    shared = config.get("multi_query", config["model_type"] == "falcon") and not config.get("new_decoder_architecture")
    kv_heads = 1 if shared else config["num_key_value_heads"]
    counts = {"q": config["num_attention_heads"] * size, "k": kv_heads * size, "v": kv_heads * size}
    rows = sum(counts.values())
    if tensor.shape[0] != rows:
        raise CheckpointError(f"tensor {shown(tensor.name)} has {tensor.shape[0]} rows; {rows} are needed.")
    each, begin = tensor.data.size // rows, 0
    for part, count in counts.items():
        start, end = begin * each, (begin + count) * each
        info = TensorInfo(
            f"model.layers.{layer}.self_attn.{part}_proj.{suffix}",
            (count, *tensor.shape[1:]),
            tensor.format,
            count * each,
        )
        yield info, lambda start=start, end=end: load(tensor)[start:end]  # type: ignore[misc]
        begin += count
