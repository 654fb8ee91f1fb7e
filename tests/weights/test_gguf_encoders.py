"""A GGUF file of an encoder computes what the Hugging Face model it was made from does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from penstock.config.errors import CheckpointError
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.weights.open import open_checkpoint
from penstock.weights.pooling import Pooling, read_pooling
from tests.engine.test_pooling import engine, pooled
from tests.models import encoders, tiny
from tests.weights.test_gguf_logits import metadata as decoder_metadata
from tests.weights.test_gguf_logits import tensors as decoder_tensors

ARCHES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "roberta": gguf.MODEL_ARCH.BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "distilbert": gguf.MODEL_ARCH.BERT,
    "eurobert": gguf.MODEL_ARCH.EUROBERT,
    "nomic-bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "modernbert-biases": gguf.MODEL_ARCH.MODERN_BERT,
    "gemma-embedding": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
# What a GGUF file says by convention.
CONVENTIONAL: dict[str, dict[str, Any]] = {
    "distilbert": {"activation": "gelu"},
    "modernbert-biases": {"layer_types": None},
    "gemma-embedding": {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 10},
}
PROMPTS = [encoders.prompt(length, seed=length) for length in (1, 9, 40)]


def metadata(name: str, config: Any, pooling: gguf.PoolingType) -> dict[str, Any]:
    """As converters to GGUF write it."""
    pairs: dict[str, Any] = {
        "context_length": config.max_position_embeddings - (config.pad_token_id + 1 if "roberta" in name else 0),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.hidden_dim if name == "distilbert" else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.causal": False,
        "pooling_type": int(pooling),
    }
    rope = getattr(config, "rope_parameters", None) or {}
    if name.startswith("modernbert"):
        pairs |= {"attention.sliding_window": config.local_attention, "rope.scaling.type": "none"}
    if name.startswith("gemma"):
        pairs |= {"attention.sliding_window": encoders.GEMMA["sliding_window"], "attention.head_count_kv": 2}
        pairs |= {"attention.key_length": 10, "attention.value_length": 10}
    if hasattr(config, "rms_norm_eps"):
        pairs["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    else:
        pairs["attention.layer_norm_epsilon"] = getattr(config, "layer_norm_eps", getattr(config, "norm_eps", 1e-12))
    if name == "eurobert":
        pairs["attention.head_count_kv"] = config.num_key_value_heads
    if "full_attention" in rope:
        pairs["rope.freq_base"] = rope["full_attention"]["rope_theta"]
    elif rope:
        pairs["rope.freq_base"] = rope["rope_theta"]
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    return {f"{arch}.{key}": value for key, value in pairs.items()}


def tensors(name: str, model: Any) -> dict[str, np.ndarray]:
    """The model's tensors as converters lay them out."""
    table = gguf.get_tensor_name_map(ARCHES[name], model.config.num_hidden_layers)
    stored: dict[str, np.ndarray] = {}
    state = {key: tensor.numpy() for key, tensor in model.state_dict().items() if "position_ids" not in key}
    for key, array in published(name, state).items():
        if key == "embeddings.position_embeddings.weight" and "roberta" in name:
            array = array[model.config.pad_token_id + 1 :]
        renamed = table.get_name(key, (".weight", ".bias"))
        assert renamed is not None, key
        if name.startswith("gemma") and "norm" in key:
            array = array + 1
        stored[renamed] = np.ascontiguousarray(array)
    return stored


def published(name: str, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors under the names of the published files, less those that converters leave out."""
    found: dict[str, np.ndarray] = {}
    for key, array in state.items():
        key = key.removeprefix("roberta.").removeprefix("bert.")
        if key.startswith("pooler."):
            continue
        if name.startswith("modernbert"):
            key = key.removeprefix("model.")
            key = key.replace("classifier.", "classifier.out_proj.") if key.startswith("classifier.") else key
        if name.startswith(("gemma", "eurobert")):
            key = f"model.{key}"
        if name == "nomic-bert":
            key = key.replace("embeddings.LayerNorm", "emb_ln")
            key = key.replace("post_attention_layernorm", "norm1").replace("post_mlp_layernorm", "norm2")
            key = key.replace("up_proj", "fc11").replace("gate_proj", "fc12").replace("down_proj", "fc2")
            key = key.replace("self_attn.o_proj", "attn.out_proj")
            key = f"encoder.{key}" if key.startswith("layers.") else key
        found[key] = array
    if name == "nomic-bert":
        for layer in range(3):
            parts = [found.pop(f"encoder.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
            found[f"encoder.layers.{layer}.attn.Wqkv.weight"] = np.concatenate(parts)
    return found


def pooling_of(file: Path) -> Pooling:
    return read_pooling(open_checkpoint(file), {"no": 7, "yes": 9}.get)


@pytest.mark.parametrize("name", ARCHES)
def test_states(name: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    model = encoders.make(name, **CONVENTIONAL.get(name, {}))
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    pairs = metadata(name, model.config, gguf.PoolingType.CLS)
    file = write_gguf(tmp_path / "model.gguf", arch, pairs, tensors(name, model))
    assert pooling_of(file).kind is PoolingKind.CLS
    used = engine(file, max_model_len=None)
    for prompt, result in zip(PROMPTS, pooled(used, PROMPTS, PoolingParams(PoolingKind.ALL)), strict=True):
        theirs = encoders.reference(model, name, prompt)
        assert tiny.distance(torch.tensor(result).view(theirs.shape), theirs) < 1e-4


@pytest.mark.parametrize("name", ["xlm-roberta", "modernbert"])
def test_rerankers(name: str, tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    extra = {"classifier_pooling": "mean"} if name == "modernbert" else {}
    model = encoders.make(name, "ForSequenceClassification", num_labels=1, **extra)
    arch = gguf.MODEL_ARCH_NAMES[ARCHES[name]]
    pairs = metadata(name, model.config, gguf.PoolingType.RANK)
    file = write_gguf(tmp_path / "model.gguf", arch, pairs, tensors(name, model))
    found = pooling_of(file)
    params = found.ranking()
    assert params is not None and (len(found.labels), params.activation) == (1, "sigmoid")
    used = engine(file, max_model_len=None)
    for prompt, (score,) in zip(PROMPTS, pooled(used, PROMPTS, params), strict=True):
        with torch.no_grad():
            theirs = model(**encoders.inputs(name, prompt)).logits[0, 0].sigmoid()
        assert score == pytest.approx(float(theirs), rel=1e-4, abs=1e-6)


def test_dense_layers(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    name = "gemma-embedding"
    model = encoders.make(name, **CONVENTIONAL[name])
    pairs = metadata(name, model.config, gguf.PoolingType.MEAN)
    pairs |= {f"{name}.dense_2_feat_in": 36, f"{name}.dense_2_feat_out": 60}
    pairs |= {f"{name}.dense_3_feat_in": 60, f"{name}.dense_3_feat_out": 24}
    torch.manual_seed(3)
    first, second = torch.randn(60, 36) / 6, torch.randn(24, 60) / 8
    dense = {"dense_2.weight": first.numpy(), "dense_3.weight": second.numpy()}
    file = write_gguf(tmp_path / "model.gguf", name, pairs, tensors(name, model) | dense)
    found = pooling_of(file)
    assert (found.kind, found.normalize, found.size) == (PoolingKind.MEAN, True, 24)
    used = engine(file, max_model_len=None)
    for prompt, result in zip(PROMPTS, pooled(used, PROMPTS, found.embedding()), strict=True):
        theirs = second @ (first @ encoders.reference(model, name, prompt).mean(0))
        torch.testing.assert_close(torch.tensor(result), theirs / theirs.norm(), rtol=1e-4, atol=1e-5)


def test_a_reranker_without_its_pooler_is_refused(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    model = encoders.make("bert", "ForSequenceClassification", num_labels=1)
    stored = tensors("bert", model)
    stored["cls.output.weight"], stored["cls.output.bias"] = stored.pop("cls.weight"), stored.pop("cls.bias")
    pairs = metadata("bert", model.config, gguf.PoolingType.RANK)
    file = write_gguf(tmp_path / "model.gguf", "bert", pairs, stored)
    with pytest.raises(CheckpointError, match="without the pooler"):
        open_checkpoint(file)


def test_a_file_without_token_types_is_refused(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    model = encoders.make("nomic-bert")
    stored = tensors("nomic-bert", model)
    del stored["token_types.weight"]
    pairs = metadata("nomic-bert", model.config, gguf.PoolingType.MEAN)
    with pytest.raises(CheckpointError, match=r"no matrix token_types.weight"):
        open_checkpoint(write_gguf(tmp_path / "model.gguf", "nomic-bert", pairs, stored))


def test_qwen3_rerankers(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    """Their classifier is two rows of the embedding; what counts is how likely yes is."""
    model = tiny.make("qwen3")
    stored = decoder_tensors("qwen3", model)
    stored["cls.output.weight"] = stored["output.weight"][[9, 7]]
    pairs = decoder_metadata("qwen3", model.config)
    pairs |= {"qwen3.pooling_type": int(gguf.PoolingType.RANK), "qwen3.classifier.output_labels": ["yes", "no"]}
    file = write_gguf(tmp_path / "model.gguf", "qwen3", pairs, stored)
    found = pooling_of(file)
    params = found.ranking()
    assert params is not None and params.choices == (7, 9) and found.pair_prompt is not None
    for prompt, result in zip(PROMPTS, pooled(engine(file), PROMPTS, params), strict=True):
        theirs = tiny.reference_logits(model, prompt)[-1][[7, 9]].softmax(0)
        torch.testing.assert_close(torch.tensor(result), theirs, rtol=1e-3, atol=1e-5)
