"""Banned strings through the engine: never in an answer, which is that of a run that never went there."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.config.constraint import Thinking
from penstock.config.errors import BANNED_AND_HELD, BANNED_TOO_OFTEN, ParameterError
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import Runner, StepPlan
from penstock.core.request import EngineOutput, EngineRequest
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.so_far import SoFar
from penstock.engine.text_pipeline import TextPipeline
from penstock.structured.grammar_compiler import Vocabulary
from penstock.structured.manager import StructuredOutputManager
from tests.core.harness import null_engine, request
from tests.engine.support import Wrapped
from tests.engine.test_drafts import Answer
from tests.engine.test_grammars import held

PIECES = [*"abcdefgh", "ab", "ca", "bc", " a", "", "é", "abc", "hg"]
VOCAB = len(PIECES)
BANNED = ("AB", "cad", "éh", "gg")
Place = tuple[str, int, int]


@dataclass
class Given:
    """Masks by slot, without some tokens."""

    words: int
    without: dict[int, set[int]]

    def of(self, slots: Sequence[int]) -> npt.NDArray[np.uint32]:
        masks = np.full((len(slots), self.words), 0xFFFFFFFF, np.uint32)
        for row, slot in zip(masks, slots, strict=True):
            for token in self.without[slot]:
                row[token // 32] &= ~np.uint32(1 << token % 32)
        return masks


@dataclass
class Bans:
    """What was forbidden where: of each place what counted the last time it was drawn."""

    at: dict[Place, set[int]] = field(default_factory=dict)
    draws: int = 0


class Seen(Wrapped):
    """A runner that notes the masks, or has those of another run in their place."""

    def __init__(self, runner: Runner, vocab_size: int, bans: Bans, *, give: bool = False) -> None:
        super().__init__(runner)
        self._size = vocab_size
        self._bans = bans
        self._give = give
        self._names: dict[int, tuple[str, int]] = {}

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        self._names |= {new.slot: (new.request_id, new.sequence) for new in plan.new_sequences}
        drawn = {
            span.slot: (*self._names[span.slot], span.start + len(span.tokens))
            for span in plan.scheduled
            if span.sample
        }
        self._bans.draws += len(drawn)
        if self._give:
            masks = Given(
                (self._size + 31) // 32, {slot: self._bans.at.get(place, set()) for slot, place in drawn.items()}
            )
        else:
            for slot, place in drawn.items():
                bits = (
                    np.unpackbits(masks.of([slot])[0].view(np.uint8), bitorder="little")
                    if masks
                    else np.ones(self._size)
                )
                self._bans.at[place] = set(np.flatnonzero(bits[: self._size] == 0).tolist())
        super().submit(plan, masks)


def outputs(engine: Engine, dice: random.Random | None = None) -> Iterator[EngineOutput]:
    """All news; with dice, requests are preempted now and then."""
    while engine.has_work:
        for ready, error in engine.structured.ready():
            assert error is None
            engine.admit(ready)
        yield from engine.step()
        if dice is not None and engine.scheduler.running and dice.random() < 0.1:
            engine.scheduler.preempt(dice.choice(engine.scheduler.running).request.request_id)
        engine.scheduler.check_integrity()


def run(engine: Engine, *requests: EngineRequest, dice: random.Random | None = None) -> dict[tuple[str, int], Answer]:
    answers: dict[tuple[str, int], Answer] = {}
    for asked in requests:
        engine.add(asked)
    for output in outputs(engine, dice):
        assert output.error is None
        answer = answers.setdefault((output.request_id, output.sequence), Answer())
        answer.tokens += output.tokens
        answer.logprobs += output.logprobs
        answer.reason = output.finish_reason
    return answers


def vocabulary() -> Vocabulary:
    return Vocabulary(VOCAB, lambda token: PIECES[token].encode(), lambda text: [], frozenset(), (0,))


def null(bans: Bans, *, give: bool = False, **more: Any) -> Engine:
    engine = null_engine(vocab_size=VOCAB, **more)
    engine.structured = StructuredOutputManager(VOCAB, vocabulary)
    engine.runner = Seen(engine.runner, VOCAB, bans, give=give)
    return engine


def text_of(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens).casefold()


def clean(text: str) -> bool:
    return not any(string.casefold() in text for string in BANNED)


@pytest.mark.parametrize(
    "more",
    [
        {"depth": 1}, {"windows": (None, 5), "caching": False}, {"checkpoints": 4}, {"blocks": 24, "rows": 4},
    ],
    ids=["ahead", "window", "recurrent", "little"],
)  # fmt: skip
def test_a_thousand_draws_never_hold_one_and_are_those_of_a_run_that_never_went_there(more: dict[str, Any]) -> None:
    """The null runner compares every entry of the cache that is read with what it has to be."""
    bans = Bans()
    engine = null(bans, **more)
    asked = [
        request(
            f"r{number}",
            [1, 2, 0, number],
            n=50,
            max_tokens=24,
            temperature=1.0,
            seed=number,
            logprobs=0,
            stop_ids=(7,),
            banned_strings=BANNED,
        )
        for number in range(5)
    ]
    answers = run(engine, *asked, dice=random.Random(7))
    taken_back = bans.draws - sum(len(answer.tokens) for answer in answers.values())
    assert len(answers) == 250 and engine.stats().preemptions > 0 and taken_back > 100
    bare = null(bans, give=True)
    plain = run(bare, *(replace(one, sampling=replace(one.sampling, banned_strings=())) for one in asked))
    for key, answer in answers.items():
        assert clean(text_of(answer.tokens))
        assert [entry.token for entry in answer.logprobs] == answer.tokens
        assert answer == plain[key]


def test_alone_and_in_company_and_after_a_crash_the_answer_is_the_same() -> None:
    asked = request("r", [3, 2], n=4, max_tokens=40, temperature=1.0, seed=5, banned_strings=BANNED)
    truth = run(null(Bans()), asked)
    others = [request(f"o{i}", [3, 2, i], n=3, max_tokens=30, temperature=1.0, seed=i) for i in range(4)]
    together = run(null(Bans()), *others, asked, dice=random.Random(3))
    told = [truth["r", sequence].tokens for sequence in range(4)]
    assert [together["r", sequence].tokens for sequence in range(4)] == told
    engine = null(Bans())
    engine.add(asked)
    so_far: dict[int, list[int]] = {sequence: [] for sequence in range(4)}
    for _ in range(60):
        for ready, _ in engine.structured.ready():
            engine.admit(ready)
        for output in engine.step():
            so_far[output.sequence] += output.tokens
        if min(map(len, so_far.values())) > 9:
            break
    again = null(Bans())
    assert not again.add(asked, SoFar(tuple(tuple(tokens) for tokens in so_far.values())))
    while again.structured.pending:
        for ready, _ in again.structured.ready():
            again.admit(ready, SoFar(tuple(tuple(tokens) for tokens in so_far.values())))
    for output in (output for _ in iter(lambda: again.has_work, False) for output in again.step()):
        so_far[output.sequence] += output.tokens
    assert list(so_far.values()) == told


def test_one_that_cannot_be_avoided_ends_the_sequence_with_a_sentence() -> None:
    engine = null(Bans())
    engine.add(request("r", [1], max_tokens=4, temperature=1.0, banned_strings=[*"abcdefgh ", "é"], n=2))
    found = list(outputs(engine))
    assert {output.error for output in found if output.finish_reason} == {None}, "the token without text is left"
    engine.add(replace(request("s", [1], max_tokens=9, banned_strings=("a",)), thinking=Thinking((0,), budget=1)))
    assert [output.error for output in outputs(engine)][-1] in (BANNED_AND_HELD, BANNED_TOO_OFTEN)


@pytest.fixture(scope="module")
def text() -> TextPipeline:
    return TextPipeline.load("penstock-concierge")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made, _ = build_engine(EngineOptions(threads=1, max_num_seqs=8, kv_blocks=300))
    yield made
    made.close()


WORDS = (" the", "can", "I ", "table", "you")


def prompt(text: TextPipeline) -> tuple[int, ...]:
    return tuple(text.tokenizer.encode("<|im_start|>user\nA table, please.<|im_end|>\n<|im_start|>assistant\n"))


KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "n": 6, "logprobs": 1},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 1.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "logprobs": 0},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 0, "n": 2},
)


def test_a_model_s_answer_is_to_the_bit_that_of_a_run_with_the_same_tokens_masked(
    engine: Engine, text: TextPipeline
) -> None:
    asked = [
        EngineRequest(
            f"r{i}", prompt(text), SamplingParams(max_tokens=40, banned_strings=WORDS, **kind), text.eos_ids, seed=i
        )
        for i, kind in enumerate(KINDS)
    ]
    bans, runner = Bans(), engine.runner
    engine.runner = Seen(runner, text.vocab_size, bans)
    answers = run(engine, *asked)
    assert bans.draws > sum(len(answer.tokens) for answer in answers.values()) + 10
    shown = [text.tokenizer.decode(answer.tokens).casefold() for answer in answers.values()]
    assert not [word for word, said in itertools.product(WORDS, shown) if word.casefold() in said]
    engine.runner = Seen(runner, text.vocab_size, bans, give=True)
    plain = run(engine, *(replace(one, sampling=replace(one.sampling, banned_strings=())) for one in asked))
    engine.runner = runner
    assert plain == answers
    assert run(engine, *asked, dice=random.Random(1)) == answers


def test_with_a_grammar_the_way_round_is_taken_or_the_sequence_ends(engine: Engine, text: TextPipeline) -> None:
    colours = {"enum": ["red wine", "red whine", "white wine"]}
    for seed in range(6):
        asked = replace(held(text, f"r{seed}", colours, banned_strings=("Red W",)), seed=seed)
        (answer,) = run(engine, asked).values()
        assert text.tokenizer.decode(answer.tokens).strip().startswith('"white wine"')
    engine.add(held(text, "none", colours, banned_strings=("E W",), temperature=0.0))
    assert [output.error for output in outputs(engine) if output.finish_reason] == [BANNED_AND_HELD]


def test_what_cannot_be_banned_is_refused() -> None:
    for wrong in ([""], ["a" * 257], ["a"] * 513, [3], ["a" * 200] * 50):
        with pytest.raises(ParameterError, match="banned_strings"):
            SamplingParams(banned_strings=wrong)
    assert SamplingParams(banned_strings="one").banned_strings == ("one",)
