"""The routes of SGLang's sessions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.auth import owner_of
from penstock.server.body import read_body
from penstock.server.dialects.sglang.sessions.kept import Sessions
from penstock.server.dialects.sglang.sessions.schema import CloseSessionBody, OpenSessionBody
from penstock.server.document import takes
from penstock.server.encoding import json_response


def sessions_router(sessions: Sessions) -> APIRouter:
    """The routes over one server's sessions."""
    router = APIRouter()

    @router.post("/open_session", summary="Begin a session", openapi_extra=takes(OpenSessionBody))
    async def open_session(request: Request) -> Response:
        body = await read_body(request, OpenSessionBody)
        return json_response(await sessions.open(owner_of(request), body))

    @router.post("/close_session", summary="End a session", openapi_extra=takes(CloseSessionBody))
    async def close_session(request: Request) -> Response:
        body = await read_body(request, CloseSessionBody)
        await sessions.close(owner_of(request), body.session_id)
        return json_response(None)

    return router
