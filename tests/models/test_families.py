"""Every family agrees with transformers: whole prompts, chunks, decoding, and ragged batches in scattered blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.config.cache_spec import CacheKind, CacheSpec
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.models.defaults import MEMORYLESS_LAYERS, RECURRENT_LAYERS
from penstock.models.registry import Model, build_model
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint
from tests.models import tiny
from tests.models.harness import Harness, load

TOLERANCE = 3e-4  # of float32 with experts: both sides are up to 1.2e-4 from what float64 says, and machines differ
LENGTH = 43  # longer than every window and every original rope length in tests.models.tiny


def declared(config: dict[str, object]) -> Model:
    """A model of that configuration, without weights."""
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    return build_model(config, kernels, dtype=torch.float32)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, object]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = tiny.save(request.param, folder)
    return load(folder), theirs


def test_whole_prompt(pair):
    ours, theirs = pair
    tokens = tiny.prompt(LENGTH)
    logits = Harness(ours).step({"row": tokens})["row"]
    assert logits.dtype == torch.float32
    assert tiny.distance(logits, tiny.reference_logits(theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunks(pair, chunk):
    """A chunk of one is decoding token by token."""
    ours, theirs = pair
    tokens = tiny.prompt(LENGTH)
    harness = Harness(ours)
    parts = [harness.step({"row": tokens[start : start + chunk]})["row"] for start in range(0, LENGTH, chunk)]
    assert len(parts) == -(-LENGTH // chunk)
    assert tiny.distance(torch.cat(parts), tiny.reference_logits(theirs, tokens)) < TOLERANCE


def test_ragged_batch(pair):
    """Rows of different lengths enter, decode and are chunked together."""
    ours, theirs = pair
    texts = {f"row{index}": tiny.prompt(length, index) for index, length in enumerate((5, 43, 21, 12, 33))}
    spans = {
        "row0": [3, 1, 1],
        "row1": [10, 13, 1, 1, 18],
        "row2": [0, 21],
        "row3": [1, 1, 8, 2],
        "row4": [0, 0, 9, 1, 23],
    }
    harness = Harness(ours, seed=3)
    done = dict.fromkeys(texts, 0)
    parts = {row: [] for row in texts}
    for step in range(5):
        work = {}
        for row, lengths in spans.items():
            if step < len(lengths) and lengths[step]:
                work[row] = texts[row][done[row] : done[row] + lengths[step]]
                done[row] += lengths[step]
        for row, logits in harness.step(work).items():
            parts[row].append(logits)
    assert done == {row: len(tokens) for row, tokens in texts.items()}
    for row, tokens in texts.items():
        assert tiny.distance(torch.cat(parts[row]), tiny.reference_logits(theirs, tokens)) < TOLERANCE, row


def test_caches_follow_the_configuration(pair):
    ours, theirs = pair
    config = theirs.config
    assert ours.vocab_size == config.vocab_size
    if hasattr(config, "kv_lora_rank"):
        latent = CacheSpec(CacheKind.LATENT, 1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank)
        assert ours.cache_specs == (latent,) * config.num_hidden_layers
        return
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    sliding = ("MistralConfig", "MixtralConfig", "Phi3Config", "PhimoeConfig", "Starcoder2Config")
    if type(config).__name__ in sliding and config.sliding_window:
        types = ["sliding_attention"] * config.num_hidden_layers
    assert len(types) == config.num_hidden_layers
    types = [kind for kind in types if kind not in MEMORYLESS_LAYERS]
    if shared := getattr(config, "num_kv_shared_layers", 0):  # the last layers keep nothing
        types = types[:-shared]
    types = [kind for both in types for kind in (("full_attention", "mamba") if both == "hybrid" else (both,))]
    heads = next((spec.value_dim for spec in ours.cache_specs if not spec.state), 0)
    each = config.per_layer_config if type(config).__name__.startswith("Gemma4") else (config,) * len(types)
    for spec, kind, own in zip(ours.cache_specs, types, list(each)[: len(types)], strict=True):
        if kind in RECURRENT_LAYERS:
            assert spec.kind == CacheKind.STATE and all(size > 0 for shape in spec.state for size in shape)
            continue
        window = getattr(config, "attention_chunk_size" if kind == "chunked_attention" else "sliding_window", None)
        assert spec.kind == (CacheKind.FULL if kind == "full_attention" else CacheKind.SLIDING)
        assert spec.window == (None if kind == "full_attention" else window)
        kv_heads = getattr(config, "num_kv_heads", config.num_attention_heads)
        if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
            kv_heads = 1
        kv_heads = getattr(own, "num_key_value_heads", kv_heads)
        assert (spec.num_kv_heads, spec.key_dim) == (kv_heads, heads if own is config else own.head_dim)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_headers_say_what_the_model_keeps(name: str, tmp_path: Path) -> None:
    """What is planned from the headers is what the model then keeps, also where files do not list the layers' types."""
    tiny.save(name, tmp_path)
    file = tmp_path / "config.json"
    stated = json.loads(file.read_text())
    without = {key: value for key, value in stated.items() if key != "layer_types"}
    for config in (stated, stated if stated.get("num_kv_shared_layers") else without):
        file.write_text(json.dumps(config))
        facts, specs = model_facts(open_checkpoint(tmp_path)), declared(config).cache_specs
        planned = [(layer.elements_per_token, layer.window) for layer in facts.layers if layer.elements_per_token]
        assert planned == [(spec.elements_per_token, spec.window) for spec in specs if not spec.state]


@pytest.mark.parametrize(
    "name", ["llama-biases", "qwen3", "gemma3", "gemma3n", "gpt-oss", "mixtral", "qwen3_5", "mamba2"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision(name: str, dtype: torch.dtype, tmp_path: Path):
    """The logits change a little (a token in a hundred may meet another expert), never their kind."""
    theirs = tiny.save(name, tmp_path)
    tokens = tiny.prompt(LENGTH)
    expected = tiny.reference_logits(theirs, tokens)
    harness = Harness(load(tmp_path, dtype))
    logits = torch.cat([harness.step({"row": tokens[start : start + 11]})["row"] for start in range(0, LENGTH, 11)])
    assert logits.dtype == torch.float32
    error = (logits - expected).abs().mean() / expected.std()
    assert 0 < error < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_a_step_without_tokens(tmp_path: Path):
    """A step may have cache operations only."""
    tiny.save("qwen3", tmp_path)
    harness = Harness(load(tmp_path))
    harness.step({"row": [1, 2, 3]})
    assert harness.step({"row": []})["row"].shape == (0, 101)
