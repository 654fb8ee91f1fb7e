"""What llama-server tells of itself: its properties, its slots and its adapters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock import __version__
from penstock.server.body import read_body, read_query
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.llama_server.schema import LlamaSampling, PropsBody
from penstock.server.dialects.llama_server.translate import sampling_of, settings_of, unsupported
from penstock.server.dialects.models import router_props
from penstock.server.document import asks, takes
from penstock.server.encoding import json_response
from penstock.server.errors import not_ready
from penstock.server.shapes import Query


class ModelQuery(Query):
    """Which model, of a server that has several."""

    model: str | None = None


class SlotsQuery(ModelQuery):
    """GET /slots."""

    fail_on_no_slot: Annotated[str, Field(max_length=16)] | None = None


def add_about(router: APIRouter, context: ServerContext) -> None:
    """The routes over one server's context."""

    async def model_of(request: Request, query: ModelQuery, *, or_asleep: bool = False) -> ModelContext:
        model = await context.model(request, query.model or None)
        model.require_ready(or_asleep=or_asleep)
        return model

    @router.get("/props", summary="What the server and its model are", openapi_extra=asks(ModelQuery))
    async def props(request: Request) -> Response:
        query = read_query(ModelQuery, request)
        if context.models.host is not None and not query.model:
            return json_response(router_props(context))
        return json_response(_props(await model_of(request, query, or_asleep=True), context))

    @router.post("/props", summary="Change what the server is", openapi_extra=takes(PropsBody))
    async def change_props(request: Request) -> Response:
        await read_body(request, PropsBody, any_type="origin" not in request.headers)
        if not context.changes_props:
            raise unsupported("This server's properties cannot be changed; start it with --props for clients that try.")
        return json_response({"success": True})

    @router.get("/slots", summary="How many sequences are computed", openapi_extra=asks(SlotsQuery))
    async def slots(request: Request) -> Response:
        if not context.shows_slots:
            raise unsupported("This server does not tell of its slots; start it without --no-slots.")
        query = read_query(SlotsQuery, request)
        model = await model_of(request, query)
        info, stats = model.frontend.info, await model.frontend.client.stats()
        if query.fail_on_no_slot and stats.running >= info.max_num_seqs:
            raise not_ready("No slot is free; retry shortly.", "no_slot")
        told = {"id_task": -1, "n_ctx": info.max_model_len, "speculative": info.drafts > 0}
        return json_response(
            [{"id": slot, **told, "is_processing": slot < stats.running} for slot in range(info.max_num_seqs)]
        )


def _props(model: ModelContext, context: ServerContext) -> dict[str, Any]:
    """The properties of a model; of its files nothing but the name is told."""
    frontend, body = model.frontend, LlamaSampling()
    text, info = frontend.text, frontend.info
    params = settings_of(body, sampling_of(body, frontend))
    sources = text.template.sources if text.template is not None else {}
    special = {
        f"{name}_token": "" if token is None else text.tokenizer.piece(token) or ""
        for name, token in (("bos", text.tokenizer.bos_id), ("eos", text.tokenizer.eos_id))
    }
    calls_tools = text.answers.calls is not None or text.answers.channels is not None
    tool_use = {"chat_template_tool_use": sources["tool_use"]} if "tool_use" in sources else {}
    return {
        "default_generation_settings": {"params": params, "n_ctx": info.max_model_len},
        "total_slots": info.max_num_seqs,
        "model_alias": model.model,
        "model_path": model.model,
        "modalities": {"vision": False, "audio": False},
        "endpoint_slots": context.shows_slots,
        "endpoint_props": context.changes_props,
        "endpoint_metrics": True,
        "webui": False,
        "chat_template": sources.get("default", ""),
        **tool_use,
        "chat_template_caps": {
            "supports_tools": calls_tools,
            "supports_tool_calls": calls_tools,
            "supports_system_role": "system" in sources.get("default", ""),
            "supports_thinking": text.answers.reasoning is not None or text.answers.channels is not None,
        },
        **special,
        "build_info": f"penstock-{__version__}",
        "is_sleeping": model.asleep,
    }
