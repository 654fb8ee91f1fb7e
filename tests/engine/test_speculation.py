"""Answers with drafters that need no weights are those without, to the bit, in every kind of life and of cache."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import LLM
from penstock.config.constraint import Thinking
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.step_cost import DraftPrices, Estimate, StepShape
from penstock.core.protocol import StepPlan, StepTimings
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from penstock.runtime.drafters import drafting, methods
from tests.engine.test_drafts import FAMILIES, KINDS, check, run
from tests.engine.test_grammars import held
from tests.models import tiny

METHODS = [
    {"method": "suffix", "adaptive": False},
    {"method": "suffix", "prompt_lookup_min": 1},
    {"method": "ngram", "adaptive": False, "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    {"method": "lookahead", "adaptive": False, "max_ngram_size": 3},
]


class Cheap:
    """Drafts cost a share of a step, whatever the clock says."""

    each = 0.05

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        pass

    def estimate(self, shape: StepShape) -> Estimate:
        return Estimate(100.0 * (1.0 + self.each * shape.drafts), 0.0)

    def with_drafts(self, shape: StepShape, most: int) -> DraftPrices:
        seconds = [100.0 * (1.0 + self.each * drafts) for drafts in range(most + 1)]
        return DraftPrices(seconds, seconds, True)


@pytest.fixture(autouse=True)
def _known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "LearnedStepCost", Cheap)
    monkeypatch.setattr(drafting, "perf_counter", lambda: 0.0)  # looks take none of the steps' time


SELVES = [
    {"method": "self", "layers": 1, "adaptive": False},
    {"method": "self", "layers": 2, "num_speculative_tokens": 3},
]
DRAFT_MODELS = [
    {"method": "draft_model", "adaptive": False},
    {"method": "draft_model", "num_speculative_tokens": 3},
]


def made(folder: Path, config: dict[str, object] | None, **more: object) -> Engine:
    options = {"dtype": "float32", "threads": 1, "max_num_seqs": 6, "block_size": 4, "kv_blocks": 150, **more}
    text = None if config is None else json.dumps(config)
    return build_engine(EngineOptions(str(folder), max_model_len=120, speculative_config=text, **options))[0]  # type: ignore[arg-type]


def asked(count: int, drafts: int, turn: int = 0) -> list[EngineRequest]:
    """Requests of every kind whose answers have few words, so that what is drafted is right now and then."""
    found = []
    for number in range(count):
        once = tiny.prompt(5 + 3 * (number % 3), number % 3)
        params = SamplingParams(**{"max_tokens": 40, "allowed_token_ids": (3, 8, 10, 11, 60), **KINDS[number % 4]})
        stop_ids = (3, 60) if number % 4 > 2 else ()
        name = f"r{number}#{turn}" if turn else f"r{number}"
        found.append(EngineRequest(name, tuple(once * 4), params, stop_ids, seed=number, speculate=drafts))
    return found


def compare(model: Path, config: dict[str, object]) -> None:
    """Answers with drafts, three times over, beside those without; some drafts are accepted and some refused."""
    plain = made(model, None)
    truth = run(plain, *asked(8, 0))
    plain.close()
    engine = made(model, config, max_chunk_tokens=7)
    for turn in range(1, 4):
        check(run(engine, *asked(8, 12, turn), dice=random.Random(turn) if turn > 1 else None), truth)
    stats = engine.stats()
    engine.close()
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.drafter_failures == 0
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", METHODS, ids=["suffix", "suffix-priced", "ngram", "lookahead"])
def test_answers_are_those_without(family: str, config: dict[str, object], tmp_path: Path) -> None:
    """Hits, preemption, cancelled requests, any chunks, little memory; drafts are accepted and refused."""
    tiny.save(family, tmp_path)
    compare(tmp_path, config)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", DRAFT_MODELS, ids=["draft-model", "draft-model-priced"])
def test_answers_with_a_draft_model(
    family: str, config: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, whatever the target keeps, as long as some layer keeps every position: there the draft model's are."""
    monkeypatch.setattr(Cheap, "each", 0.002)  # two models with random weights seldom agree
    tiny.save(family, tmp_path / "target")
    tiny.save("llama", tmp_path / "draft", num_hidden_layers=1)
    config = {**config, "model": str(tmp_path / "draft")}
    if family == "mixtral-sliding":
        with pytest.raises(ConfigError, match="forgets what lies before its window"):
            made(tmp_path / "target", config)
        return
    compare(tmp_path / "target", config)


@pytest.mark.skipif(not native.available(), reason="starts are kept of the native library's programs alone")
@pytest.mark.parametrize("family", ["llama", "deepseek-v2", "qwen3"])
@pytest.mark.parametrize("config", SELVES, ids=["one-layer", "two-layers-priced"])
def test_answers_with_its_own_first_layers(family: str, config: dict[str, object], tmp_path: Path) -> None:
    """They write into blocks of the sequences that they draft for, and nobody sees it."""
    tiny.save(family, tmp_path)
    compare(tmp_path, config)


def test_a_start_that_was_kept_drafts_too(tmp_path: Path) -> None:
    """With recurrent states, of which drafts need some more; the first start was one without drafts."""
    tiny.save("qwen3-next", tmp_path / "model")
    kept = str(tmp_path / "cache")
    plain = made(tmp_path / "model", None, pack_cache=kept)
    truth = run(plain, *asked(8, 0))
    plain.close()
    engine = made(tmp_path / "model", METHODS[0], pack_cache=kept)
    assert "ReplayExecutor" in type(engine.runner._executor).__name__  # type: ignore[attr-defined]
    check(run(engine, *asked(8, 12, 1), dice=random.Random(3)), truth)
    stats = engine.stats()
    engine.close()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


@pytest.fixture(scope="module")
def text() -> TextPipeline:
    return TextPipeline.load("penstock-concierge")


def test_answers_under_grammars_and_with_reasoning(text: TextPipeline) -> None:
    thinking = Thinking(end_ids=tuple(text.tokenizer.encode("</think>")), budget=20)
    requests = [
        held(text, "plain"),
        held(text, "scored", logprobs=2, n=2),
        held(text, "banned", logprobs=0, min_tokens=30, bad_words_ids=((text.tokenizer.encode("a")[-1],),)),
        replace(held(text, "thinks", thinking=thinking, max_tokens=60), grammar=None),
        replace(held(text, "strings", max_tokens=60, banned_strings=("the",)), grammar=None),
    ]
    options = EngineOptions(threads=1, max_num_seqs=8, kv_blocks=200)
    plain, _ = build_engine(options)
    said = tuple(run(plain, *requests)["plain", 0].tokens)
    requests = [replace(one, prompt_ids=said + one.prompt_ids) for one in requests]  # from where drafts are taken
    truth = run(plain, *requests)
    plain.close()
    config = json.dumps({"method": "suffix", "prompt_lookup_min": 1, "adaptive": False})
    engine, info = build_engine(replace(options, speculative_config=config))
    assert info.drafts == 12
    for turn in range(2):
        again = [replace(one, request_id=f"{one.request_id}#{turn}", speculate=12) for one in requests]
        check(run(engine, *again, dice=random.Random(1) if turn else None), truth)
    stats = engine.stats()
    engine.close()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_a_request_says_how_much_is_drafted() -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    config = {"method": "suffix", "prompt_lookup_min": 1, "adaptive": False}
    with LLM(speculative_config=json.dumps(config), threads=1) as llm:

        def drafted() -> int:
            return llm.stats().drafted_tokens

        without = llm.generate(prompt, temperature=0.0, max_tokens=150, ignore_eos=True, num_speculative_tokens=0)[
            0
        ].text
        assert drafted() == 0
        few = llm.generate(prompt, temperature=0.0, max_tokens=150, ignore_eos=True, num_speculative_tokens=1)[0].text
        of_one = drafted()
        assert 0 < of_one <= 150
        whole = llm.generate(prompt, temperature=0.0, max_tokens=150, ignore_eos=True)[0].text
        assert drafted() - of_one > of_one
        assert without == few == whole
