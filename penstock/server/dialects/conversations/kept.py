"""Conversations as they are kept: found, added to and changed, also by several processes at once."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
from starlette.requests import Request

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.server.auth import owner_of
from penstock.server.body import translated
from penstock.server.dialects.responses.items import Item, checked_items, references
from penstock.server.errors import HttpError, bad_value
from penstock.server.store import Record, ResponseStore

_log = logging.getLogger("penstock.server")
_PREFIX = "conv_"


class Conversations:
    """The conversations of a store. Each is seen by its owner alone."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def found(self, owner: str, name: str) -> Record:
        """A conversation that is there; raises HttpError 404, or as `ResponseStore.put`."""
        return _there(name, await self._store.get(owner, name) if name.startswith(_PREFIX) else None)

    async def begin(self, request: Request, items: Sequence[Item], metadata: Mapping[str, str]) -> Item:
        """The object of a new conversation; raises RequestError for items that are not acceptable."""
        checked = await self._checked(request, items, Record({}, []))
        conversation: Item = {
            "id": f"{_PREFIX}{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": dict(metadata),
        }
        await self._store.put(owner_of(request), with_items(Record(conversation, []), checked))
        return conversation

    async def describe(self, owner: str, name: str, metadata: Mapping[str, str]) -> Item:
        """The object with other metadata; raises as `found`."""

        def described(record: Record) -> Record:
            return replace(record, object=record.object | {"metadata": dict(metadata)})

        return _there(name, await self._store.change(owner, name, described)).object

    async def add(self, request: Request, name: str, items: Sequence[Item]) -> list[Item]:
        """The items as they have been added; raises as `found`, and RequestError as `begin`."""
        owner = owner_of(request)
        checked = await self._checked(request, items, await self.found(owner, name))
        _there(name, await self._store.change(owner, name, lambda record: with_items(record, checked)))
        return checked

    async def remember(self, owner: str, name: str, items: Sequence[Item]) -> None:
        """Adds what a response has read and said; that it cannot be kept is logged, and loses no answer."""

        def remembered(record: Record) -> Record:
            there = {item["id"] for item in record.items}
            return with_items(record, [item for item in items if item["id"] not in there])

        try:
            await self._store.change(owner, name, remembered)
        except RequestError as error:
            _log.warning("a response is not added to %s: %s", name, error)

    async def without(self, owner: str, name: str, item_id: str) -> Item:
        """The object, after an item of it has been deleted; raises as `found`, and HttpError 404 without that item."""

        def shorter(record: Record) -> Record:
            item_of(record, item_id)
            return replace(record, items=[item for item in record.items if item["id"] != item_id])

        return _there(name, await self._store.change(owner, name, shorter)).object

    async def delete(self, owner: str, name: str) -> None:
        """Forgets a conversation and its items; raises as `found`."""
        await self.found(owner, name)
        await self._store.delete(owner, name)

    async def _checked(self, request: Request, items: Sequence[Item], earlier: Record) -> list[Item]:
        if not items:
            return []
        known = await self._store.items(owner_of(request), references(items), "items")
        name, size = uuid.uuid4().hex, earlier.size
        return await translated(request, checked_items, items, earlier.items, known, name, "items", besides=size)


def item_of(record: Record, item_id: str) -> Item:
    """An item of a conversation; raises HttpError 404."""
    for item in record.items:
        if item["id"] == item_id:
            return item
    raise HttpError(404, f"Item with id {format_value(item_id)} not found.", code="item_not_found")


def _there(name: str, record: Record | None) -> Record:
    if record is None:
        raise HttpError(404, f"Conversation with id {format_value(name)} not found.", code="conversation_not_found")
    return record


def with_items(record: Record, items: Sequence[Item], field: str = "items") -> Record:
    """A conversation with more items; raises RequestError for an id that is there, and for one that is full."""
    known = {item["id"] for item in record.items}
    for index, item in enumerate(items):
        if item["id"] in known:
            raise bad_value(f"{field}[{index}].id", item["id"], "an id that no other item of the conversation has")
        known.add(item["id"])
    joined = [*record.items, *items]
    if len(joined) > limits.MAX_MESSAGES:
        raise ParameterError(field, f"{len(joined)} with those that are there", f"at most {limits.MAX_MESSAGES}")
    size = len(msgspec.json.encode(joined))
    if size > limits.MAX_BODY_BYTES:
        allowed = f"at most {limits.MAX_BODY_BYTES}; begin another conversation"
        raise ParameterError(field, f"{size} bytes with those that are there", allowed)
    return replace(record, items=joined)
