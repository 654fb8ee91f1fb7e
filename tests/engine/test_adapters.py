"""Adapters in whole engines: PEFT's own tokens, the same bits on every axis, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from penstock.config.adapters import AdapterUse, activated
from penstock.config.errors import RequestError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.weights.adapters.open import adapter_digest, read_adapter

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
ISA = "avx2" if "avx2" in native.usable_isas() else "generic"  # those whose products are in float32
NAMES = ("caps", "captain", "signoff")
REFUSALS = ("no finite numbers", "made for this model", "this model does not have", "not what")
Answers = dict[tuple[str, int], list[TokenLogprobs]]


def options(**given: Any) -> EngineOptions:
    plain: dict[str, Any] = {"isa": ISA, "kv_cache_dtype": "float32", "kv_blocks": 400, "pack_cache": "off"}
    return EngineOptions(**{**plain, "enable_lora": True, "max_loras": 2, "threads": 1, **given})


def use_of(shared_data: Path, name: str, weight: float = 1.0) -> AdapterUse:
    path = shared_data / "models" / f"penstock-concierge-lora-{name}"
    return AdapterUse(adapter_digest(path), str(path), weight)


def ask(name: str, prompt: tuple[int, ...], *uses: AdapterUse, tokens: int = 10, **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"temperature": 0.9, "max_tokens": tokens, "logprobs": 2, **sampling})
    return EngineRequest(name, prompt, params, seed=11, adapters=uses)


def finish(engine: Engine, *requests: EngineRequest) -> Answers:
    """Answers of requests that are sent together."""
    answers: Answers = {}
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for waited, refused in engine.adapters.ready():
            if refused is not None:
                raise refused
            engine.add(waited)
        for output in engine.step():
            assert output.error is None
            answers.setdefault((output.request_id, output.sequence), []).extend(output.logprobs)
        engine.scheduler.check_integrity()
    return answers


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine, _ = build_engine(options())
    yield engine
    engine.close()
    native.select_isa("auto")


def activated_copy(shared_data: Path, folder: Path, name: str, invocation: list[int]) -> AdapterUse:
    """An adapter that counts from these tokens on."""
    made = shutil.copytree(shared_data / "models" / f"penstock-concierge-lora-{name}", folder / name)
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(config | {"alora_invocation_tokens": invocation}))
    return read_adapter(made)[0]


def test_what_comes_before_an_invocation_is_the_models_own(shared_data: Path, engine: Engine, tmp_path: Path) -> None:
    """It is found by whoever has it, and the same bits as where nothing was found; what follows is nobody else's."""
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"]) * 3
    first = len(prompt) - 20
    invocation = list(prompt[first : first + 4])
    uses = {name: activated_copy(shared_data, tmp_path, name, invocation) for name in ("caps", "captain")}
    asked = {name: ask(name, prompt, *activated((use,), prompt)) for name, use in uses.items()}
    asked["both"] = ask("both", prompt, *activated(tuple(uses.values()), prompt))
    asked["plain"] = ask("plain", prompt)
    assert {use.first for one in asked.values() for use in one.adapters} == {first}
    alone: Answers = {}
    for one in asked.values():
        engine.scheduler.cache.clear()
        alone |= finish(engine, one)
    assert len({tuple(answer) for answer in alone.values()}) == len(asked)
    for order in (["plain", "caps", "captain", "both"], ["caps", "plain", "both", "captain"]):
        engine.scheduler.cache.clear()
        for number, name in enumerate(order):
            found, cached = told(engine, asked[name])
            assert found == alone[name, 0]
            assert cached == (first if number else 0)
        for name in order:
            assert told(engine, asked[name]) == (alone[name, 0], len(prompt) - 1)
    engine.scheduler.cache.clear()
    assert finish(engine, *asked.values()) == alone


def test_an_adapter_whose_invocation_is_not_there_does_not_count(
    shared_data: Path, engine: Engine, tmp_path: Path
) -> None:
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"])
    use = activated_copy(shared_data, tmp_path, "caps", [3, 1, 4, 1, 5, 9])
    assert activated((use,), prompt) == ()


def told(engine: Engine, request: EngineRequest) -> tuple[list[TokenLogprobs], int]:
    """An answer, and how many tokens of its prompt were found."""
    answer: list[TokenLogprobs] = []
    cached = 0
    engine.add(request)
    while engine.has_work:
        for waited, refused in engine.adapters.ready():
            assert refused is None and engine.add(waited)
        for output in engine.step():
            answer += output.logprobs
            cached = max(cached, output.cached_tokens or 0)
    return answer, cached


def prompts(shared_data: Path, name: str) -> list[dict[str, Any]]:
    golden = shared_data / "models" / f"penstock-concierge-lora-{name}" / "golden.json"
    items: list[dict[str, Any]] = json.loads(golden.read_text())["items"]
    return items


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_and_logits_of_peft(shared_data: Path, engine: Engine, name: str) -> None:
    """rsLoRA on all layers, DoRA, LoRA: ten prompts each, beside the same without adapter, all together."""
    items, asked = prompts(shared_data, name), []
    for number, item in enumerate(items):
        greedy = {"temperature": 0.0, "logprobs": 5}
        asked.append(ask(f"with {number}", tuple(item["prompt"]), use_of(shared_data, name), tokens=64, **greedy))
        asked.append(ask(f"without {number}", tuple(item["prompt"]), tokens=64, **greedy))
    answers = finish(engine, *asked)
    for number, item in enumerate(items):
        for which, field in (("with", "greedy"), ("without", "base_greedy")):
            said = [entry.token for entry in answers[f"{which} {number}", 0]]
            assert said[: len(item[field])] == item[field], (which, number)
        told, wanted = dict(answers[f"with {number}", 0][0].top), item["top5_first"]
        first = next(iter(wanted))
        for token, logit in wanted.items():
            difference = told[int(token)] - told[int(first)] - (logit - wanted[first])
            assert abs(difference) < 2e-4, (number, token)  # they are written with four digits


@pytest.fixture(scope="module")
def alone(shared_data: Path, engine: Engine) -> dict[str, list[TokenLogprobs]]:
    """Sampled answers to one prompt, each asked for alone, with no cache."""
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"])
    found = {}
    for name, uses in sets_of(shared_data).items():
        engine.scheduler.cache.clear()
        found[name] = finish(engine, ask("it", prompt, *uses))["it", 0]
    assert len({tuple(answer) for answer in found.values()}) == len(found)
    return found


def sets_of(shared_data: Path) -> dict[str, tuple[AdapterUse, ...]]:
    caps, captain, signoff = (use_of(shared_data, name) for name in NAMES)
    halves = (replace(caps, weight=0.5), replace(captain, weight=0.5))
    return {"base": (), "caps": (caps,), "captain": (captain,), "signoff": (signoff,), "two": halves}


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("drafts", [False, True])
def test_the_same_bits_on_every_axis(
    shared_data: Path, alone: dict[str, list[TokenLogprobs]], chunk: int | None, drafts: bool
) -> None:
    """In company of more adapters than slots, in chunks, preempted, found in the cache, with drafts."""
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"])
    how = {"speculative_config": '{"method": "ngram", "adaptive": false}'} if drafts else {}
    engine, _ = build_engine(options(max_chunk_tokens=chunk, **how))
    try:
        for turn in range(3):
            asked = [ask(name, prompt, *uses) for name, uses in sets_of(shared_data).items()]
            if drafts:
                asked = [replace(one, speculate=4) for one in asked]
            for one in asked:
                engine.add(one)
            answers: Answers = {}
            steps = 0
            while engine.has_work:
                for waited, refused in engine.adapters.ready():
                    assert refused is None and engine.add(waited)
                for output in engine.step():
                    assert output.error is None
                    answers.setdefault((output.request_id, output.sequence), []).extend(output.logprobs)
                steps += 1
                if turn == 1 and steps % 4 == 0:
                    for running in list(engine.scheduler.running):
                        engine.scheduler.preempt(running.request.request_id)
            assert {name: answers[name, 0] for name in alone} == alone
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hits > 0
    finally:
        engine.close()


def test_prefixes_are_found_by_content_and_weight_alone(shared_data: Path, engine: Engine, tmp_path: Path) -> None:
    prompt = tuple(prompts(shared_data, "caps")[2]["prompt"]) * 3
    caps = use_of(shared_data, "caps")
    elsewhere = shutil.copytree(caps.path, tmp_path / "copy")
    cached = {}
    for name, uses in {
        "first": (caps,), "copy": (replace(caps, path=str(elsewhere)),), "half": (replace(caps, weight=0.5),),
        "base": (), "other": (use_of(shared_data, "signoff"),), "again": (caps,),
    }.items():  # fmt: skip
        before = engine.stats().prefix_hits
        finish(engine, ask(name, prompt, *uses, tokens=1))
        cached[name] = engine.stats().prefix_hits - before > 0
    assert cached == {"first": False, "copy": True, "half": False, "base": False, "other": False, "again": True}


def changed(shared_data: Path, folder: Path, **tensors: Any) -> AdapterUse:
    """The signing-off adapter with other tensors."""
    shutil.copytree(shared_data / "models" / "penstock-concierge-lora-signoff", folder)
    found = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    for name, make in tensors.items():
        stem = f"base_model.model.model.layers.0.self_attn.{name}.lora_A.weight"
        found[stem] = make(found.get(stem))
        if name != "q_proj":
            up = stem.replace("lora_A", "lora_B")
            found[up] = np.ones((64, found[stem].shape[0]), np.float32)
    save_file(found, folder / "adapter_model.safetensors")
    return AdapterUse(adapter_digest(folder), str(folder))


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        ("q_proj", lambda down: down * np.nan, "no finite numbers"),
        ("q_proj", lambda down: np.ones((8, 3), np.float32), "made for this model"),
        ("z_proj", lambda down: np.ones((8, 256), np.float32), "this model does not have"),
    ],
)
def test_adapters_that_do_not_fit_harm_nobody(
    shared_data: Path, engine: Engine, alone: dict[str, list[TokenLogprobs]], tmp_path: Path, name: str, make: Any,
    said: str,
) -> None:  # fmt: skip
    bad = changed(shared_data, tmp_path / "bad", **{name: make})
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"])
    assert not engine.add(ask("bad", prompt, bad))
    assert finish_beside(engine, ask("caps", prompt, use_of(shared_data, "caps"))) == (alone["caps"], said)


def finish_beside(engine: Engine, good: EngineRequest) -> tuple[list[TokenLogprobs], str]:
    """A good request's answer, and the words of a refusal that was waited for meanwhile."""
    engine.add(good)
    answer: list[TokenLogprobs] = []
    words = ""
    while engine.has_work:
        for waited, refused in engine.adapters.ready():
            if refused is None:
                engine.add(waited)
            else:
                said = str(refused)
                assert "/" not in said, "a path is told"
                words = next(known for known in REFUSALS if known in said)
        for output in engine.step():
            answer += output.logprobs
    return answer, words


def test_an_adapter_that_changed_since_it_got_its_name_is_refused(
    shared_data: Path, engine: Engine, tmp_path: Path, alone: dict[str, list[TokenLogprobs]]
) -> None:
    old = changed(shared_data, tmp_path / "a", q_proj=lambda down: down)
    changed(shared_data, tmp_path / "b", q_proj=lambda down: down * 2)
    shutil.copy(tmp_path / "b" / "adapter_model.safetensors", tmp_path / "a" / "adapter_model.safetensors")
    prompt = tuple(prompts(shared_data, "caps")[1]["prompt"])
    engine.add(ask("old", prompt, old))
    assert finish_beside(engine, ask("base", prompt))[1] == "not what"


def test_what_is_asked_of_engines_without(shared_data: Path, engine: Engine) -> None:
    caps = use_of(shared_data, "caps")
    with pytest.raises(RequestError, match="at most 2"):
        engine.add(ask("many", (1, 2, 3), caps, caps, caps))
    plain, _ = build_engine(options(enable_lora=False))
    try:
        with pytest.raises(RequestError, match="--enable-lora"):
            plain.add(ask("one", (1, 2, 3), caps))
        assert finish(plain, ask("none", (1, 2, 3)))
    finally:
        plain.close()
