"""A draft model proposes what it would say by itself, with the same noise, whatever became of its blocks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.runtime.drafters import draft_draws
from penstock.runtime.drafters.draft_model import DraftModelDrafter
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.runner import ModelRunner
from tests.engine.test_drafts import run
from tests.models import tiny

KINDS = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9, "n": 2, "allowed_token_ids": tuple(range(3, 40))},
)
Made = tuple[NewSequence, list[int], tuple[int, ...]]


class Watched:
    """A drafter whose proposals are kept: (sequence, its known tokens, drafts)."""

    def __init__(self, drafter: DraftModelDrafter) -> None:
        self._drafter = drafter
        self.most = drafter.most
        self.made: list[Made] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        rows = self._drafter._rows
        known = {slot: (rows[slot].new, list(rows[slot].tokens)) for slot in wanted if slot in rows}
        found = self._drafter.propose(wanted)
        self.made += [(*known[draft.slot], draft.tokens) for draft in found]
        return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model."""
    folder = tmp_path_factory.mktemp("models")
    tiny.save("llama", folder / "target")
    tiny.save("qwen3", folder / "draft", num_hidden_layers=1)
    return folder / "target", folder / "draft"


def made(model: Path, draft: Path | None = None, most: int = 5, **more: Any) -> Engine:
    asked = {"model": str(draft), "num_speculative_tokens": most, "adaptive": False}
    asked |= {name: more.pop(name) for name in ("draft_min", "draft_p_min") if name in more}
    options = {"dtype": "float32", "threads": 1, "max_num_seqs": 4, "block_size": 4, "kv_blocks": 150, **more}
    config = json.dumps(asked) if draft is not None else None
    return build_engine(EngineOptions(str(model), max_model_len=100, speculative_config=config, **options))[0]


def watched(engine: Engine) -> Watched:
    assert isinstance(engine.runner, ModelRunner)
    drafting = engine.runner._drafting
    assert isinstance(drafting._drafter, DraftModelDrafter)
    found = Watched(drafting._drafter)
    drafting.use(found)
    return found


def asked(turn: int, count: int = 6) -> Iterator[EngineRequest]:
    for number in range(count):
        params = SamplingParams(**{"max_tokens": 20, **KINDS[number % 3]})  # type: ignore[arg-type]
        prompt = tuple(tiny.prompt(9 + 7 * (number % 4), number % 2))
        yield EngineRequest(f"r{number}#{turn}", prompt, params, (), seed=number, speculate=5)


def alone(engine: Engine, made: Sequence[Made]) -> list[tuple[int, ...]]:
    """What the draft model draws behind the same tokens with the same noise, one sequence after the other."""
    found = []
    for number, (new, tokens, drafts) in enumerate(made):
        params = replace(new.sampling, max_tokens=len(drafts), n=1)
        request = EngineRequest(f"a{number}", tuple(tokens), params, (), seed=new.seed)
        rows = {sequence: answer.tokens for (_, sequence), answer in run(engine, request).items()}
        found.append(tuple(rows[0]))
    return found


@pytest.mark.parametrize("little", [False, True], ids=["room", "little room"])
def test_proposals_are_what_the_model_says_by_itself(models: tuple[Path, Path], little: bool) -> None:
    """With hits of others' prefixes, of which it computed nothing or not all, preemption, chunks and cancellation."""
    target, draft = models
    engine = made(target, draft, max_chunk_tokens=7, max_num_batched_tokens=16, kv_blocks=40 if little else 150)
    watch = watched(engine)
    run(engine, *(replace(one, speculate=0) for one in asked(0)))  # so that there are prefixes that it has not seen
    for turn in range(1, 4):
        run(engine, *asked(turn), dice=random.Random(turn) if turn > 1 else None)
    stats = engine.stats()
    engine.close()
    assert stats.prefix_hits > 0 and stats.preemptions > 0 and stats.drafter_failures == 0
    first = [one for one in watch.made if one[0].sequence == 0]  # others have noise of their own
    assert len(first) > 100 and {new.sampling.temperature for new, _, _ in first} == {0.0, 0.7, 1.0}
    judge = made(draft, None, kv_blocks=150)
    assert [drafts for _, _, drafts in first] == alone(judge, first)
    judge.close()


def test_who_looks_back_is_drafted_for_as_it_is_drawn(models: tuple[Path, Path]) -> None:
    """Penalties count drafts: a model that drafts for itself is always right."""
    target, _ = models
    engine = made(target, target)
    params = SamplingParams(temperature=1.0, max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5)
    banned = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=20, bad_words_ids=((5,), (7, 8)))
    prompt = tuple(tiny.prompt(9))
    run(
        engine,
        *(EngineRequest(f"r{i}", prompt, one, (3,), seed=i, speculate=5) for i, one in enumerate((params, banned))),
    )
    stats = engine.stats()
    engine.close()
    assert stats.accepted_tokens == stats.drafted_tokens > 50


def test_who_looks_back_far_gets_no_drafts(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler reads all of it for each proposal."""
    monkeypatch.setattr(draft_draws, "_LOOKED_BACK", 24)
    target, _ = models
    engine = made(target, target)
    seen = watched(engine)
    params = SamplingParams(temperature=1.0, max_tokens=40, repetition_penalty=1.3)
    many = replace(params, allowed_token_ids=tuple(range(3, 40)))
    prompt = tuple(tiny.prompt(9))
    run(engine, *(EngineRequest(f"r{i}", prompt, one, (), seed=i, speculate=5) for i, one in enumerate((params, many))))
    engine.close()
    assert {new.request_id for new, _, _ in seen.made} == {"r0"}
    assert 20 <= max(len(tokens) for _, tokens, _ in seen.made) <= 24


def test_nothing_is_computed_behind_the_places_a_model_has(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    tiny.save("opt", tmp_path, max_position_embeddings=32)
    engine = made(target, tmp_path, max_num_batched_tokens=7)
    seen = watched(engine)
    ends: list[int] = []
    computed = seen._drafter._run

    def noted(spans: Sequence[ScheduledTokens]) -> Any:
        ends.extend(span.start + len(span.tokens) for span in spans)
        return computed(spans)

    seen._drafter._run = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    answers = run(
        engine,
        *(EngineRequest(f"r{n}", tuple(tiny.prompt(n)), params, (), speculate=5) for n in (9, 50)),
    )  # fmt: skip
    engine.close()
    assert all(len(answer.tokens) == 40 for answer in answers.values())
    assert {new.request_id for new, _, _ in seen.made} == {"r9"}
    assert 20 < max(ends) <= 32


def test_least_drafts_and_their_least_probability(models: tuple[Path, Path]) -> None:
    """What is less probable ends a proposal, and fewer drafts than the least are none."""
    target, draft = models
    request = EngineRequest("r", tuple(tiny.prompt(9)), SamplingParams(temperature=0.0, max_tokens=40), (), speculate=5)
    judge = made(draft)

    def proposals(least: int, probability: float) -> list[int]:
        engine = made(target, draft, draft_min=least, draft_p_min=probability)
        watch = watched(engine)
        run(engine, request)
        engine.close()
        for new, tokens, drafts in watch.made:
            scored = replace(new.sampling, max_tokens=len(drafts), logprobs=0)
            answer = run(judge, EngineRequest("j", tuple(tokens), scored, ()))["j", 0]
            found.append([math.exp(one.logprob) for one in answer.logprobs])
            assert tuple(answer.tokens) == drafts
        return [len(drafts) for _, _, drafts in watch.made]

    found: list[list[float]] = []
    assert set(proposals(0, 0.0)[:20]) == {5}
    usual = sorted(one for those in found for one in those)[len(found)]  # a fifth of them are below
    found.clear()
    lengths = proposals(0, usual)
    assert {1, 2} & set(lengths) and min(one for those in found for one in those) >= usual
    assert min(proposals(3, usual)) > 2 and proposals(0, 1.0) == []
    judge.close()


def test_what_cannot_draft_is_refused(models: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = models
    tiny.save("qwen3-next", tmp_path / "recurrent")
    with pytest.raises(ConfigError, match="recurrent or cross-attention layers cannot go back") as refusal:
        made(target, tmp_path / "recurrent")
    assert str(tmp_path / "recurrent") in str(refusal.value) and str(target) in str(refusal.value)


def test_a_vocabulary_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    """Both models are named, and which of them has no tokenizer."""
    tiny.save("llama", tmp_path / "draft", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"'penstock-concierge': .*draft' has no tokenizer, and 'penstock-concierge'"):
        made(Path("penstock-concierge"), tmp_path / "draft")


def test_memory_is_planned(models: tuple[Path, Path]) -> None:
    target, draft = models
    options = EngineOptions(str(target), dtype="float32", max_model_len=100, kv_blocks=50)
    config = json.dumps({"model": str(draft)})
    plans = []
    for one in (options, replace(options, speculative_config=config)):
        engine, info = build_engine(one)
        engine.close()
        plans.append({row.name: row.value for row in info.memory})
    assert "draft model" not in plans[0] and plans[1]["draft model"] != plans[0]["weights"]
    assert plans[0]["KV cache"] != plans[1]["KV cache"]
