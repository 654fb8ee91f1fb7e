"""Answers with drafts are those without, to the bit: whatever is drafted, hit, preempted, cancelled, held to a form."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from penstock.config.constraint import Thinking
from penstock.config.errors import GRAMMAR_TOO_COMPLEX
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, SlotResult, StepPlan, TokenLogprobs
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.structured import grammar_state, manager, masks
from penstock.structured.grammar_compiler import compute_mask
from penstock.structured.grammar_state import GrammarState
from penstock.structured.manager import StructuredOutputManager
from tests.engine.test_grammars import SCHEMA, WORDS, held
from tests.engine.test_grammars import run as run_to_errors
from tests.models import tiny

Key = tuple[str, int]


@dataclass
class Rehearsed:
    """A drafter that knows the answers: each draft is right as often as `right` of 8 times.

    Attributes:
        answers: by request, without what is behind its last `#`, and sequence.
        told: tokens of each slot, which are checked against the answers.
    """

    answers: dict[Key, list[int]]
    right: int
    most: int = 4
    dice: random.Random = field(default_factory=lambda: random.Random(1))
    told: dict[int, tuple[Key, list[int]]] = field(default_factory=dict)
    trees: bool = False

    def begin(self, new: NewSequence) -> None:
        assert new.slot not in self.told
        self.told[new.slot] = ((new.request_id.partition("#")[0], new.sequence), list(new.generated_ids))

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        key, said = self.told[slot]
        said += tokens
        assert said[: len(self.answers[key])] == self.answers[key][: len(said)], (key, said)

    def release(self, slot: int) -> None:
        del self.told[slot]

    def step(self, plan: StepPlan) -> None:
        pass

    def propose(self, wanted: Mapping[int, int]) -> list[Draft]:
        found = []
        for slot in wanted:
            key, said = self.told[slot]
            coming = self.answers[key][len(said) : len(said) + self.dice.randrange(self.most + 1)]
            drafts = tuple(t if self.dice.randrange(8) < self.right else self.dice.randrange(101) for t in coming)
            if drafts:
                parents = (*range(-1, len(drafts) - 1), 0) if self.trees else ()
                found.append(Draft(slot, (*drafts, 7) if self.trees else drafts, 0, parents))
        return found


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None


def run(engine: Engine, *requests: EngineRequest, dice: random.Random | None = None) -> dict[Key, Answer]:
    """All answers; with dice, requests are preempted and cancelled now and then, and come at different times."""
    answers: dict[Key, Answer] = {}
    coming, live = list(requests), set[str]()
    while coming or engine.has_work:
        while coming and (dice is None or not live or dice.random() < 0.3):
            live.add(coming[0].request_id)
            engine.add(coming.pop(0))
        for compiled, error in engine.structured.ready():
            assert error is None
            engine.admit(compiled)
        for output in engine.step():
            assert output.error is None, output.error
            answer = answers.setdefault((output.request_id, output.sequence), Answer())
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.reason = output.finish_reason
            if output.finish_reason is not None:
                live.discard(output.request_id)
        if dice is not None and live and dice.random() < 0.15:
            engine.scheduler.preempt(dice.choice(sorted(live)))
            if dice.random() < 0.3:
                engine.scheduler.cache.clear()
        if dice is not None and live and dice.random() < 0.02:
            engine.cancel(dice.choice(sorted(live)))
        engine.scheduler.check_integrity()
    return answers


PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0, **PENALTIES},
    {"temperature": 0.8, "top_k": 20, "n": 2, "logprobs": 2},
    {"temperature": 1.2, "min_tokens": 12, "bad_words_ids": ((5,), (7, 8), (9, 10, 11)), "logprobs": 1},
)


def asked(count: int, *, speculate: bool, tokens: int = 24) -> list[EngineRequest]:
    """Requests of every kind, of which some share prompts; stop tokens end some."""
    requests = []
    for number in range(count):
        prompt = tuple(tiny.prompt(11 + 9 * (number % 3), number % 3))
        params = SamplingParams(**{"max_tokens": tokens, **KINDS[number % 4]})
        stop_ids = (3, 60, 61, 62) if number % 4 > 1 else ()
        requests.append(EngineRequest(f"r{number}", prompt, params, stop_ids, seed=number, speculate=speculate))
    return requests


def again(requests: Sequence[EngineRequest], turn: int) -> list[EngineRequest]:
    return [replace(one, request_id=f"{one.request_id}#{turn}", speculate=True) for one in requests]


def check(answers: dict[Key, Answer], truth: dict[Key, Answer]) -> None:
    """Every answer, or what of it there was before it was cancelled, is that without drafts."""
    for (name, sequence), answer in answers.items():
        expected = truth[name.partition("#")[0], sequence]
        if answer.reason is FinishReason.CANCELLED:
            length = len(answer.tokens)
            assert answer.tokens == expected.tokens[:length] and answer.logprobs == expected.logprobs[:length]
        else:
            assert answer == expected, name


def made(folder: Path, drafter: Rehearsed | None = None, **more: Any) -> Engine:
    options = {"dtype": "float32", "threads": 1, "max_num_seqs": 6, "block_size": 4, "kv_blocks": 150, **more}
    return build_engine(EngineOptions(model=str(folder), max_model_len=100, **options), drafter=drafter)[0]


FAMILIES = ("llama", "mixtral-sliding", "gpt-oss", "deepseek-v2", "lfm2-moe", "qwen3-next", "falcon-mamba", "jamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_lives(family: str, tmp_path: Path) -> None:
    """Drafts that are right, mixed and wrong; hits, preemption, cancelled requests, any chunks, little memory."""
    tiny.save(family, tmp_path)
    plain = made(tmp_path)
    requests = asked(8, speculate=False)
    truth = run(plain, *requests)
    plain.close()
    assert any(answer.reason is FinishReason.STOP for answer in truth.values())
    known = {key: answer.tokens for key, answer in truth.items()}
    for number, right in enumerate((8, 6, 1)):
        dice = random.Random(f"{family}{right}")
        little = {"kv_blocks": 40} if number == 1 else {}
        engine = made(tmp_path, Rehearsed(known, right), max_chunk_tokens=(64, 7, 16)[number], **little)
        for turn in range(2):
            answers = run(engine, *again(requests, turn), dice=dice if turn or number else None)
            check(answers, truth)
        stats = engine.stats()
        assert stats.drafter_failures == 0  # the drafter itself checks what it is told
        assert stats.drafted_tokens > 60 and stats.accepted_tokens > (2 * right if right > 1 else -1)
        assert (stats.accepted_tokens == stats.drafted_tokens) or right < 8
        assert stats.preemptions > 0 and stats.prefix_hits > 0
        engine.close()


def test_right_drafts_save_steps(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    steps = []
    asked_for = EngineRequest("r", tuple(tiny.prompt(9)), SamplingParams(temperature=0.0, max_tokens=60))
    truth: dict[Key, Answer] = {}
    for right in (None, 0, 8):
        known = {key: answer.tokens for key, answer in truth.items()}
        engine = made(tmp_path, None if right is None else Rehearsed(known, right))
        answers = run(engine, replace(asked_for, speculate=right is not None))
        truth = truth or answers
        assert answers == truth
        steps.append(engine.stats().steps)
        engine.close()
    assert steps[0] == 60 and steps[1] > 50 and steps[2] < 30


def test_of_a_tree_the_first_chain_counts(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    plain = made(tmp_path)
    truth = run(plain, *asked(4, speculate=False))
    engine = made(tmp_path, Rehearsed({key: answer.tokens for key, answer in truth.items()}, 7, trees=True))
    check(run(engine, *asked(4, speculate=True)), truth)
    assert engine.stats().accepted_tokens > 30
    plain.close()
    engine.close()


class Failing(Rehearsed):
    """A drafter that raises in a call that it is named after, the third time."""

    fails = ""
    calls = 0

    def _called(self, name: str) -> None:
        self.calls += name == self.fails
        if self.calls == 3:
            raise ZeroDivisionError(name)

    def begin(self, new: NewSequence) -> None:
        self._called("begin")
        super().begin(new)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        self._called("take")
        super().take(slot, tokens)

    def release(self, slot: int) -> None:
        self._called("release")
        super().release(slot)

    def propose(self, wanted: Mapping[int, int]) -> list[Draft]:
        self._called("propose")
        return super().propose(wanted)


@pytest.mark.parametrize("fails", ["begin", "take", "release", "propose"])
def test_a_drafter_that_fails_is_switched_off(fails: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go on with the same answers, those that come later too; it is told of once."""
    tiny.save("qwen3-next", tmp_path)
    plain = made(tmp_path)
    truth = run(plain, *asked(8, speculate=False))
    plain.close()
    drafter = Failing({key: answer.tokens for key, answer in truth.items()}, 6)
    drafter.fails = fails
    engine = made(tmp_path, drafter)
    for turn in range(2):
        check(run(engine, *again(asked(8, speculate=False), turn), dice=random.Random(turn)), truth)
    stats = engine.stats()
    assert drafter.calls == 3 and stats.drafter_failures == 1 and dict(stats.draft_decisions)["failed"] > 0
    assert [record.message for record in caplog.records if "drafter failed" in record.message] == [
        "the drafter failed and is switched off: requests go on without drafts"
    ]
    engine.close()


def test_behind_a_drafter_that_failed_requests_are_planned_ahead(tmp_path: Path) -> None:
    """Those that come later: nothing has to be known of their drafts before their next step is planned."""
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    drafter = Failing({}, 0)
    drafter.fails = "begin"
    engine = made(tmp_path, drafter, depth=1)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    waits = []
    for number in range(5):
        engine.add(EngineRequest(f"r{number}", tuple(tiny.prompt(9)), params, speculate=4))
        while engine.has_work:
            waits += [(number, one.request.waits_for_tokens) for one in engine.scheduler.running]
            engine.step()
    assert {number for number, waited in waits if waited} == {0}
    assert {number for number, waited in waits if not waited} == {1, 2, 3, 4}
    engine.close()


def test_it_is_told_why_there_are_no_drafts(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    plain = made(tmp_path)
    truth = run(plain, *asked(4, speculate=False))
    engine = made(tmp_path, Rehearsed({key: answer.tokens for key, answer in truth.items()}, 7))
    run(engine, *asked(4, speculate=True))
    verified = dict(engine.stats().draft_decisions)
    assert verified["verified"] > 20 and "request" not in verified
    assert 0.0 < engine.stats().accepted_now <= 4.0
    run(engine, *again(asked(2, speculate=False), 1)[:1], *asked(1, speculate=False))
    assert dict(engine.stats().draft_decisions)["request"] > 10
    plain.close()
    engine.close()


def test_requests_that_allow_no_drafts_get_none(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path, num_hidden_layers=1)
    drafter = Rehearsed({}, 8)
    engine = made(tmp_path, drafter)
    run(engine, *asked(4, speculate=False))
    assert not drafter.told and engine.stats().drafted_tokens == 0
    engine.close()


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int8", "quantize": "q4_0"}, {"kv_cache_dtype": "fp8"}])
def test_stored_types_change_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny.save("qwen3-next", tmp_path, hidden_size=64, intermediate_size=64)
    plain = made(tmp_path, **settings)
    truth = run(plain, *asked(4, speculate=False))
    engine = made(tmp_path, Rehearsed({key: answer.tokens for key, answer in truth.items()}, 6), **settings)
    check(run(engine, *asked(4, speculate=True), dice=random.Random(3)), truth)
    assert engine.stats().accepted_tokens > 20
    plain.close()
    engine.close()


@pytest.fixture(scope="module")
def text() -> TextPipeline:
    return TextPipeline.load("penstock-concierge")


@pytest.mark.parametrize("right", [8, 6, 2])
def test_answers_under_grammars(text: TextPipeline, right: int) -> None:
    """Held to a schema, behind reasoning with a budget too: the same tokens and log-probabilities, in fewer steps."""
    thinking = Thinking(end_ids=tuple(text.tokenizer.encode("</think>")), budget=9)
    requests = [
        held(text, "plain"),
        held(text, "scored", logprobs=2, n=2),
        held(text, "banned", logprobs=0, min_tokens=30, bad_words_ids=((text.tokenizer.encode("a")[-1],),)),
        held(text, "thinks", thinking=thinking, logprobs=0),
        replace(held(text, "only thinks", thinking=thinking, max_tokens=30), grammar=None),
    ]
    options = EngineOptions(threads=1, max_num_seqs=8, kv_blocks=200)
    plain, _ = build_engine(options)
    truth = run(plain, *requests)
    jsonschema.validate(json.loads(text.tokenizer.decode(truth["plain", 0].tokens)), SCHEMA)
    drafter = Rehearsed({key: answer.tokens for key, answer in truth.items()}, right)
    engine, _ = build_engine(options, drafter=drafter)
    for turn, dice in enumerate((None, random.Random(right))):
        check(run(engine, *again(requests, turn), dice=dice), truth)
    stats, before = engine.stats(), plain.stats()
    assert stats.accepted_tokens > 40
    if right == 8:  # an end that min_tokens forbids is forced, not drawn
        assert stats.accepted_tokens >= stats.drafted_tokens - 2
        assert stats.steps < 1.4 * before.steps  # of two turns, one with preemption
    plain.close()
    engine.close()


def test_an_end_that_no_ban_forbids_is_scored(text: TextPipeline) -> None:
    """With and without drafts; one that is forbidden is forced, and has no log-probability."""
    end = text.eos_ids[0]
    banned = {"unlike": ((5, 6),), "like": ((5, 6), (end,))}
    requests = [
        held(text, name, {"enum": [17, 4711]}, logprobs=0, bad_words_ids=words, max_tokens=20)
        for name, words in banned.items()
    ]
    options = EngineOptions(threads=1, max_num_seqs=8, kv_blocks=200)
    plain, _ = build_engine(options)
    truth = run(plain, *requests)
    plain.close()
    unscored = {name: len(truth[name, 0].tokens) - len(truth[name, 0].logprobs) for name in banned}
    assert unscored == {"unlike": 0, "like": 1} and truth["like", 0].tokens[-1] == end
    engine, _ = build_engine(options, drafter=Rehearsed({key: one.tokens for key, one in truth.items()}, 8, most=8))
    for turn in range(3):
        check(run(engine, *again(requests, turn)), truth)
    assert engine.stats().accepted_tokens > 0
    engine.close()


REMARKS = {
    "type": "object",
    "properties": {"kind": {"enum": ["a table", "a room"]}, "remarks": {"type": "string", "minLength": 200}},
    "required": ["kind", "remarks"],
    "additionalProperties": False,
}


@pytest.fixture
def slow_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that allow many tokens, as inside of texts, take a second each; all are made, and timed, at once."""
    clock = [0.0]

    def slowly(matcher: Any, row: Any) -> Any:
        clock[0] += np.bitwise_count(compute_mask(matcher, row)).sum() > 1000
        return row

    monkeypatch.setattr(masks, "compute_mask", slowly)
    monkeypatch.setattr(masks, "thread_time", lambda: clock[0])
    monkeypatch.setattr(manager, "_CHEAP_S", 10.0**9)


@pytest.mark.usefixtures("slow_texts")
@pytest.mark.parametrize("logprobs", [None, 0])
def test_masks_that_take_too_long_end_an_answer_where_they_do_without_drafts(
    text: TextPipeline, logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EngineOptions(threads=1, max_num_seqs=8, kv_blocks=200)
    asked_for = replace(held(text, "r", REMARKS, temperature=0.7, max_tokens=90, logprobs=logprobs), speculate=True)
    plain, _ = build_engine(options)
    truth = run_to_errors(plain, asked_for)
    tokens, error = truth["r"]
    assert error == GRAMMAR_TOO_COMPLEX and len(tokens) > 16
    plain.close()
    with monkeypatch.context() as patient:
        patient.setattr(grammar_state, "_MOST_SLOW_MASKS", 1000)
        whole, _ = build_engine(options)
        answer = run_to_errors(whole, asked_for)["r"][0]
        whole.close()
    assert answer[: len(tokens)] == tokens and len(answer) > len(tokens) + 4
    for right in (8, 5, 0):
        engine, _ = build_engine(options, drafter=Rehearsed({("r", 0): answer}, right))
        assert run_to_errors(engine, asked_for) == truth, right
        stats = engine.stats()
        assert stats.drafted_tokens > 0 and (stats.accepted_tokens > 0 or not right)
        engine.close()


@dataclass
class Straying(NoDrafter):
    """Drafts that a grammar allows and nobody draws: wherever an answer ends with one text, another that is dear."""

    text: TextPipeline
    behind: str
    drafts: tuple[int, ...]
    told: dict[int, list[int]] = field(default_factory=dict)
    most: int = 40

    def begin(self, new: NewSequence) -> None:
        self.told[new.slot] = list(new.generated_ids)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        self.told[slot] += tokens

    def propose(self, wanted: Mapping[int, int]) -> list[Draft]:
        said = {slot: self.text.tokenizer.decode(self.told[slot]) for slot in wanted}
        return [Draft(slot, self.drafts) for slot in wanted if said[slot].endswith(self.behind)]


HEAVY, LIGHT = {"z": WORDS["properties"]["summary"]}, {"a": {"enum": ["on", "off"]}}
EITHER = {
    "type": "array",
    "minItems": 5,
    "maxItems": 5,
    "items": {
        "anyOf": [
            {"type": "object", "properties": kind, "required": list(kind), "additionalProperties": False}
            for kind in (HEAVY, LIGHT)
        ]
    },
}


LEARNING = {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 1.0, "temperature": 1.5}


@pytest.mark.parametrize("limit", ["little_fuel", "slow_texts"])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, LEARNING], ids=["greedy", "learning"])
def test_drafts_that_are_too_much_for_a_matcher_fail_nothing(
    text: TextPipeline,
    limit: str,
    options: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made anew, slow masks are forgotten, and the answer goes on without drafts: nothing counts against it,
    and from a draw that is made again nothing is learned."""
    renew, renewed = StructuredOutputManager._renew, []

    def renewing(masks: StructuredOutputManager, state: GrammarState, row: SlotResult) -> SlotResult:
        renewed.append((row, renew(masks, state, row)))
        return renewed[-1][1]

    monkeypatch.setattr(StructuredOutputManager, "_renew", renewing)
    request.getfixturevalue(limit)
    tokenizer = text.tokenizer
    banned = tuple((token, -100.0) for token in range(tokenizer.vocab_size) if "z" in tokenizer.decode([token]))
    sampling: dict[str, Any] = {**options, "logit_bias": banned, "logprobs": 0}
    requests = [replace(held(text, name, EITHER, **sampling), speculate=True) for name in ("one", "two")]
    engine_options = EngineOptions(threads=1, max_num_seqs=4, kv_blocks=200)
    plain, _ = build_engine(engine_options)
    truth = run_to_errors(plain, *requests)
    plain.close()
    assert [error for _, error in truth.values()] == [None, None]
    assert len(json.loads(tokenizer.decode(truth["one"][0]).removesuffix("<|im_end|>"))) == 5
    dear = tokenizer.encode('{"z":"' + "I me a to be we us " * 9)
    engine, _ = build_engine(engine_options, drafter=Straying(text, tokenizer.decode(dear[:1]), tuple(dear[1:])))
    assert run_to_errors(engine, *requests) == truth
    stats = engine.stats()
    assert stats.drafted_tokens > 60 and stats.accepted_tokens == 0
    assert (stats.preemptions > 0) == (limit == "little_fuel") == bool(renewed)
    assert all(len(before.sampler_state) == ("mirostat" in options) for before, _ in renewed)
    assert not any(after.sampler_state or after.tokens for _, after in renewed)
    engine.close()
