"""The routes of the Conversations API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query
from penstock.server.dialects.conversations.kept import Conversations, item_of
from penstock.server.dialects.conversations.schema import (
    ConversationBody,
    ConversationItemsBody,
    ConversationItemsQuery,
    ConversationUpdateBody,
)
from penstock.server.document import asks, gives, takes
from penstock.server.encoding import json_answer, json_response
from penstock.server.pages import page_of
from penstock.server.paths import CONVERSATION

_JSON = gives("application/json")


def conversations_router(conversations: Conversations) -> APIRouter:
    """The routes over one server's conversations."""
    router = APIRouter()

    @router.post("/v1/conversations", summary="Begin a conversation", openapi_extra=takes(ConversationBody))
    async def begin(request: Request) -> Response:
        body = await read_body(request, ConversationBody)
        return json_response(await conversations.begin(request, body.items or (), body.metadata or {}))

    @router.get(CONVERSATION, summary="A conversation", openapi_extra=_JSON)
    async def retrieve(conversation_id: str, request: Request) -> Response:
        return json_response((await conversations.found(owner_of(request), conversation_id)).object)

    @router.post(CONVERSATION, summary="Change its metadata", openapi_extra=takes(ConversationUpdateBody))
    async def update(conversation_id: str, request: Request) -> Response:
        body = await read_body(request, ConversationUpdateBody)
        return json_response(await conversations.describe(owner_of(request), conversation_id, body.metadata or {}))

    @router.delete(CONVERSATION, summary="Delete a conversation", openapi_extra=_JSON)
    async def delete(conversation_id: str, request: Request) -> Response:
        await conversations.delete(owner_of(request), conversation_id)
        return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})

    _item_routes(router, conversations)
    return router


def _item_routes(router: APIRouter, conversations: Conversations) -> None:
    items, one = f"{CONVERSATION}/items", f"{CONVERSATION}/items/{{item_id}}"

    @router.post(items, summary="Add items to a conversation", openapi_extra=takes(ConversationItemsBody))
    async def add(conversation_id: str, request: Request) -> Response:
        body = await read_body(request, ConversationItemsBody)
        added = await conversations.add(request, conversation_id, body.items)
        ids: dict[str, Any] = {"first_id": added[0]["id"], "last_id": added[-1]["id"]}
        return await json_answer({"object": "list", "data": added, **ids, "has_more": False})

    @router.get(items, summary="The items of a conversation", openapi_extra=asks(ConversationItemsQuery))
    async def listed(conversation_id: str, request: Request) -> Response:
        record = await conversations.found(owner_of(request), conversation_id)
        return await json_answer(page_of(record.items, read_query(ConversationItemsQuery, request)))

    @router.get(one, summary="An item of a conversation", openapi_extra=_JSON)
    async def item(conversation_id: str, item_id: str, request: Request) -> Response:
        return await json_answer(item_of(await conversations.found(owner_of(request), conversation_id), item_id))

    @router.delete(one, summary="Delete an item of a conversation", openapi_extra=_JSON)
    async def delete_item(conversation_id: str, item_id: str, request: Request) -> Response:
        return json_response(await conversations.without(owner_of(request), conversation_id, item_id))
