"""SageMaker's two routes: /ping, and /invocations, whose bodies are those of the other routes, told by their fields."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.config.errors import RequestError
from penstock.engine.api import EngineState
from penstock.server.body import translated, whole_body
from penstock.server.context import ServerContext
from penstock.server.dialects.embeddings import EmbeddingBody
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.rerank import RerankBody, ScoreBody
from penstock.server.dialects.tgi.schema import TgiBody
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_response
from penstock.server.errors import not_ready
from penstock.server.spoken import SPOKEN, Dialect
from penstock.server.strict_json import parse_json

MARKS: Final = MappingProxyType(
    {
        "messages": "/v1/chat/completions",
        "prompt": "/v1/completions",
        "input": "/v1/embeddings",
        "inputs": "/",  # TGI's
        "documents": "/rerank",
        "text_1": "/score",
    }
)
"""By the field that tells a body, the route that answers it."""
_OTHERS = (CompletionBody, EmbeddingBody, TgiBody, RerankBody, ScoreBody)


class HandedOver(Response):
    """The answer of another route of this server to a body that has been read already."""

    def __init__(self, request: Request, path: str, body: bytes) -> None:
        super().__init__()
        self._request = request
        self._path = path
        self._sent = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = False

        async def again() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": self._sent, "more_body": False}

        inner: dict[str, Any] = {**scope, "path": self._path, "raw_path": self._path.encode()}
        await self._request.app.router(inner, again, send)


def sagemaker_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.get("/ping", summary="As /readyz, for SageMaker", openapi_extra=gives("application/json"))
    async def ping() -> Response:
        if context.models.state is not EngineState.READY or context.lifecycle.draining:
            raise not_ready("The server is not ready.", "not_ready")
        return json_response({"status": "ok"})

    @router.post(
        "/invocations",
        summary="A body of another route, told by its fields",
        openapi_extra=takes(ChatBody, EVENTS, others=_OTHERS),
    )
    async def invocations(request: Request) -> Response:
        raw = await whole_body(request)
        data = await translated(request, parse_json, raw)
        mark = next((mark for mark in MARKS if data.get(mark) is not None), None)
        if mark is None:
            told = ", ".join(f"{mark} ({path if path != '/' else 'TGI'})" for mark, path in MARKS.items())
            raise RequestError(f"The body has none of these fields: {told}; send one.", code="invalid_value")
        if mark == "inputs":
            request.scope[SPOKEN] = Dialect.TGI
        return HandedOver(request, MARKS[mark], raw)

    return router
