"""Pausing engines and forgetting what they have cached, as vLLM and SGLang name it; for all models that are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core.policies.pause import Control
from penstock.engine.api import EngineClient, EngineState
from penstock.host.entry import ModelState
from penstock.server.auth import AdminKeys
from penstock.server.body import read_body, read_query
from penstock.server.connected import cancel_all, while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.document import gives, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError
from penstock.server.shapes import Loose

_LOOK_S = 0.02  # between two looks at whether an engine has come to rest
_LOOKS = 50  # at an engine that does not seem to be paused, before it is thought to have been and to go on already
_COMING_TO_REST = (1, 3)
"""`EngineStats.paused` of an engine that answers whom it has before it rests."""
FROZEN = "frozen"
"""The code of the refusal where somebody else freezes an engine before it rests."""
_SGLANG = {"abort": Control.ABORT, "in_place": Control.KEEP, "retract": Control.RETRACT}


class PauseQuery(Loose):
    """POST /pause."""

    mode: Literal["abort", "wait", "keep"] = "abort"
    clear_cache: bool = True


class ResetQuery(Loose):
    """POST /reset_prefix_cache."""

    reset_running_requests: bool = False
    reset_external: bool = False


class PauseBody(Loose):
    """POST /pause_generation and /continue_generation."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class Engines:
    """The engines of a server, and what they are told by those who may."""

    def __init__(self, context: ServerContext, keys: AdminKeys) -> None:
        self._context = context
        self._keys = keys

    @asynccontextmanager
    async def clients(self, request: Request) -> AsyncIterator[list[EngineClient]]:
        """Those of all models that are loaded here; none of them is unloaded meanwhile.

        Raises:
            HttpError: the one model's engine is not there.
        """
        host, held = self._context.models.host, list[ModelContext]()
        try:
            if host is None:
                held.append(await self._context.model(request, None))
                held[0].require_ready()
            else:
                await host.refresh()
                names = [entry.name for entry in host.told() if entry.state is ModelState.READY]
                held += [await self._context.model(request, name) for name in names]
            yield [model.frontend.client for model in held if model.frontend.client.state is EngineState.READY]
        finally:
            for model in held:
                model.release()

    async def tell(self, request: Request, *controls: Control, rests: bool = False) -> None:
        """Tells all engines, and waits until they have heard it; with `rests` until nothing runs in them.

        Raises:
            HttpError: the key is not an administrator's; somebody else lets an engine go on, or freezes it, before it
                rests.
        """

        async def heard(client: EngineClient) -> None:
            for control in controls:
                client.control(control)
            left = _LOOKS
            while True:
                stats = await client.stats()
                if not rests or (stats.paused == 1 and not stats.running):
                    return
                left = 0 if stats.paused in _COMING_TO_REST else left - 1
                if left < 0:
                    raise _frozen() if stats.paused else _resumed()
                await asyncio.sleep(_LOOK_S)

        async def all_heard(clients: Sequence[EngineClient]) -> None:
            looking = [asyncio.ensure_future(heard(client)) for client in clients]
            try:
                await asyncio.gather(*looking)
            finally:
                await cancel_all(looking)

        self._keys.check_admin(request.headers)
        async with self.clients(request) as clients:
            await while_connected(all_heard(clients), request.receive, self._context.lifecycle)

    async def paused(self, request: Request) -> bool:
        """Whether all are paused."""
        async with self.clients(request) as clients:
            return bool(clients) and all([(await client.stats()).paused for client in clients])


def _resumed() -> HttpError:
    return HttpError(409, "The engine was let go on before it rested; pause it again.", code="resumed")


def _frozen() -> HttpError:
    told = "The engine was frozen (keep, in_place, retract) before it rested, so that what runs never ends"
    return HttpError(409, f"{told}; let it go on, or pause it again.", code=FROZEN)


def engine_control_router(context: ServerContext, keys: AdminKeys) -> APIRouter:
    """The routes over a server's engines."""
    router, engines = APIRouter(), Engines(context, keys)
    _add_vllm(router, engines)
    _add_sglang(router, engines)
    return router


def may_not_rest(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route that waits for engines to rest."""
    told = {"409": {"description": "Somebody let the engines go on, or froze them, before they rested."}}
    return {**document, "responses": {**document["responses"], **told}}


def _add_vllm(router: APIRouter, engines: Engines) -> None:
    @router.post("/pause", summary="Hold all engines still", openapi_extra=may_not_rest(gives("application/json")))
    async def pause(request: Request) -> Response:
        query = read_query(PauseQuery, request)
        control = Control(query.mode)
        await engines.tell(request, control, rests=control is not Control.KEEP)
        if query.clear_cache and control is not Control.KEEP:
            await engines.tell(request, Control.FLUSH)
        return json_response({"status": "paused"})

    @router.post("/resume", summary="Let all engines go on", openapi_extra=gives("application/json"))
    async def resume(request: Request) -> Response:
        await engines.tell(request, Control.RESUME)
        return json_response({"status": "resumed"})

    @router.get("/is_paused", summary="Whether all engines are paused", openapi_extra=gives("application/json"))
    async def is_paused(request: Request) -> Response:
        return json_response({"is_paused": await engines.paused(request)})

    @router.post("/reset_prefix_cache", summary="Forget cached prefixes", openapi_extra=gives("application/json"))
    async def reset(request: Request) -> Response:
        if read_query(ResetQuery, request).reset_running_requests:
            message = "reset_running_requests is true; allowed: false. What running requests hold is theirs."
            raise HttpError(400, message, param="reset_running_requests")
        await engines.tell(request, Control.FLUSH)
        return json_response({"status": "reset"})


def _add_sglang(router: APIRouter, engines: Engines) -> None:
    async def flush(request: Request) -> Response:
        await engines.tell(request, Control.FLUSH)
        return Response("Cache flushed.\n", media_type="text/plain")

    for add in (router.get, router.post):
        add("/flush_cache", summary="Forget cached prefixes", openapi_extra=gives("text/plain"))(flush)

    @router.post("/pause_generation", summary="Hold all engines still", openapi_extra=may_not_rest(takes(PauseBody)))
    async def pause_generation(request: Request) -> Response:
        control = _SGLANG[(await read_body(request, PauseBody)).mode]
        await engines.tell(request, control, rests=control is Control.ABORT)
        return json_response({"status": "ok", "message": "Generation is paused."})

    @router.post("/continue_generation", summary="Let all engines go on", openapi_extra=takes(PauseBody))
    async def continue_generation(request: Request) -> Response:
        await read_body(request, PauseBody)
        await engines.tell(request, Control.RESUME)
        return json_response({"status": "ok", "message": "Generation goes on."})
