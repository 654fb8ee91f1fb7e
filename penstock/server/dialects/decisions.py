"""OpenAI's POST /v1/decisions: typed questions about an input, answered with probabilities instead of text.

Each question is a chat of its own: the input, then the question and its options, each behind a label that is one
token. The probabilities are those of the labels as the answer's first token, among the labels alone.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import ContextLengthError, ParameterError, RequestError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import WHOLE_VOCABULARY, check_mode
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.server.active_call import ActiveCall, complete, open_call
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.conversation import checked_messages
from penstock.server.dialects.responses.items import checked_items, messages_of
from penstock.server.document import takes
from penstock.server.errors import HttpError, bad_value
from penstock.server.logprobs import alternatives
from penstock.server.shapes import STRING, Body, an_object, or_null
from penstock.text.tokenizer import Tokenizer

Messages = tuple[dict[str, Any], ...]
_ITEM: dict[str, Any] = an_object({"role": {"enum": ["user", "system", "developer"]}, "content": STRING})
_INPUT: dict[str, Any] = {"anyOf": [STRING, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": 1000}]}
_TEXT_PART: dict[str, Any] = an_object({"type": {"const": "input_text"}, "text": STRING})
_INSTRUCTIONS: dict[str, Any] = {
    "anyOf": [{**STRING, "minLength": 1}, {"type": "array", "items": _TEXT_PART, "minItems": 1}]
}
Instructions = Annotated[Any, WithJsonSchema(_INSTRUCTIONS)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class PredicateQuestion(Body):
    """Whether a statement is true."""

    type: Literal["predicate"]
    instructions: Instructions
    name: Name | None = None


class ChoiceOption(Body):
    """One of a choice."""

    value: Annotated[str, Field(min_length=1)] | bool
    description: str | None = None


class ChoiceQuestion(Body):
    """One of several values."""

    type: Literal["choice"]
    instructions: Instructions
    choices: Annotated[list[ChoiceOption], Field(min_length=2, max_length=limits.MAX_DECISION_OPTIONS, fail_fast=True)]
    name: Name | None = None


class ScoreLevel(Body):
    """One of a scale."""

    label: Annotated[str, Field(min_length=1)]
    description: str | None = None


class ScoreQuestion(Body):
    """A level of a scale, the lowest first."""

    type: Literal["score"]
    instructions: Instructions
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=limits.MAX_DECISION_OPTIONS, fail_fast=True)]
    name: Name | None = None


Question = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")]


class DecisionBody(Body):
    """POST /v1/decisions."""

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    questions: Annotated[list[Question], Field(min_length=1, max_length=limits.MAX_QUESTIONS, fail_fast=True)]
    prompt_cache_key: str | None = None
    prompt_cache_options: Annotated[dict[str, Any] | None, WithJsonSchema(or_null({"type": "object"}))] = None
    safety_identifier: str | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question: what it says, and its options in words."""

    question: PredicateQuestion | ChoiceQuestion | ScoreQuestion
    text: str
    options: tuple[str, ...]


def decisions_router(context: ServerContext) -> APIRouter:
    """The route over one server's context."""
    router = APIRouter()
    labels_of = WeakKeyDictionary[Tokenizer, list[tuple[str, int]]]()  # found once: most names may be looked at

    @router.post("/v1/decisions", summary="How probable answers to questions are", openapi_extra=takes(DecisionBody))
    async def decisions(request: Request) -> Response:
        body = await read_body(request, DecisionBody)
        model = await context.model(request, body.model)
        model.require_ready()
        check_mode(model.frontend.info.logprobs_mode, "/v1/decisions")
        if model.frontend.text.template is None:
            told = f"{model.model} has no chat template, by which a question is asked; name a model that has one."
            raise HttpError(400, told, param="model", code="no_chat_template")
        messages, asked = await translated(request, _read, body)
        tokenizer = model.frontend.text.tokenizer
        if (labels := labels_of.get(tokenizer)) is None:
            labels = labels_of[tokenizer] = await _labels(model.frontend)
        wanted = max(len(each.options) for each in asked)
        if wanted > len(labels):
            allowed = f"at most {len(labels)}, of which each is one token here"
            raise ParameterError("questions", f"{wanted} options", allowed)
        with param_names({"messages": "input", "prompt": "input", "logprob_token_ids": "questions"}):
            active = await open_call(request, model, await _requests(request, model, messages, asked, labels))
        return await complete(_answers(active, model, asked), active, request.receive, context.lifecycle)

    return router


def _read(body: DecisionBody) -> tuple[Messages, list[_Asked]]:
    items = checked_items(_without_json(body.input), (), {}, uuid.uuid4().hex)
    messages = tuple(dict(message) for message in checked_messages(messages_of(items, None)))
    return messages, [_question(f"questions[{index}]", question) for index, question in enumerate(body.questions)]


def _without_json(given: Any) -> Any:
    """An input whose parts of JSON are texts; raises RequestError where one has none."""
    if not isinstance(given, list):
        return given
    return [
        {**item, "content": [_text_of(f"input[{at}].content[{i}]", part) for i, part in enumerate(item["content"])]}
        if isinstance(item, dict) and isinstance(item.get("content"), list)
        else item
        for at, item in enumerate(given)
    ]


def _text_of(where: str, part: Any) -> Any:
    if not isinstance(part, dict) or part.get("type") != "input_json":
        return part
    if "data" not in part:
        raise RequestError(f"{where}.data is required.", param=f"{where}.data", code="missing_required_parameter")
    return {"type": "input_text", "text": json.dumps(part.get("data"), ensure_ascii=False, separators=(",", ":"))}


def _question(where: str, question: PredicateQuestion | ChoiceQuestion | ScoreQuestion) -> _Asked:
    text = _instructions(f"{where}.instructions", question.instructions)
    if isinstance(question, PredicateQuestion):
        return _Asked(question, f"Is this true of the above? {text}", ("true", "false"))
    if isinstance(question, ScoreQuestion):
        return _Asked(question, text, tuple(_described(level.label, level.description) for level in question.levels))
    seen: set[tuple[type, str | bool]] = set()
    for index, option in enumerate(question.choices):
        if (value := (type(option.value), option.value)) in seen:
            raise bad_value(f"{where}.choices[{index}].value", option.value, "values that are all different")
        seen.add(value)
    return _Asked(question, text, tuple(_described(_word(each.value), each.description) for each in question.choices))


def _word(value: str | bool) -> str:
    return json.dumps(value) if isinstance(value, bool) else value


def _described(word: str, description: str | None) -> str:
    return f"{word}: {description}" if description else word


def _instructions(where: str, given: Any) -> str:
    """The text of a question, or of its parts."""
    if isinstance(given, str) and given:
        return given
    if not isinstance(given, list) or not given:
        raise bad_value(where, given, "a string or a list of text parts, not empty")
    for index, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "input_text" or not isinstance(part.get("text"), str):
            allowed = '"input_text": images are not looked at'
            raise bad_value(f"{where}[{index}].type", kind, allowed, "unsupported_content")
    return "\n".join(part["text"] for part in given)


def _names() -> Iterator[str]:
    """What options may be called: letters, then pairs of letters, then numbers."""
    yield from ascii_uppercase
    yield from map("".join, product(ascii_uppercase, repeat=2))
    yield from map(str, range(1, 1000))


async def _labels(frontend: Frontend) -> list[tuple[str, int]]:
    """Names of options, each with the one token that it is, up to as many as a question may have."""
    found: dict[int, str] = {}
    for name in _names():
        ids = await frontend.tokenize(
            GenerationRequest(uuid.uuid4().hex, SamplingParams(), prompt=name, add_special_tokens=False)
        )
        if len(ids) == 1:
            found.setdefault(ids[0], name)
        if len(found) == limits.MAX_DECISION_OPTIONS:
            break
    return [(label, token) for token, label in found.items()]


async def _requests(
    request: Request,
    model: ModelContext,
    messages: Messages,
    asked: Sequence[_Asked],
    labels: Sequence[tuple[str, int]],
) -> list[GenerationRequest]:
    """A chat for each question; one whose input does not fit is refused before it is written once for each of them.

    Raises:
        ContextLengthError: it does not.
    """

    def made(question: _Asked) -> GenerationRequest:
        used = labels[: len(question.options)]
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(token for _, token in used)
        )
        return GenerationRequest(
            request_id=uuid.uuid4().hex,
            sampling=sampling,
            messages=_chat(messages, question, [name for name, _ in used]),
            template_kwargs={"enable_thinking": False},
            owner=owner_of(request),
            decides=True,
        )

    first, room = made(asked[0]), model.frontend.info.max_model_len
    size = len(await model.frontend.tokenize(first))
    if size >= room:
        told = f"input has {size} tokens with the first question; this model's context is {room}."
        raise ContextLengthError(told, param="input")
    characters = sum(len(message.get("content") or "") for message in messages) * len(asked)
    if characters > limits.MAX_DECISION_CHARS:
        allowed = f"at most {limits.MAX_DECISION_CHARS // len(asked)} with {len(asked)} questions; ask fewer at once"
        raise ParameterError("input", f"{characters // len(asked)} characters", allowed)
    return [first, *map(made, asked[1:])]


def _chat(messages: Messages, asked: _Asked, names: Sequence[str]) -> Messages:
    """The input, and behind it the question: in the same turn where the input ends with one of the user's."""
    options = "\n".join(f"{name}. {option}" for name, option in zip(names, asked.options, strict=True))
    question = f"{asked.text}\n\n{options}\n\nAnswer with {names[0]} to {names[-1]}, and nothing else."
    last = messages[-1]
    if last["role"] != "user":
        return (*messages, {"role": "user", "content": question})
    return (*messages[:-1], {**last, "content": f"{last['content']}\n\n{question}"})


async def _answers(active: ActiveCall, model: ModelContext, asked: Sequence[_Asked]) -> dict[str, Any]:
    said: list[list[float]] = [[] for _ in asked]
    generated = 0
    async for index, delta in active.deltas():
        generated += len(delta.token_ids)
        if delta.logprobs:
            said[index] = _shares([value for _, value in alternatives(delta.logprobs[0], WHOLE_VOCABULARY)])
    read, cached = active.prompt_tokens, active.cached_tokens
    return {
        "model": model.model,
        "answers": [_answer(each.question, shares) for each, shares in zip(asked, said, strict=True)],
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + generated,
        },
    }


def _shares(logprobs: Sequence[float]) -> list[float]:
    """Probabilities among these alone; equal ones where none of them can be said."""
    largest = max(logprobs)
    if largest == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - largest) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def _answer(question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, shares: Sequence[float]) -> dict[str, Any]:
    if isinstance(question, PredicateQuestion):
        return {"type": "predicate", "name": question.name, "probability": shares[0]}
    best = max(range(len(shares)), key=shares.__getitem__)
    if isinstance(question, ChoiceQuestion):
        values = [option.value for option in question.choices]
        listed = [{"value": value, "probability": share} for value, share in zip(values, shares, strict=True)]
        told: dict[str, Any] = {"type": "choice", "choice": values[best], "probabilities": listed}
    else:
        labels = [level.label for level in question.levels]
        listed = [
            {"value": at, "label": label, "probability": share}
            for at, (label, share) in enumerate(zip(labels, shares, strict=True))
        ]
        score = math.fsum(at * share for at, share in enumerate(shares))
        told = {"type": "score", "score": score, "probabilities": listed}
    return {**told, "name": question.name, "confidence": shares[best]}
