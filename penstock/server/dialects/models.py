"""The list of models, in the form of OpenAI or, for clients that name an `anthropic-version`, of Anthropic."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.context import ServerContext
from penstock.server.document import gives
from penstock.server.encoding import json_response
from penstock.server.errors import Dialect, dialect_of_scope


def models_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router, created = APIRouter(), int(time.time())

    def described(request: Request) -> dict[str, Any]:
        if dialect_of_scope(request.scope) is Dialect.ANTHROPIC:
            since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            names = {"id": context.model, "type": "model", "display_name": context.model}
            most = dict.fromkeys(("max_input_tokens", "max_tokens"), context.max_model_len())
            return {**names, "created_at": since, "lifecycle": "active", "capabilities": None, **most}
        about = {"id": context.model, "object": "model", "created": created, "owned_by": "penstock"}
        return {**about, "root": context.model, "parent": None, "max_model_len": context.max_model_len()}

    @router.get("/v1/models", summary="List the models served", openapi_extra=gives("application/json"))
    async def models(request: Request) -> Response:
        listed: dict[str, Any] = {"object": "list", "data": [described(request)]}
        if dialect_of_scope(request.scope) is Dialect.ANTHROPIC:
            ends = {"first_id": context.model, "last_id": context.model}
            listed = {"data": listed["data"], "has_more": False, **ends}
        return json_response(listed)

    @router.get("/v1/models/{model:path}", summary="Describe a model", openapi_extra=gives("application/json"))
    async def model(request: Request, model: str) -> Response:
        context.check_model(model)
        return json_response(described(request))

    return router
