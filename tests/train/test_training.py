"""Heads that are trained here, as the engine runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock import LLM
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.train.acceptance import measure
from penstock.train.answers import Answer, AnswerFile, held_out
from penstock.train.build import begin
from penstock.train.head_folder import rounded, write_head
from penstock.train.settings import METHODS, TrainSettings
from penstock.train.target import Target, check_drafted_for
from penstock.train.training import StepLoss, Training
from tests.models import tiny

MODEL = "penstock-concierge"
QUESTIONS = (
    "I need a hotel in Paris.",
    "Find me a cheap flight to Rome.",
    "What is the weather like in London?",
    "Book a table for two at six.",
    "Play some music by Mozart.",
    "I want to rent a car in Berlin.",
    "Is there a bus to the airport?",
    "Show me events in San Jose.",
)
SETTINGS = TrainSettings(drafts=3, epochs=6, batch_size=2, starts=16, draft_vocab=512, held_out=0.25)
OPTIONS = EngineOptions(
    model=MODEL, dtype="float32", threads=1
)  # products are small: threads would wait for each other


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    with LLM(MODEL, dtype="float32", max_model_len=256, threads=1) as llm:
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        made = llm.chat(chats, temperature=0, max_tokens=24)
    return [Answer(one.prompt_ids, one.outputs[0].token_ids) for one in made]


@pytest.fixture(scope="module")
def target(answers: list[Answer]) -> Iterator[Target]:
    with closing(Target(OPTIONS, max(len(answer.tokens) for answer in answers))) as found:
        yield found


def trained(target: Target, answers: list[Answer], settings: TrainSettings, most: int | None = None) -> Training:
    learned, _ = held_out(answers, settings.held_out)
    net, drafted = begin(target, learned, settings)
    training = Training(net, target, learned, settings, drafted)
    training.run(lambda loss: loss.step != most)
    return training


@pytest.mark.parametrize("method", METHODS)
def test_the_engine_accepts_what_was_measured(
    method: str, target: Target, answers: list[Answer], tmp_path: Path
) -> None:
    """Prompts are read, drafts proposed and verified by the engine; training runs another program."""
    settings = replace(SETTINGS, method=method)
    losses: list[StepLoss] = []
    learned, kept = held_out(answers, settings.held_out)
    net, drafted = begin(target, learned, settings)
    Training(net, target, learned, settings, drafted).run(lambda loss: losses.append(loss) is None)
    assert len(losses) == losses[-1].steps == 18
    begun, ended = losses[0].by_draft, losses[-1].by_draft
    assert all(after < before for before, after in zip(begun, ended, strict=True))

    rounded(net)
    found = measure(net, target, kept + learned, drafted, room=24)
    write_head(tmp_path, net, target, drafted, 2048)
    told = {"method": method, "model": str(tmp_path), "num_speculative_tokens": settings.drafts, "adaptive": False}
    with LLM(MODEL, dtype="float32", max_model_len=256, threads=1, speculative_config=json.dumps(told)) as llm:
        prompts = [list(answer.prompt) for answer in kept + learned]
        given = llm.generate(prompts, temperature=0, max_tokens=24)
        accepted = llm.stats().accepted_tokens
        llm.generate(prompts, temperature=0, max_tokens=9)
        shorter = llm.stats().accepted_tokens - accepted
    cut = [replace(answer, answer=answer.answer[:9]) for answer in kept + learned]
    assert measure(net, target, cut, drafted, room=9).accepted[-1] == shorter > 0
    assert [one.outputs[0].token_ids for one in given] == [answer.answer for answer in kept + learned]
    assert found.accepted[-1] == accepted > 0


def test_what_was_interrupted_goes_on_to_the_same_weights(
    target: Target, answers: list[Answer], tmp_path: Path
) -> None:
    whole = trained(target, answers, SETTINGS)
    begun = trained(target, answers, SETTINGS, most=7)
    assert begun.done == 7
    begun.save(tmp_path / "state.npz", {"seed": 0})
    other = trained(target, answers, SETTINGS, most=1)
    with pytest.raises(ConfigError, match=r"other settings \(seed\)"):
        other.resume(tmp_path / "state.npz", {"seed": 1})
    other.resume(tmp_path / "state.npz", {"seed": 0})
    other.run(lambda _: True)
    for name, weight in whole.net.state_dict().items():
        assert torch.equal(weight, other.net.state_dict()[name]), name
    (tmp_path / "state.npz").write_bytes(b"no state")
    with pytest.raises(ConfigError, match="cannot be gone on with"):
        other.resume(tmp_path / "state.npz", {"seed": 0})


def test_answers_are_kept_up_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    kept = [Answer((1, 2), (3, 4)), Answer((5,), (6, 7))]
    AnswerFile(path).add(kept)
    with path.open("a") as file:
        file.write('{"prompt": [1')
    again = AnswerFile(path)
    assert again.answers == kept
    again.add([Answer((8,), (9, 9))])
    assert AnswerFile(path).answers == [*kept, Answer((8,), (9, 9))]
    path.write_text('{"prompt": ["x"], "answer": []}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        AnswerFile(path)


def test_answers_are_kept_in_the_parts_in_which_they_were_drawn(tmp_path: Path) -> None:
    """Part of a draw is drawn again as a whole, and another prompt's answer is left out with its part."""
    path, answers = tmp_path / "answers.jsonl", [Answer((one,), (one, one)) for one in range(6)]
    AnswerFile(path).add(answers[:5])
    file = AnswerFile(path)
    file.keep([answer.prompt for answer in answers], 2)
    assert file.answers == AnswerFile(path).answers == answers[:4]
    file.keep([answer.prompt for answer in answers[:3]], 2)
    assert file.answers == AnswerFile(path).answers == answers[:3]
    file.keep([(0,), (9,), (2,)], 2)
    assert file.answers == AnswerFile(path).answers == []


@pytest.mark.parametrize(
    ("family", "method", "told"),
    [
        ("mistral-sliding", "eagle3", "forgets what lies before its window"),
        ("mistral-sliding", "medusa", None),
        ("opt-projected", "p-eagle", "makes its logits of 20 elements and has 36"),
        ("gemma3", "eagle3", None),
    ],
)
def test_what_cannot_be_drafted_for_is_told_before_it_answers(
    family: str, method: str, told: str | None, tmp_path: Path
) -> None:
    tiny.save(family, tmp_path)
    with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
        check_drafted_for(EngineOptions(str(tmp_path), threads=1), method)


def test_what_is_held_out() -> None:
    answers = [Answer((1,), (index, index)) for index in range(40)] + [Answer((1,), (1,))]
    learned, kept = held_out(answers, 0.05)
    assert (len(learned), len(kept)) == (38, 2)
    assert not {answer.answer for answer in learned} & {answer.answer for answer in kept}
    with pytest.raises(ConfigError, match="1 of 2 answers have two tokens"):
        held_out(answers[-2:], 0.5)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"method": "x"}, "--method"), ({"drafts": 0}, "--drafts"), ({"learning_rate": 0.0}, "--learning-rate")],
)
def test_settings_that_cannot_be(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        replace(SETTINGS, **wrong)  # type: ignore[arg-type]
