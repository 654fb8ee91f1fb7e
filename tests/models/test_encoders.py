"""Every encoder agrees with transformers: whole prompts, pairs of texts, ragged batches, classification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.engine.build import build_engine
from penstock.evaluate.scoring import Scorer
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.registry import build_model
from penstock.runtime.executor import EagerExecutor
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.engine.test_pooling import engine, pooled, reduced
from tests.models import encoders
from tests.models.harness import load

TOLERANCE = 1e-4
LENGTHS = (1, 5, 23, 40, 64)
PROMPTS = [encoders.prompt(length, seed=length) for length in LENGTHS]


def close(ours: Sequence[float], theirs: torch.Tensor) -> None:
    found = torch.tensor(ours).view(theirs.shape)
    assert float((found - theirs).abs().max() / theirs.std()) < TOLERANCE
    assert torch.cosine_similarity(found.flatten(), theirs.flatten(), dim=0) >= 0.9999


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_states_of_mixed_batches(tmp_path: Path, name: str) -> None:
    model = encoders.save(name, tmp_path)
    for prompt, result in zip(PROMPTS, pooled(engine(tmp_path), PROMPTS, PoolingParams(PoolingKind.ALL)), strict=True):
        close(result, encoders.reference(model, name, prompt))


@pytest.mark.parametrize("kind", PoolingKind)
@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma-embedding"])
def test_a_batch_gives_the_bits_of_single_prompts(tmp_path: Path, name: str, kind: PoolingKind) -> None:
    model = encoders.save(name, tmp_path)
    params = PoolingParams(kind)
    used = engine(tmp_path)
    alone = [pooled(used, [prompt], params)[0] for prompt in PROMPTS]
    for prompt, result in zip(PROMPTS, alone, strict=True):
        close(result, reduced(encoders.reference(model, name, prompt), kind).view(len(result) // 36, 36))
    for options in ({}, {"max_num_batched_tokens": 64, "depth": 1}, {"kv_blocks": 6}, {"max_chunk_tokens": 7}):
        used = engine(tmp_path, **options)
        assert pooled(used, PROMPTS, params) == alone
        assert used.stats().prefix_hits == 0


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_steps_are_recorded(tmp_path: Path, name: str) -> None:
    encoders.save(name, tmp_path)
    _, info = build_engine(EngineOptions(model=str(tmp_path), kv_cache_dtype="float32", threads=1))
    settings = {note.name: note for note in info.settings}
    assert settings["step"].value == "recorded", settings["step"].reason
    assert info.max_model_len == 128


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_headers_and_model_agree(tmp_path: Path, name: str) -> None:
    """What is planned from the headers is what the model then needs."""
    encoders.save(name, tmp_path)
    facts, model = model_facts(open_checkpoint(tmp_path)), load(tmp_path)
    assert facts.whole_prompts and model.whole_prompts
    assert (facts.vocab_size, facts.context_length) == (model.vocab_size, model.max_positions)
    assert [layer.elements_per_token for layer in facts.layers] == [
        spec.elements_per_token for spec in model.cache_specs
    ]


@pytest.mark.parametrize("name", encoders.ENCODERS)
def test_recorded_steps_equal_their_layers_to_the_bit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders.save(name, tmp_path)
    params = PoolingParams(PoolingKind.ALL, second=1)
    recorded = pooled(engine(tmp_path), PROMPTS, params)
    by_layer = lambda model, caches, *_, **__: EagerExecutor(model, caches, "a test")  # noqa: E731
    monkeypatch.setattr("penstock.startup.build_runner.make_executor", by_layer)
    assert pooled(engine(tmp_path), PROMPTS, params) == recorded


@pytest.mark.parametrize("isa", ["generic", "auto"])
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_types_of_caches(tmp_path: Path, isa: str, kv_cache_dtype: str) -> None:
    model = encoders.save("modernbert", tmp_path)
    used = engine(tmp_path, kv_cache_dtype=kv_cache_dtype, isa=isa)
    (result,) = pooled(used, PROMPTS[3:4], PoolingParams(PoolingKind.MEAN))
    theirs = encoders.reference(model, "modernbert", PROMPTS[3]).mean(0)
    close_enough = 0.999 if kv_cache_dtype == "int8" else 0.9999
    assert torch.cosine_similarity(torch.tensor(result), theirs, dim=0) >= close_enough


@pytest.mark.parametrize("name", ["bert", "modernbert", "gemma-embedding"])
def test_bfloat16_checkpoints(tmp_path: Path, name: str) -> None:
    model = encoders.make(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    model = model.float()
    for prompt, result in zip(PROMPTS, pooled(engine(tmp_path), PROMPTS, PoolingParams(PoolingKind.MEAN)), strict=True):
        theirs = encoders.reference(model, name, prompt).mean(0)
        assert torch.cosine_similarity(torch.tensor(result), theirs, dim=0) >= 0.9999


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_layers_take_turns_in_one_memory(tmp_path: Path, name: str) -> None:
    """Those that slide in another than the others."""
    sizes = []
    for layers in (4, 7):
        model = encoders.save(name, tmp_path, num_hidden_layers=layers)
        used, info = build_engine(EngineOptions(model=str(tmp_path), max_model_len=64, kv_blocks=20, threads=1))
        sizes += [row.value for row in info.memory if row.name == "KV cache"]
        for prompt, result in zip(PROMPTS, pooled(used, PROMPTS, PoolingParams(PoolingKind.ALL)), strict=True):
            close(result, encoders.reference(model, name, prompt))
    assert len(sizes) == 2 and sizes[0] == sizes[1]


@pytest.mark.parametrize("second", [1, 17, 39])
def test_pairs_of_texts(tmp_path: Path, second: int) -> None:
    """Rows with and without a second text run together."""
    model = encoders.save("bert", tmp_path)
    used, prompt = engine(tmp_path), PROMPTS[3]
    (plain,) = pooled(used, [prompt], PoolingParams(PoolingKind.ALL))
    (pair,) = pooled(used, [prompt], PoolingParams(PoolingKind.ALL, second=second))
    close(plain, encoders.reference(model, "bert", prompt))
    close(pair, encoders.reference(model, "bert", prompt, second))
    assert pair != plain


@pytest.mark.parametrize("name", encoders.CLASSIFIERS)
def test_classifiers(tmp_path: Path, name: str) -> None:
    model = encoders.save(name, tmp_path, "ForSequenceClassification", num_labels=3)
    kinds = dict.fromkeys(("modernbert-biases", "eurobert-mean"), PoolingKind.MEAN) | {
        "gemma-embedding": PoolingKind.LAST
    }
    kind = kinds.get(name, PoolingKind.CLS)
    params = PoolingParams(kind, classify=True, second=2)
    for prompt, result in zip(PROMPTS[1:], pooled(engine(tmp_path), PROMPTS[1:], params), strict=True):
        with torch.no_grad():
            theirs = model(**encoders.inputs(name, prompt, 2)).logits[0]
        torch.testing.assert_close(torch.tensor(result), theirs, rtol=1e-4, atol=1e-4)


def test_models_with_a_masked_language_head_embed(tmp_path: Path) -> None:
    model = encoders.save("bert", tmp_path, "ForMaskedLM")
    (result,) = pooled(engine(tmp_path), PROMPTS[2:3], PoolingParams(PoolingKind.ALL))
    close(result, encoders.reference(model.bert, "bert", PROMPTS[2]))


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type is .*absolute"),
        ("BertModel", {"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ("BertModel", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("RobertaModel", {"pad_token_id": 64, "max_position_embeddings": 64}, "max_position_embeddings is 64"),
        ("NomicBertModel", {"moe_every_n_layers": 2}, "moe_every_n_layers is 2"),
        ("EuroBertForSequenceClassification", {}, "classifier_pooling is 'late'; allowed: bos, mean"),
        ("ModernBertModel", {"layer_types": ["full_attention"]}, "layer_types has 1"),
        ("ModernBertForSequenceClassification", {"classifier_activation": "relu"}, "classifier_activation is 'relu'"),
    ],
)
def test_refusals_name_the_field(name: str, fields: dict[str, Any], named: str) -> None:
    config = {**encoders.SIZES, "architectures": [name], **fields}
    with pytest.raises(CheckpointError, match=named):
        build_model(config, resolve_kernels(KernelContext("cpu", "float32")), dtype=torch.float32)


def test_a_step_holds_the_longest_prompt(tmp_path: Path) -> None:
    encoders.save("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 32.*64"):
        engine(tmp_path, max_num_batched_tokens=32)
    _, info = build_engine(EngineOptions(model=str(tmp_path), max_num_batched_tokens=32, threads=1))
    assert info.max_model_len == 32


def test_what_predicts_no_tokens_has_no_perplexity(tmp_path: Path) -> None:
    encoders.save("bert", tmp_path)
    with pytest.raises(ConfigError, match="embeds or classifies"):
        Scorer(EngineOptions(model=str(tmp_path)), 32)


def test_published_names_of_nomic_bert(tmp_path: Path) -> None:
    """Its files have GPT-2's names of sizes and names of their own for tensors."""
    model = encoders.save("nomic-bert", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for ours, theirs in (
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("intermediate_size", "n_inner"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
        ("layer_norm_eps", "layer_norm_epsilon"),
    ):
        config[theirs] = config.pop(ours)
    for name in ("rope_parameters", "head_dim", "hidden_act"):
        config.pop(name, None)
    config |= {"rotary_emb_base": 1000, "activation_function": "swiglu", "prenorm": False, "qkv_proj_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"emb_ln.weight", "encoder.layers.0.attn.Wqkv.weight", "encoder.layers.2.mlp.fc12.weight"} <= names, names
    (result,) = pooled(engine(tmp_path), PROMPTS[2:3], PoolingParams(PoolingKind.ALL))
    close(result, encoders.reference(model, "nomic-bert", PROMPTS[2]))
