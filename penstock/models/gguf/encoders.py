"""GGUF metadata of encoders → their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.models.gguf.metadata import MAX_LAYERS, Keys, Tensors

_RANK = 4  # pooling_type of models that score pairs


def _bert(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """BERT; DistilBERT, which has no token types; RoBERTa, whose positions are stored from the first used one on."""
    own: dict[str, Any] = {
        "intermediate_size": keys.integer("feed_forward_length"),
        "hidden_act": "gelu",
        "type_vocab_size": _rows(tensors, "token_types.weight") if "token_types.weight" in tensors else 0,
    }
    if not _ranks(keys, tensors):
        return {"architectures": ["BertModel"], "model_type": "bert", **own}
    if "cls.weight" not in tensors:
        raise CheckpointError(
            "the file has a classifier (cls.output) without the pooler it was trained on, which its converter left "
            "out; take the model's safetensors."
        )
    return {
        "architectures": ["RobertaForSequenceClassification"],
        "model_type": "roberta",
        "pad_token_id": -1,
        **_labels(keys, tensors),
        **own,
    }


def _eurobert(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {
        "architectures": ["EuroBertModel"],
        "model_type": "eurobert",
        "intermediate_size": keys.integer("feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _nomic_bert(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "intermediate_size": keys.integer("feed_forward_length"),
        "type_vocab_size": _rows(tensors, "token_types.weight"),
        "rope_theta": keys.number("rope.freq_base", 1000.0),
    }


def _modern_bert(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    own: dict[str, Any] = {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "intermediate_size": keys.integer("feed_forward_length"),
        "local_attention": keys.integer("attention.sliding_window"),
        "global_attn_every_n_layers": keys.integer("attention.sliding_window_pattern", 3, most=MAX_LAYERS),
        "rope_theta": None,
        "global_rope_theta": keys.number("rope.freq_base", 160_000.0),
        "local_rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
        "norm_bias": "token_embd_norm.bias" in tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if _ranks(keys, tensors):
        own |= {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"}
        own |= {"classifier_bias": "cls.bias" in tensors, **_labels(keys, tensors)}
    return own


def gemma_embedding(gemma3: Mapping[str, Any], keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Gemma 3's configuration with what EmbeddingGemma has besides."""
    dense = [
        {
            "name": f"{number}_Dense",
            "inputs": keys.integer(f"dense_{number}_feat_in"),
            "outputs": keys.integer(f"dense_{number}_feat_out"),
            "bias": False,
            "activation": "Identity",
        }
        for number in (2, 3)
        if f"dense_{number}.weight" in tensors
    ]
    own = {**gemma3, "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True}
    return own | ({"dense_layers": dense} if dense else {})


def _rows(tensors: Tensors, name: str) -> int:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise CheckpointError(f"the file has no matrix {name}; download it again.")
    return tensors[name].shape[0]


def _ranks(keys: Keys, tensors: Tensors) -> bool:
    return (
        keys.has("pooling_type") and keys.integer("pooling_type", least=0) == _RANK and "cls.output.weight" in tensors
    )


def _labels(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """`id2label`, or only how many labels there are."""
    count = _rows(tensors, "cls.output.weight")
    names = keys.values.get(f"{keys.arch}.classifier.output_labels")
    if isinstance(names, list) and len(names) == count:
        return {"id2label": {str(index): str(name) for index, name in enumerate(names)}}
    return {"num_labels": count}


ENCODER_BUILDERS: Mapping[str, Callable[[Keys, Tensors], dict[str, Any]]] = MappingProxyType(
    {"bert": _bert, "eurobert": _eurobert, "nomic-bert": _nomic_bert, "modern-bert": _modern_bert}
)
