"""Drafts, adapters, tiers and draws on the GPU: the answers of doing without, or the CPU's."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.config.adapters import AdapterUse
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.weights.adapters.open import adapter_digest

pytest.importorskip("transformers", reason="tiny models are made by transformers, which is not installed")
from tests.models import tiny, tiny_heads

DEADLINE_S = 60.0
LAYERS = 2
DRAFTERS: dict[str, dict[str, Any]] = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "lookahead": {"method": "lookahead", "max_ngram_size": 3},
    "self": {"method": "self", "layers": 1},
    "draft-model": {"method": "draft_model", "model": "{}/draft"},
    "eagle3": {"model": "{}/head"},
    "p-eagle": {"model": "{}/head"},
    "medusa": {"model": "{}/head"},
    "mtp": {"method": "mtp"},
}
SHORT = ("suffix", "eagle3")  # in the interpreter, where a step takes seconds
FEW = (3, 8, 10, 11, 60)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "biased": {"temperature": 0.9, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 4},
    "typical": {"temperature": 0.9, "typical_p": 0.7},
    "tail-free": {"temperature": 0.9, "tfs": 0.8},
    "dry": {"temperature": 0.8, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "mirostat": {"temperature": 1.0, "mirostat": 2},
    "xtc": {"temperature": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "words": {"temperature": 0.9, "bad_words_ids": ((5,), (9, 3))},
}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached: int = 0


def engine_of(folder: Path, device: str, **more: Any) -> Engine:
    given: dict[str, Any] = {
        "dtype": "float32", "kv_cache_dtype": "float32", "max_num_seqs": 6, "kv_blocks": 150, "block_size": 16,
        "pack_cache": "off", "max_num_batched_tokens": 48, "max_model_len": 128,
    } | more  # fmt: skip
    return build_engine(EngineOptions(model=str(folder), device=device, **given))[0]


def run(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Answer]:
    """All of them together; afterwards steps are recorded as graphs, and what is due is copied."""
    answers = {request.request_id: Answer() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for waited, refused in engine.adapters.ready():
            assert refused is None, refused
            engine.add(waited)
        for output in engine.step():
            assert output.error is None, output.error
            if output.request_id in answers:  # not what a tier loads from before
                answer = answers[output.request_id]
                answer.tokens += output.tokens
                answer.logprobs += output.logprobs
                answer.cached += output.cached_tokens or 0
    until = time.monotonic() + DEADLINE_S
    while engine.prepare() and time.monotonic() < until:
        if not engine.runner.prepare() and not engine.scheduler.cache.transfers.owed:
            break
    engine.scheduler.check_integrity()
    return answers


def asked(count: int, tokens: int, **more: Any) -> list[EngineRequest]:
    """Greedy and sampled, with few words, so that what is drafted is right now and then."""
    found = []
    for number in range(count):
        prompt = tuple(tiny.prompt(5 + 3 * (number % 3), number % 3) * 4)
        params = SamplingParams(
            max_tokens=tokens, temperature=0.8 * (number % 2), allowed_token_ids=FEW, logprobs=1, ignore_eos=True
        )
        found.append(EngineRequest(f"r{number}", prompt, params, seed=number, **more))
    return found


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_change_no_bit(device: str, name: str, tmp_path: Path) -> None:
    """With steps as they come and recorded, in turns and overlapping."""
    if device != "cuda" and name not in SHORT:
        pytest.skip("in the interpreter, tests/engine/test_heads.py and two of these are enough")
    target = tmp_path / "target"
    tiny.save("llama", target, num_hidden_layers=LAYERS)
    if name == "mtp":
        tiny_heads.join(target)
    elif name == "draft-model":
        tiny.save("llama", tmp_path / "draft", num_hidden_layers=1)
    elif "model" in DRAFTERS[name]:
        tiny_heads.save(name, tmp_path / "head", LAYERS)
    config = {key: str(value).format(tmp_path) if key == "model" else value for key, value in DRAFTERS[name].items()}
    said = json.dumps({"adaptive": False, "num_speculative_tokens": 3, **config})
    count, tokens = (6, 40) if device == "cuda" else (2, 10)
    plain = engine_of(target, device, batch_invariant=True)
    truth = run(plain, asked(count, tokens))
    plain.close()
    for eager in (True, False) if device == "cuda" else (False,):
        engine = engine_of(target, device, batch_invariant=True, enforce_eager=eager, speculative_config=said)
        for _ in range(2 if device == "cuda" else 1):
            found = run(engine, asked(count, tokens, speculate=3))
            assert {name: (a.tokens, a.logprobs) for name, a in found.items()} == {
                name: (a.tokens, a.logprobs) for name, a in truth.items()
            }
        stats = engine.stats()
        engine.close()
        assert stats.drafter_failures == 0 and 0 < stats.accepted_tokens < stats.drafted_tokens


def write_adapter(folder: Path, seed: int) -> AdapterUse:
    """A random adapter of the tiny model's queries, values, downs and head."""
    dice = np.random.default_rng(seed)
    hidden, inner, values = tiny.SIZES["hidden_size"], tiny.SIZES["intermediate_size"], 20
    sizes = {"self_attn.q_proj": (hidden, 60), "self_attn.v_proj": (hidden, values), "mlp.down_proj": (inner, hidden)}
    tensors = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = dice.standard_normal((4, inputs)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = dice.standard_normal((outputs, 4)).astype(np.float32)
    folder.mkdir()
    config = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 4, "base_model_name_or_path": "tiny",
        "target_modules": sorted(name.rpartition(".")[2] for name in sizes),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return AdapterUse(adapter_digest(folder), str(folder))


def test_adapters_are_the_cpus(device: str, tmp_path: Path) -> None:
    """One a row, over the same prompts, beside rows of none; tokens are those of the CPU, bits those of being alone."""
    tiny.save("llama", tmp_path / "model", num_hidden_layers=LAYERS)
    uses = [write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)]
    more: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "kv_blocks": 60}
    prompt = tuple(tiny.prompt(20, 3))
    tokens = 16 if device == "cuda" else 3
    params = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1, ignore_eos=True)
    requests = [
        EngineRequest(f"r{number}", prompt, params, adapters=chosen)
        for number, chosen in enumerate([(), (uses[0],), (uses[1],), (uses[0],)])
    ]
    reference = engine_of(tmp_path / "model", "cpu", **more)
    expected = {name: answer.tokens for name, answer in run(reference, requests).items()}
    reference.close()
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    engine = engine_of(tmp_path / "model", device, batch_invariant=True, **more)
    alone = [run(engine, [request])[request.request_id] for request in requests[1:3]]
    for _ in range(2 if device == "cuda" else 1):
        found = run(engine, [replace(request, cache_salt="other") for request in requests])
        assert {name: answer.tokens for name, answer in found.items()} == expected
        assert [(a.tokens, a.logprobs) for a in alone] == [(found[n].tokens, found[n].logprobs) for n in ("r1", "r2")]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek-v2", "mamba2", "qwen3-next"])
@pytest.mark.parametrize("where", ["kv_ram", "kv_disk"])
def test_what_lies_below_comes_back(device: str, family: str, where: str, tmp_path: Path) -> None:
    """Evicted from a small pool, and from disk after a restart: the bits of computing."""
    if device != "cuda" and (family, where) != ("qwen3", "kv_disk"):
        pytest.skip("in the interpreter one of these is enough")
    tiny.save(family, tmp_path / "model")
    prompts = [tiny.prompt(70, seed) for seed in range(1, 5 if device == "cuda" else 3)]
    params = SamplingParams(max_tokens=6, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
    more: dict[str, Any] = {"max_num_seqs": 2, "block_size": 16, "batch_invariant": True, "max_num_batched_tokens": 32}

    def answers(**options: Any) -> tuple[list[Any], list[int], Engine]:
        engine = engine_of(tmp_path / "model", device, **(more | options))
        said, cached = [], []
        for number, prompt in enumerate(prompts * 2):
            answer = run(engine, [EngineRequest(f"r{number}", tuple(prompt), params)])[f"r{number}"]
            said.append((answer.tokens, answer.logprobs))
            cached.append(answer.cached)
        engine.close()
        return said, cached, engine

    truth, _, _ = answers(enable_prefix_caching=False)
    below = {where: 64 << 20, "kv_disk_path": str(tmp_path / "kv"), "kv_blocks": 8}
    said, cached, engine = answers(**below)
    tier = engine.scheduler.cache.transfers.tier
    assert said == truth and isinstance(tier, BoundedTier)
    assert tier.counters.loaded and not tier.counters.failed and min(cached[len(prompts) :]) >= 16, cached
    if where == "kv_disk":
        said, cached, _ = answers(**below)
        assert said == truth and cached[0] >= 16, cached


@pytest.mark.parametrize("name", SAMPLINGS)
def test_draws_are_the_cpus(device: str, name: str, tmp_path: Path) -> None:
    """In float32 the same keyed draw of the same logits, up to rounding, gives the same tokens."""
    if device != "cuda" and name not in {"filtered", "penalties"}:
        pytest.skip("in the interpreter two of these are enough")
    tiny.save("llama", tmp_path, num_hidden_layers=LAYERS)
    count, tokens = (4, 24) if device == "cuda" else (2, 4)
    requests = [
        EngineRequest(f"r{n}", tuple(tiny.prompt(12 + n, n)), params, seed=n)
        for n in range(count)
        for params in [SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLINGS[name])]
    ]
    found = []
    for where in ("cpu", device):
        engine = engine_of(tmp_path, where)
        found.append({key: answer.tokens for key, answer in run(engine, requests).items()})
        if where != "cpu":
            found.append({key: answer.tokens for key, answer in run(engine, requests).items()})
        engine.close()
    assert found[0] == found[1] == found[2]
