"""Moderations: how guards' answers are read, and the route through OpenAI's client."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.moderation.guards import CATEGORIES, GUARDS, Guard, Word, guard_of, of_labels, result
from tests.server.support import Running, running, script_of

TURN = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = {
    "Llama Guard": "Task: is there unsafe content?" + TURN,
    "Qwen3Guard": "unsafe content; Violent, Non-violent Illegal Acts" + TURN,
    "ShieldGemma": "You are a policy expert. " + TURN + "{{ guideline }}",
    "Granite Guardian": "{{ guardian_config.risk_name }}" + TURN,
}


def guard(name: str) -> Guard:
    return next(one for one in GUARDS if one.name == name)


def words(*pieces: str, at: int = 0, others: Sequence[tuple[str, float]] = ()) -> list[Word]:
    """Tokens of an answer, with alternatives (and their probabilities) for one of them."""
    told: list[Word] = [(piece, [(piece, 0.0)]) for piece in pieces]
    if others:
        told[at] = (pieces[at], [(text, math.log(p)) for text, p in others])
    return told


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_a_guard_is_known_by_its_template(name: str) -> None:
    found = guard_of({"default": TEMPLATES[name]})
    assert found is not None
    assert found.name == name
    assert guard_of({"default": TURN}) is None


def test_llama_guard() -> None:
    llama = guard("Llama Guard")
    (question,) = llama.questions
    others = [("un", 0.6), ("safe", 0.2), ("Hello", 0.1)]
    verdict = llama.read(words("\n\n", "un", "safe", "\n", "S1", ",", "S10", at=1, others=others), question)
    assert (verdict.flagged, round(verdict.score, 6)) == (True, 0.75)
    assert set(verdict.categories) == {"violence", "illicit/violent", "hate"}
    safe = llama.read(words("safe", others=[("safe", 0.9), ("un", 0.1)]), question)
    assert (safe.flagged, round(safe.score, 6)) == (False, 0.1)
    assert "violence" in safe.categories
    assert "harassment/threatening" not in safe.categories


@pytest.mark.parametrize(
    ("answer", "flagged", "score", "named"),
    [
        ("Safety: Unsafe\nCategories: Violent", True, 1.0, {"violence"}),
        ("Safety: Unsafe\nCategories: Non-violent Illegal Acts", True, 1.0, {"illicit"}),
        ("Safety: Controversial\nCategories: Sexual Content or Sexual Acts", False, 0.5, {"sexual"}),
        ("Safety: Unsafe\nCategories: Suicide & Self-Harm, PII", True, 1.0, {"self-harm", "illicit"}),
    ],
)
def test_qwen3guard(answer: str, flagged: bool, score: float, named: set[str]) -> None:
    qwen = guard("Qwen3Guard")
    head, _, rest = answer.partition(": ")
    verdict_word, _, more = rest.partition("\n")
    verdict = qwen.read(words(head + ":", " " + verdict_word, "\n" + more), qwen.questions[0])
    assert (verdict.flagged, verdict.score, set(verdict.categories)) == (flagged, score, named)


@pytest.mark.parametrize(
    ("name", "answer", "flagged"),
    [
        ("ShieldGemma", ["Yes"], True),
        ("ShieldGemma", ["No", ", it"], False),
        ("Granite Guardian", ["Yes", "\n", "<confidence>", " High"], True),
        ("Granite Guardian", ["<think>", "\n", "</think>", "\n", "<score>", " no", " ", "</score>"], False),
        ("Granite Guardian", ["<score>", " yes", " </score>"], True),
    ],
)
def test_guards_that_say_yes_or_no(name: str, answer: list[str], flagged: bool) -> None:
    one = guard(name)
    verdict = one.read(words(*answer), one.questions[0])
    assert (verdict.flagged, verdict.score) == (flagged, float(flagged))
    assert verdict.categories == one.questions[0].categories


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_what_is_no_verdict_flags(name: str) -> None:
    one = guard(name)
    verdict = one.read(words("I", " cannot", " say"), one.questions[0])
    assert (verdict.flagged, verdict.score) == (True, 1.0)


def test_labels_of_classifiers() -> None:
    told = result(of_labels(("toxic", "identity_hate", "colour"), (0.9, 0.2, 1.0)))
    assert told["flagged"]
    assert [name for name, on in told["categories"].items() if on] == ["harassment"]
    assert told["category_scores"]["hate"] == 0.2
    assert set(told["categories"]) == set(CATEGORIES)


@pytest.fixture(scope="module")
def guarded(text: TextPipeline) -> Iterator[Running]:
    with running(text.templated(TEMPLATES["Llama Guard"]), ServerOptions(moderation_model="scripted")) as server:
        yield server


def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("model", [None, "omni-moderation-latest", "scripted"])
def test_openais_client_is_answered(guarded: Running, text: TextPipeline, model: str | None) -> None:
    guarded.runner.script = script_of(text, "unsafe\nS4,S11")
    with client(guarded) as api:
        asked: dict[str, Any] = {} if model is None else {"model": model}
        told = api.moderations.create(input=["One", "Two"], **asked)
        parts = api.moderations.create(input=[{"type": "text", "text": "One"}], **asked)
    assert told.model == "scripted"
    assert len(told.results) == 2
    assert len(parts.results) == 1
    assert told.results[0].flagged
    assert told.results[0].categories.sexual_minors
    assert told.results[0].categories.self_harm
    assert not told.results[0].categories.hate
    assert 0 <= told.results[0].category_scores.self_harm <= 1
    assert told.results[0].category_applied_input_types.sexual == ["text"]
    guarded.until_idle()


def test_every_question_of_a_guard_is_asked(text: TextPipeline) -> None:
    with running(text.templated(TEMPLATES["ShieldGemma"])) as server, client(server) as api:
        server.runner.script = script_of(text, "No")
        (told,) = api.moderations.create(input="Hello").results
        assert not told.flagged
        assert len(server.runner.seen) == 4
        assert len({tuple(row.prompt_ids) for row in server.runner.seen}) == 4


def test_what_is_no_guard_is_refused(server: Running) -> None:
    with client(server) as api:
        with pytest.raises(openai.APIStatusError) as refused:
            api.moderations.create(input="Hello", model="omni-moderation-latest")
        assert (refused.value.status_code, refused.value.code) == (501, "no_guard_model")
        with pytest.raises(openai.NotFoundError):
            api.moderations.create(input="Hello", model="other")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ([], "input"),
        (["x", ""], "input[0].type"),
        (["x"] * 129, "input"),
        (7, "input"),
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], "input[0].type"),
        ([{"type": "text"}], "input[0].text"),
        ("word " * 5000, "input"),
    ],
)
def test_inputs_are_checked(guarded: Running, given: Any, param: str) -> None:
    with client(guarded) as api, pytest.raises(openai.BadRequestError) as refused:
        api.moderations.create(input=given)
    assert refused.value.param == param
