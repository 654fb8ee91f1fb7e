"""POST /v1/responses/compact: a conversation summed up by the model that had it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import RequestError, param_names
from penstock.config.sampling import SamplingParams
from penstock.server.active_call import ActiveCall, complete, open_call
from penstock.server.body import read_body, translated
from penstock.server.dialects.responses.compaction import (
    SHARE,
    USERS_SHARE,
    newest_users,
    summary_request,
    unanswered,
)
from penstock.server.dialects.responses.composer import usage_of
from penstock.server.dialects.responses.items import Item, item_id
from penstock.server.dialects.responses.schema import CompactBody
from penstock.server.dialects.responses.service.fitting import shortened
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.responses.translate import prompt_request, sent_names
from penstock.server.document import takes
from penstock.server.opaque import content_of

_TOO_LONG = "The last turn of the conversation alone is longer than this model's context; shorten it."
_NOT_ASKED = {"tools": None, "tool_choice": None, "text": None}  # of the conversation; a summary is plain text


def add_compacting(router: APIRouter, responses: Responses) -> None:
    """The route, over one server's context."""
    context = responses.context

    @router.post("/v1/responses/compact", summary="Make a conversation short", openapi_extra=takes(CompactBody))
    async def compact(request: Request) -> Response:
        body = await read_body(request, CompactBody)
        model = await context.model(request, body.model)
        with param_names(sent_names(body)):
            most = max(1, (model.max_model_len() or 1) // SHARE)
            sampling = SamplingParams(temperature=0, max_tokens=most)
            prompt = await responses.prompt(request, body, sampling)
            model.require_ready()
            plain, items = body.model_copy(update=_NOT_ASKED), [*prompt.items, summary_request()]
            name = prompt.request.request_id
            asked = await translated(request, prompt_request, plain, items, name, sampling)
            asked = await shortened(model.frontend, replace(asked, owner=prompt.request.owner))
            if all(message["role"] == "system" for message in (asked.messages or ())[:-1]):
                raise RequestError(_TOO_LONG, param="input", code="context_length_exceeded")
            room = (model.max_model_len() or 1) // USERS_SHARE
            users = await asyncio.to_thread(newest_users, prompt.items, room, model.frontend.text.tokenizer.encode)
            active = await open_call(request, model, [asked])
        output = [*users, *unanswered(prompt.items)]
        return await complete(_compacted(active, output, name), active, request.receive, context.lifecycle)


async def _compacted(active: ActiveCall, stay: list[Item], name: str) -> dict[str, Any]:
    """The object: users' messages, a summary of all, and calls that wait for an output; all but the summary is given.

    Raises:
        RequestError: the model said nothing.
    """
    said: list[str] = []
    thought: list[str] = []
    tokens = reasoning = 0
    async for _, delta in active.deltas():
        said.append(delta.text)
        thought.append(delta.reasoning)
        tokens, reasoning = tokens + len(delta.token_ids), reasoning + delta.reasoning_tokens
    summary = "".join(said).strip() or "".join(thought).strip()
    if not summary:
        message = "The model said nothing when asked for a summary, and would again; ask another model, or send less."
        raise RequestError(message, param="input", code="empty_summary")
    item = {"id": item_id("compaction", name), "type": "compaction", "encrypted_content": content_of(summary)}
    users = [entry for entry in stay if entry["type"] == "message"]
    return {
        "id": f"resp_{name}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*users, item, *stay[len(users) :]],
        "usage": usage_of(active.prompt_tokens, active.cached_tokens, tokens, reasoning),
    }
