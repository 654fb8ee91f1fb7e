"""Slots as llama-server's clients save, restore and erase them: POST /slots/{id_slot}?action=…"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.account import account_of
from penstock.server.active_call import ActiveCall
from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.llama_server.translate import unsupported
from penstock.server.document import asks, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.shapes import Loose, Query
from penstock.server.slots import SlotKey, Slots

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_FOLDER = "This server does not save slots; start it with --slot-save-path FOLDER."


class SlotQuery(Query):
    """POST /slots/{id_slot}."""

    action: Literal["save", "restore", "erase"]
    model: Annotated[str, Field(max_length=512)] | None = None


class SlotBody(Loose):
    """POST /slots/{id_slot}, where it is saved or restored."""

    filename: Annotated[str, Field(min_length=1, max_length=127)]


def slots_router(context: ServerContext) -> APIRouter:
    """The route over one server's context."""
    router = APIRouter()

    @router.post(
        "/slots/{id_slot}",
        summary="Save, restore or erase a slot",
        openapi_extra=takes(SlotBody) | asks(SlotQuery),
    )
    async def slot_action(request: Request, id_slot: str) -> Response:
        slots = context.lifecycle.slots
        if slots is None:
            raise unsupported(_NO_FOLDER)
        query = read_query(SlotQuery, request)
        told = None if query.action == "erase" else await read_body(request, SlotBody, any_type=_is_local(request))
        model = await context.model(request, query.model or None)
        model.require_ready()
        most = model.frontend.info.max_num_seqs
        if not re.fullmatch(r"\d{1,9}", id_slot) or int(id_slot) >= most:
            raise bad_value("id_slot", id_slot, f"0 to {most - 1}, the slots of GET /slots")
        key = SlotKey(owner_of(request), model.base, int(id_slot))
        if told is None:
            return json_response({"id_slot": key.number, "n_erased": slots.erase(key)})
        act = _save if query.action == "save" else _restore
        return json_response(
            {"id_slot": key.number, "filename": told.filename} | await act(request, slots, key, model, told.filename)
        )

    return router


def _is_local(request: Request) -> bool:
    """Whether no page sent it, whose browser would have asked before it sends JSON."""
    return "origin" not in request.headers


def _facts(model: ModelContext) -> Mapping[str, Any]:
    """What tells a file of this model from those of others."""
    info = model.frontend.info
    return {"model": model.base, "architecture": info.architecture, "vocab_size": info.vocab_size}


async def _save(request: Request, slots: Slots, key: SlotKey, model: ModelContext, name: str) -> dict[str, Any]:
    began, tokens = time.monotonic(), slots.get(key)
    if not tokens:
        raise HttpError(
            400, f"Slot {key.number} has nothing of yours to save; send a request with id_slot {key.number} first.",
            param="id_slot", code="empty_slot",
        )  # fmt: skip
    written = await asyncio.to_thread(slots.files.write, key.owner, name, _facts(model), tokens)
    return {"n_saved": len(tokens), "n_written": written, "timings": {"save_ms": _ms(began)}}


async def _restore(request: Request, slots: Slots, key: SlotKey, model: ModelContext, name: str) -> dict[str, Any]:
    began, most = time.monotonic(), model.frontend.info.max_model_len - 1
    tokens, read = await asyncio.to_thread(slots.files.read, key.owner, name, _facts(model), most)
    again = GenerationRequest(uuid.uuid4().hex, SamplingParams(max_tokens=1), prompt_ids=tuple(tokens))
    opening = ActiveCall.open(model, [again], owner=key.owner, account=account_of(request))
    call = await while_connected(opening, request.receive, model.lifecycle)
    try:
        await while_connected(call.to_the_end(), request.receive, model.lifecycle)
    finally:
        await call.aclose()
    slots.put(key, tokens)
    return {"n_restored": len(tokens), "n_read": read, "timings": {"restore_ms": _ms(began)}}


def _ms(began: float) -> float:
    return (time.monotonic() - began) * 1000
