"""Decisions: through OpenAI's own client, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import openai
import pytest

from penstock.config import limits
from penstock.config.generation import GenerationRequest
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running

PREDICATE = {"type": "predicate", "name": "polite", "instructions": "The guest is polite."}
CHOICE = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which meal is it?"}],
    "choices": [{"value": "true"}, {"value": True, "description": "after five"}, {"value": "lunch"}],
}
SCORE = {"type": "score", "instructions": "How content?", "levels": [{"label": "not"}, {"label": "very"}]}
E_OF = [math.exp(-place) for place in range(3)]
"""What the scripted engine's log-probabilities of the names of options come to: -1, -2, -3."""


def ask(server: Running, **body: Any) -> httpx.Response:
    whole = {"input": "Hello", "questions": [PREDICATE], **body}
    return httpx.post(f"{server.url}/v1/decisions", json=whole, timeout=60)


def test_openais_client_is_answered(server: Running) -> None:
    said: Any = [
        {"role": "user", "content": [{"type": "input_json", "data": {"guests": 4}}]},
        {"role": "assistant", "content": "Gladly."},
        {"role": "user", "content": "At seven."},
    ]
    questions: Any = [PREDICATE, CHOICE, SCORE]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        decision = api.decisions.create(model="scripted", input=said, questions=questions, safety_identifier="me")
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate"
    assert (predicate.name, predicate.probability) == ("polite", pytest.approx(E_OF[0] / sum(E_OF[:2])))
    assert choice.type == "choice"
    assert (choice.choice, choice.name) == ("true", None)
    assert [one.value for one in choice.probabilities] == ["true", True, "lunch"]
    shares = [weight / sum(E_OF) for weight in E_OF]
    assert [one.probability for one in choice.probabilities] == pytest.approx(shares)
    assert choice.confidence == pytest.approx(shares[0])
    assert score.type == "score"
    assert score.score == pytest.approx(E_OF[1] / sum(E_OF[:2]))
    assert [(one.value, one.label) for one in score.probabilities] == [(0, "not"), (1, "very")]
    assert decision.usage.output_tokens == len(questions)


def test_the_question_is_in_the_turn_that_is_asked_of(server: Running, text: TextPipeline) -> None:
    assert ask(server, input="The soup was cold.", questions=[CHOICE]).status_code == 200
    (seen,) = server.runner.seen
    prompt = text.tokenizer.decode(seen.prompt_ids)
    said = "The soup was cold.\n\nWhich meal is it?\n\nA. true\nB. true: after five\nC. lunch\n\nAnswer with A to C"
    assert said in prompt
    assert seen.sampling.logprob_token_ids == tuple(
        text.tokenizer.encode(name, add_special_tokens=False)[0] for name in "ABC"
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "noul"}]}, "questions[0]"),
        ({"questions": [PREDICATE] * (limits.MAX_QUESTIONS + 1)}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]}, "questions[0].choices[1].value"),
        (
            {"questions": [{**PREDICATE, "instructions": [{"type": "image"}]}]},
            "questions[0].instructions[0].type",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": "word " * 5000}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_refusals_name_what_is_wrong(server: Running, body: dict[str, Any], param: str) -> None:
    answer = ask(server, **body)
    assert answer.status_code == 400, json.dumps(answer.json())
    assert answer.json()["error"]["param"] == param


def test_names_of_options_are_looked_for_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """This vocabulary has fewer than a question may have, so that all are looked at; and more than are served here."""
    plain, calls = Frontend.tokenize, []

    def counted(self: Frontend, request: GenerationRequest) -> Any:
        calls.append(request)
        return plain(self, request)

    monkeypatch.setattr(Frontend, "tokenize", counted)
    choices = [{"value": str(number)} for number in range(limits.MAX_DECISION_OPTIONS)]
    for most in (10_000, 4):
        calls.clear()
        answer = ask(server, questions=[{**CHOICE, "choices": choices}])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "questions"
        assert "255 options" in answer.json()["error"]["message"]
        assert len(calls) <= most


def test_more_options_than_alternatives_are_told_of_a_token(server: Running) -> None:
    """--max-logprobs bounds what clients ask of tokens, not how many options a question has."""
    choices = [{"value": f"dish {number}"} for number in range(40)]
    told = ask(server, questions=[{"type": "choice", "instructions": "Which?", "choices": choices}])
    assert told.status_code == 200, told.text
    assert len(told.json()["answers"][0]["probabilities"]) == 40


def test_json_parts_have_data(server: Running) -> None:
    for part, status in (({}, 400), ({"data": None}, 200)):
        said = [{"role": "user", "content": [{"type": "input_json", **part}]}]
        answer = ask(server, input=said)
        assert answer.status_code == status, answer.text
    assert ask(server, input=[{"role": "user", "content": [{"type": "input_json"}]}]).json()["error"]["param"] == (
        "input[0].content[0].data"
    )
