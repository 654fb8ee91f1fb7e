"""An engine that gives back all it holds until it is woken, as vLLM and SGLang name it; of a server of one model."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import EngineDeadError, PenstockError
from penstock.core.policies.pause import Control
from penstock.engine.api import EngineState
from penstock.host.engine import RestingEngine
from penstock.server.auth import AdminKeys
from penstock.server.body import read_query
from penstock.server.context import ServerContext
from penstock.server.dialects.engine_control import FROZEN, Engines, may_not_rest
from penstock.server.document import asks, gives
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError, not_ready
from penstock.server.shapes import Loose

_SEVERAL = "A server of several models unloads those that are idle: --keep-alive, /models/unload."
_SHARED = "Its engine is used by several HTTP processes; start it without --api-server-count."


class SleepQuery(Loose):
    """POST /sleep."""

    level: Literal["1", "2"] = "1"
    mode: Literal["abort", "wait"] = "abort"


class _Sleeper:
    """Puts the one engine there is to sleep and wakes it, for those who may."""

    def __init__(self, context: ServerContext, keys: AdminKeys) -> None:
        self._context, self._keys = context, keys
        self._engines = Engines(context, keys)

    def client(self, request: Request) -> RestingEngine:
        """The engine; raises HttpError 501 where there is none that can sleep, and 403 for who may not tell it to."""
        self._keys.check_admin(request.headers)
        path = request.url.path
        if self._context.models.host is not None:
            raise HttpError(501, f"{path} is not available here. {_SEVERAL}", code="not_available")
        (client,) = self._context.models.engines().values()
        if not isinstance(client, RestingEngine) or not client.can_sleep:
            raise HttpError(501, f"{path} is not available here. {_SHARED}", code="not_available")
        return client

    async def sleep(self, request: Request, control: Control) -> None:
        """Returns once the engine holds nothing; requests that come while it comes to rest wait for it to wake."""
        client = self.client(request)
        if client.state is EngineState.SLEEPING:
            return
        try:
            await self._engines.tell(request, control, rests=True)
            await client.sleep()
        except BaseException as error:
            if not (isinstance(error, HttpError) and error.code == FROZEN):  # who froze it lets it go on
                client.control(Control.RESUME)
            raise

    async def wake(self, request: Request) -> None:
        """Returns once it is ready."""
        client = self.client(request)
        try:
            await client.wake()
        except EngineDeadError:
            raise
        except PenstockError as error:  # it may name paths
            raise not_ready("The engine could not be started again; its log says why.", "not_woken", 5) from error


def engine_sleep_router(context: ServerContext, keys: AdminKeys) -> APIRouter:
    """The routes over a server's engine."""
    router, sleeper = APIRouter(), _Sleeper(context, keys)

    @router.post("/sleep", summary="Give back all memory", openapi_extra=may_not_rest(asks(SleepQuery)))
    async def sleep(request: Request) -> Response:
        await sleeper.sleep(request, Control(read_query(SleepQuery, request).mode))
        return json_response({"status": "sleeping"})

    @router.get("/is_sleeping", summary="Whether the engine sleeps", openapi_extra=gives("application/json"))
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": context.models.state is EngineState.SLEEPING})

    async def wake(request: Request) -> Response:
        await sleeper.wake(request)
        return json_response({"status": "awake"})

    for path in ("/wake_up", "/resume_memory_occupation"):
        router.post(path, summary="Load the model again", openapi_extra=gives("application/json"))(wake)

    @router.post(
        "/release_memory_occupation",
        summary="Give back all memory, once requests are answered",
        openapi_extra=may_not_rest(gives("application/json")),
    )
    async def release(request: Request) -> Response:
        await sleeper.sleep(request, Control.WAIT)
        return json_response({"status": "sleeping"})

    return router
