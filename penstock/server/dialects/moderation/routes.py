"""POST /v1/moderations."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import WithJsonSchema
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import ParameterError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.pooling import pool_all
from penstock.server import shapes
from penstock.server.active_call import ActiveCall, complete, open_call
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered
from penstock.server.dialects.moderation.guards import (
    Guard,
    Verdict,
    Word,
    guard_of,
    is_classifier,
    of_labels,
    result,
)
from penstock.server.document import takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.logprobs import alternatives

OPENAIS: Final = frozenset(
    (
        *("omni-moderation-latest", "omni-moderation-2024-09-26"),
        *("text-moderation-latest", "text-moderation-stable", "text-moderation-007"),
    )
)
"""OpenAI's names, which mean the server's own guard."""
_ALTERNATIVES = limits.MAX_TOP_LOGPROBS
_PARTS: dict[str, Any] = {"type": "array", "items": shapes.TEXT_PART, "minItems": 1}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": limits.MAX_MODERATED_TEXTS}


class ModerationBody(shapes.Body):
    """POST /v1/moderations."""

    input: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _PARTS]})]
    model: str | None = None


def texts_of(given: object) -> list[str]:
    """The texts of a body: one, many, or parts that make up one.

    Raises:
        RequestError: it is none of these, or has media.
    """
    if isinstance(given, str) and given:
        return [given]
    if isinstance(given, list) and given and all(isinstance(one, str) and one for one in given):
        if len(given) > limits.MAX_MODERATED_TEXTS:
            raise ParameterError("input", f"{len(given)} texts", f"at most {limits.MAX_MODERATED_TEXTS}")
        return given
    if not isinstance(given, list) or not given:
        raise bad_value("input", given, "a text, a list of texts, or a list of text parts, none of them empty")
    said = []
    for index, part in enumerate(given):
        where, kind = f"input[{index}]", part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad_value(f"{where}.type", kind, '"text": images are not looked at', "unsupported_content")
        if not isinstance(part.get("text"), str):
            raise bad_value(f"{where}.text", part.get("text"), "a string")
        said.append(part["text"])
    return ["\n".join(said)]


def moderation_router(context: ServerContext, guard_model: str | None) -> APIRouter:
    """The route over one server's context; `guard_model` is who is meant where a body names nobody, or OpenAI's own."""
    router = APIRouter()

    @router.post("/v1/moderations", summary="Whether texts are harmful", openapi_extra=takes(ModerationBody))
    async def moderations(request: Request) -> Response:
        body = await read_body(request, ModerationBody)
        asked = None if body.model in OPENAIS and body.model not in context.models.names() else body.model
        if asked is None and guard_model is None and context.models.host is not None:
            raise _no_guard("No guard model is named")
        model = await context.model(request, asked or guard_model)
        text = model.frontend.text
        guard = guard_of(text.template.sources if text.template else {})
        if guard is None and not is_classifier(text.pooling.labels):
            raise _no_guard(f"{model.model} is no guard model")
        texts = await translated(request, texts_of, body.input)
        model.require_ready()
        with param_names({"messages": "input", "prompt": "input"}):
            if guard is None:
                return await _classified(request, model, texts)
            requests = await translated(request, _asked, guard, texts, owner_of(request))
            active = await open_call(request, model, requests)
        judged = _judged(active, model, guard, len(texts))
        return await complete(judged, active, request.receive, context.lifecycle)

    return router


def _no_guard(why: str) -> HttpError:
    message = (
        f"{why}: serve Llama Guard, Qwen3Guard, ShieldGemma, Granite Guardian or a classifier of harmful texts, and "
        "name it in model, or by --moderation-model when the server is started."
    )
    return HttpError(501, message, param="model", code="no_guard_model")


def _asked(guard: Guard, texts: Sequence[str], owner: str) -> list[GenerationRequest]:
    """A chat for each question of each text."""
    sampling = SamplingParams(temperature=0, max_tokens=guard.tokens, logprobs=_ALTERNATIVES)
    return [
        GenerationRequest(
            request_id=uuid.uuid4().hex,
            sampling=sampling,
            messages=({"role": "user", "content": text},),
            template_kwargs=question.variables,
            owner=owner,
        )
        for text in texts
        for question in guard.questions
    ]


async def _judged(active: ActiveCall, model: ModelContext, guard: Guard, texts: int) -> dict[str, Any]:
    many = len(guard.questions)
    said: list[list[Word]] = [[] for _ in range(texts * many)]
    async for index, delta in active.deltas():
        said[index] += (_word(model, entry.token, alternatives(entry, _ALTERNATIVES)) for entry in delta.logprobs)
    verdicts = [guard.read(words, guard.questions[index % many]) for index, words in enumerate(said)]
    return _told(model, [verdicts[first : first + many] for first in range(0, len(verdicts), many)])


def _word(model: ModelContext, token: int, others: Sequence[tuple[int, float]]) -> Word:
    piece = model.frontend.piece
    return piece(token), [(piece(other), logprob) for other, logprob in others]


async def _classified(request: Request, model: ModelContext, texts: Sequence[str]) -> Response:
    pooling = model.frontend.text.pooling
    owner = owner_of(request)
    asked = [GenerationRequest(uuid.uuid4().hex, ONE_TOKEN, prompt=text, owner=owner) for text in texts]
    params = [replace(pooling.classification())] * len(asked)
    results = await answered(model, request, pool_all(model.frontend, asked, params, "input"))
    return json_response(_told(model, [of_labels(pooling.labels, each.values) for each in results]))


def _told(model: ModelContext, verdicts: Sequence[Sequence[Verdict]]) -> dict[str, Any]:
    return {"id": f"modr-{uuid.uuid4().hex}", "model": model.model, "results": [result(each) for each in verdicts]}
