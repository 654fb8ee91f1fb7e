"""Tiny random encoders of every family, made by transformers, and the hidden states it computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
GEMMA = {"num_key_value_heads": 2, "head_dim": 10, "sliding_window": 14, "use_bidirectional_attention": True}
SLIDING = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

OWN_NAMES = ("vocab_size", "max_position_embeddings", "pad_token_id", "initializer_range")  # all that DistilBERT shares

# name → (architecture without "Model", fields that differ from SIZES)
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {}),
    "bert-relu": ("Bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3}),
    "roberta": ("Roberta", {"max_position_embeddings": 131, "pad_token_id": 2}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1, "max_position_embeddings": 130, "pad_token_id": 1}),
    "modernbert": ("ModernBert", {"num_hidden_layers": 4, "local_attention": 14}),
    "modernbert-biases": (
        "ModernBert",
        {
            "num_hidden_layers": 4,
            "local_attention": 11,
            "layer_types": SLIDING,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
        },
    ),
    "distilbert": ("DistilBert", {"dim": 36, "hidden_dim": 44, "n_layers": 3, "n_heads": 6, "activation": "relu"}),
    "eurobert": ("EuroBert", {"num_key_value_heads": 2}),
    "eurobert-mean": ("EuroBert", {"num_key_value_heads": 2, "classifier_pooling": "mean"}),
    "nomic-bert": ("NomicBert", {}),
    "gte": ("Gte", {}),
    "gte-untyped": ("Gte", {"type_vocab_size": 0, "hidden_act": "relu"}),
    "jina-v3": ("JinaEmbeddingsV3", {}),
    "gemma-embedding": ("Gemma3Text", {**GEMMA, "layer_types": SLIDING[1:], "query_pre_attn_scalar": 17}),
}
CLASSIFIERS = [name for name in ENCODERS if name not in ("bert-relu", "eurobert")]


def config_of(name: str, **fields: Any) -> transformers.PretrainedConfig:
    architecture, special = ENCODERS[name]
    shared = {name: value for name, value in SIZES.items() if architecture != "DistilBert" or name in OWN_NAMES}
    config = getattr(transformers, f"{architecture}Config")(**{**shared, **special, **fields})
    config._attn_implementation = "eager"
    return config


def make(name: str, head: str = "Model", **fields: Any) -> transformers.PreTrainedModel:
    """A random model with `head` (as architectures end), whose weights are large enough that every part matters."""
    torch.manual_seed(0)
    model = getattr(transformers, ENCODERS[name][0] + head)(config_of(name, **fields)).eval()
    gemma = name.startswith("gemma")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            norm = "norm" in key.lower()
            parameter.normal_(0.0, 0.3 if norm or "bias" in key else 1.5 * parameter.shape[-1] ** -0.5)
            if norm and key.endswith("weight") and not gemma:
                parameter += 1.0
    return model


def save(name: str, folder: Path, head: str = "Model", **fields: Any) -> transformers.PreTrainedModel:
    """The same, saved as a checkpoint folder."""
    model = make(name, head, **fields)
    model.save_pretrained(folder)
    return model


def has_types(name: str) -> bool:
    """Whether the model tells the texts of a pair apart."""
    return getattr(config_of(name), "type_vocab_size", 1) > 1


def inputs(name: str, tokens: Sequence[int], second: int = 0) -> dict[str, Tensor]:
    """What transformers' model takes of a prompt whose second text begins at `second`."""
    given = {"input_ids": torch.tensor([list(tokens)])}
    if second and has_types(name):
        given["token_type_ids"] = (torch.arange(len(tokens)) >= second).long()[None]
    return given


def reference(model: transformers.PreTrainedModel, name: str, tokens: Sequence[int], second: int = 0) -> Tensor:
    """transformers' final hidden states of a prompt, [tokens, hidden_size]."""
    with torch.no_grad():
        return model(**inputs(name, tokens, second)).last_hidden_state[0].float()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=generator).tolist()
