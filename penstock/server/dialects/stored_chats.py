"""Chat completions that are kept because their client asked for it (`store`), listed and found again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import format_value
from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query, validate
from penstock.server.dialects.openai.schema import ChatBody
from penstock.server.document import asks, gives, takes
from penstock.server.encoding import json_answer, json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.pages import PageQuery, page_of
from penstock.server.paths import CHAT
from penstock.server.shapes import Body, Metadata
from penstock.server.store import Record, ResponseStore

Keep = Callable[[dict[str, Any]], Awaitable[None]]
_PREFIX = "chatcmpl-"
_ROUTE = "/v1/chat/completions"
_LABEL = re.compile(r"metadata\[([^\[\]]{1,64})\]")
_TOLD: Mapping[str, str] = {
    name: {"input_user": "user"}.get(name, name)
    for name in (
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"),
        *("tools", "tool_choice", "input_user"),
    )
}
"""Fields of a kept chat that its request had, by their names there."""


class ChatsQuery(PageQuery):
    """GET /v1/chat/completions; besides, metadata[key]=value, up to 16 of them."""

    order: Literal["asc", "desc"] = "asc"
    model: str | None = None


class ChatMessagesQuery(PageQuery):
    """GET /v1/chat/completions/{completion_id}/messages."""

    order: Literal["asc", "desc"] = "asc"


class LabelsBody(Body):
    """What a kept chat is found by."""

    metadata: Metadata | None = None


class ChatUpdateBody(Body):
    """POST /v1/chat/completions/{completion_id}."""

    metadata: Metadata | None


class StoredChats:
    """The chats of a store. Each is seen by its owner alone."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def keeper(self, owner: str, body: ChatBody) -> Keep | None:
        """What keeps the answer to a body, None where it is not to be kept.

        Raises:
            RequestError: its metadata cannot be kept.
        """
        if not body.store:
            return None
        labels = validate(LabelsBody, {"metadata": body.metadata}).metadata or {}

        async def keep(answer: dict[str, Any]) -> None:
            told = {name: getattr(body, field) for name, field in _TOLD.items()}
            kept = {**answer, **told, "object": "chat.completion", "service_tier": "default", "metadata": labels}
            about = {"created": time.time(), "model": answer["model"], "metadata": labels}
            messages = [_kept_message(f"{answer['id']}-{index}", each) for index, each in enumerate(body.messages)]
            await self._store.keep(owner, Record(kept, messages, about=about))

        return keep

    async def found(self, owner: str, name: str) -> Record:
        """A chat that is there; raises HttpError 404, or as `ResponseStore.put`."""
        return _there(name, await self._store.get(owner, name))

    async def page(self, owner: str, query: ChatsQuery, metadata: Mapping[str, str]) -> dict[str, Any]:
        """A page of those with this model and metadata, shorter where they are large; raises as `page_of`."""
        names = await self._store.listed(owner, _PREFIX, query.model, metadata)
        page = await asyncio.to_thread(page_of, [{"id": name} for name in names], query)  # there may be many
        chats: list[dict[str, Any]] = []
        size = 0
        for entry in page["data"]:
            if size > limits.MAX_BODY_BYTES:
                return page | {"data": chats, "last_id": chats[-1]["id"], "has_more": True}
            record = await self._store.get(owner, entry["id"])
            if record is not None:  # it may have been deleted meanwhile
                chats.append(record.object)
                size += record.size
        return page | {"data": chats}

    async def describe(self, owner: str, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """The chat with other metadata; raises as `found`."""
        labels = {"metadata": dict(metadata)}

        def described(record: Record) -> Record:
            return replace(record, object=record.object | labels, about=(record.about or {}) | labels)

        return _there(name, await self._store.change(owner, name, described)).object

    async def delete(self, owner: str, name: str) -> None:
        """Forgets a chat; raises as `found`."""
        await self.found(owner, name)
        await self._store.delete(owner, name)


def _kept_message(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message of a prompt with its id; parts are told apart from the text they make."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        content = "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))
    return {**message, "id": name, "content": content, "content_parts": parts}


def _there(name: str, record: Record | None) -> Record:
    if record is None:
        raise HttpError(404, f"Chat completion with id {format_value(name)} not found.", code="chat_not_found")
    return record


def _labels(request: Request) -> dict[str, str]:
    """The metadata that a query asks for."""
    found = {match[1]: value for key, value in request.query_params.items() if (match := _LABEL.fullmatch(key))}
    if len(found) > 16:
        raise bad_value("metadata", f"{len(found)} pairs", "at most 16")
    return found


def stored_chats_router(chats: StoredChats) -> APIRouter:
    """The routes over one server's chats."""
    router, json = APIRouter(), gives("application/json")

    @router.get(_ROUTE, summary="Chats that were kept", openapi_extra=asks(ChatsQuery))
    async def listed(request: Request) -> Response:
        return await json_answer(await chats.page(owner_of(request), read_query(ChatsQuery, request), _labels(request)))

    @router.get(CHAT, summary="A chat that was kept", openapi_extra=json)
    async def retrieve(completion_id: str, request: Request) -> Response:
        return await json_answer((await chats.found(owner_of(request), completion_id)).object)

    @router.post(CHAT, summary="Change its metadata", openapi_extra=takes(ChatUpdateBody))
    async def update(completion_id: str, request: Request) -> Response:
        body = await read_body(request, ChatUpdateBody)
        return await json_answer(await chats.describe(owner_of(request), completion_id, body.metadata or {}))

    @router.delete(CHAT, summary="Delete a chat that was kept", openapi_extra=json)
    async def delete(completion_id: str, request: Request) -> Response:
        await chats.delete(owner_of(request), completion_id)
        return json_response({"id": completion_id, "object": "chat.completion.deleted", "deleted": True})

    @router.get(f"{CHAT}/messages", summary="The messages it answers", openapi_extra=asks(ChatMessagesQuery))
    async def messages(completion_id: str, request: Request) -> Response:
        record = await chats.found(owner_of(request), completion_id)
        return await json_answer(page_of(record.items, read_query(ChatMessagesQuery, request)))

    return router
