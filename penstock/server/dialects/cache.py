"""/v1/cache: what KV caches hold and count; of a prompt, what would be found; prefixes that clients pin for a time."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.cache_asks import MOST_PIN_SECONDS, Ask, Pin
from penstock.config.errors import RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.core.policies.bounded_tier import TierCounters
from penstock.server.account import account_of
from penstock.server.active_call import ActiveCall
from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query, translated
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.conversation import checked_messages, checked_tools, prompted, template_kwargs
from penstock.server.document import asks, gives, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError
from penstock.server.metrics import EngineFigures
from penstock.server.shapes import Body, Messages, Name, Query, TokenIds, Tools

_PIN_SECONDS: Final = 3600.0
_CONFLICTS: Final = ("pins_full", "pin_exists")
_ONE: Final = SamplingParams(max_tokens=1, temperature=0.0)
_TEXT: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
_IDS: Final[dict[str, Any]] = {"type": "array", "minItems": 1}


class CachePrompt(Body):
    """A prompt, in text or token ids, or a chat in the model's own template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["prompt"],
                    "properties": {"prompt": {"anyOf": [_TEXT, _IDS]}, "messages": {"type": "null"}},
                },
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = None
    prompt: str | TokenIds | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None


class PinBody(CachePrompt):
    """POST /v1/cache/pins."""

    id: Name | None = None
    ttl: Annotated[float, Field(gt=0, le=MOST_PIN_SECONDS)] | None = None


class PinsQuery(Query):
    """Whose pins are meant, where there are several models."""

    model: Annotated[str, Field(max_length=512)] | None = None


def cache_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.get("/v1/cache", summary="What KV caches hold", openapi_extra=gives("application/json"))
    async def cache() -> Response:
        figures = await context.all_figures()
        return json_response({"object": "list", "data": [_told(*one) for one in figures.items() if one[1].cache]})

    @router.post("/v1/cache/match", summary="What of a prompt would be found", openapi_extra=takes(CachePrompt))
    async def match(request: Request) -> Response:
        body = await read_body(request, CachePrompt)
        model = await _ready(context, request, body.model)
        prompt = await translated(request, _prompt, body, owner_of(request), body.add_generation_prompt)
        found = await model.frontend.ask(prompt, Ask("match"))
        return json_response({"object": "cache.match", "model": model.model, **found})

    _pin_routes(router, context)
    return router


def _may_conflict(document: dict[str, Any]) -> dict[str, Any]:
    told = {"409": {"description": "There is no room for the pin, or you have one of its name."}}
    return {**document, "responses": {**document["responses"], **told}}


def _pin_routes(router: APIRouter, context: ServerContext) -> None:
    @router.post("/v1/cache/pins", summary="Pin a prefix for a time", openapi_extra=_may_conflict(takes(PinBody)))
    async def pin(request: Request) -> Response:
        body = await read_body(request, PinBody)
        model, owner = await _ready(context, request, body.model), owner_of(request)
        ask = Pin(body.id or f"pin-{uuid.uuid4().hex}", body.ttl or _PIN_SECONDS)
        prompt = await translated(request, _prompt, body, owner, bool(body.add_generation_prompt))
        cached = await _computed(request, model, replace(prompt, pin=ask))
        held = next((one for one in await _pins(model, owner) if one["id"] == ask.name), None)
        if held is None:
            told = "Nothing of this prompt could be pinned: what recurrent layers need of it was not kept. Try again."
            raise HttpError(409, told, code="not_pinned")
        return json_response({**held, "cached_tokens": cached})

    @router.get("/v1/cache/pins", summary="List your pins", openapi_extra=asks(PinsQuery))
    async def pins(request: Request) -> Response:
        model = await _ready(context, request, read_query(PinsQuery, request).model or None)
        return json_response({"object": "list", "data": await _pins(model, owner_of(request))})

    @router.delete("/v1/cache/pins/{pin_id}", summary="End a pin", openapi_extra=asks(PinsQuery))
    async def unpin(request: Request, pin_id: str) -> Response:
        model = await _ready(context, request, read_query(PinsQuery, request).model or None)
        answer = await model.frontend.ask(_nothing(owner_of(request)), Ask("unpin", pin_id))
        if not answer["deleted"]:
            raise HttpError(404, f"You have no pin {pin_id!r}.", param="id", code="pin_not_found")
        return json_response({"object": "cache.pin", "id": pin_id, "deleted": True})


async def _ready(context: ServerContext, request: Request, name: str | None) -> ModelContext:
    model = await context.model(request, name)
    model.require_ready()
    return model


def _prompt(body: CachePrompt, owner: str, generation_prompt: bool | None) -> GenerationRequest:
    """What a body's prompt is, as a request of its owner."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send exactly one of prompt and messages.", param="prompt", code="invalid_value")
    text, ids = (body.prompt, None) if isinstance(body.prompt, str) else (None, body.prompt)
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=_ONE,
        prompt=text,
        prompt_ids=None if ids is None else tuple(ids),
        messages=None if body.messages is None else checked_messages(body.messages),
        tools=checked_tools(body.tools),
        add_generation_prompt=prompted(generation_prompt, None),
        template_kwargs=template_kwargs(body.chat_template_kwargs, None),
        add_special_tokens=body.add_special_tokens,
        cache_salt=body.cache_salt or "",
        owner=owner,
    )


def _nothing(owner: str) -> GenerationRequest:
    """A request for what no prompt is about."""
    return GenerationRequest(uuid.uuid4().hex, _ONE, prompt_ids=(0,), owner=owner)


async def _computed(request: Request, model: ModelContext, asked: GenerationRequest) -> int:
    """Has a prompt computed, as far as it is not there; how many of its tokens were."""
    try:
        opening = ActiveCall.open(model, [asked], owner=asked.owner, account=account_of(request))
        call = await while_connected(opening, request.receive, model.lifecycle)
    except RequestError as error:
        if error.code in _CONFLICTS:
            raise HttpError(409, str(error), param=error.param, code=error.code) from None
        raise
    try:
        await while_connected(call.to_the_end(), request.receive, model.lifecycle)
    finally:
        await call.aclose()
    return call.cached_tokens


async def _pins(model: ModelContext, owner: str) -> list[dict[str, Any]]:
    answer = await model.frontend.ask(_nothing(owner), Ask("pins"))
    now = time.time()
    return [
        {
            "object": "cache.pin",
            "id": one["name"],
            "model": model.base,
            "tokens": one["tokens"],
            "expires_at": round(now + one["seconds"], 3),
        }
        for one in answer["pins"]
    ]


def _told(model: str, figures: EngineFigures) -> dict[str, Any]:
    stats = figures.stats
    below = {
        "places": stats.kv_below_places,
        "blocks": stats.kv_below_blocks,
        **asdict(TierCounters()),  # sums over restarts leave out what is 0
        **dict(stats.kv_below),
        "failed_loads": stats.failed_loads,
    }
    return {
        "model": model,
        "block_size": int(figures.cache["block_size"]),
        "blocks": {"total": stats.blocks_total, "used": stats.blocks_used, "cached": stats.blocks_cached},
        "prefixes": {
            "queried_tokens": stats.prefix_queries,
            "found_tokens": stats.prefix_hits,
            "misses": dict(stats.miss_reasons),
        },
        "below": below if stats.kv_below_places else None,
    }
