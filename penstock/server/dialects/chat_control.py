"""What llama-server's clients tell a chat while it is answered: that it has reasoned enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.active_call import ActiveCall
from penstock.server.auth import owner_of
from penstock.server.body import read_body
from penstock.server.document import takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError
from penstock.server.orders import Orders
from penstock.server.shapes import Loose, Name

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


_ORDER: Final = "end the reasoning"


class ControlBody(Loose):
    """POST /v1/chat/completions/control."""

    id: Name
    action: Literal["reasoning_end"]
    model: str | None = None


class RunningChats:
    """The chats that this process answers now and whose clients asked for control, by owner and id."""

    def __init__(self) -> None:
        self._chats: dict[tuple[str, str], tuple[ActiveCall, Frontend]] = {}

    def add(self, owner: str, name: str, active: ActiveCall, frontend: Frontend) -> None:
        """One more, until it is closed; of several of one id the newest is meant."""
        chat = self._chats[owner, name] = active, frontend

        def remove() -> None:
            if self._chats.get((owner, name)) is chat:
                del self._chats[owner, name]

        active.at_end.append(remove)

    def end_reasoning(self, owner: str, name: str) -> bool:
        """Ends the reasoning of all answers to that chat; whether there is such a chat."""
        if (found := self._chats.get((owner, name))) is None:
            return False
        active, frontend = found
        for request in active.requests:
            frontend.client.end_reasoning(request.live_id)
        return True


def chat_control_router(running: RunningChats, orders: Orders) -> APIRouter:
    """The route over the chats that run, in whichever of the server's processes."""
    router = APIRouter()
    orders.learn(_ORDER, running.end_reasoning)

    @router.post("/v1/chat/completions/control", summary="End a chat's reasoning", openapi_extra=takes(ControlBody))
    async def control(request: Request) -> Response:
        body = await read_body(request, ControlBody, any_type="origin" not in request.headers)
        if not any(await orders.give(_ORDER, owner_of(request), body.id)):
            raise HttpError(
                404,
                f"No chat {body.id} is being answered whose request has reasoning_control: true.",
                param="id",
                code="chat_not_running",
            )
        return json_response({"id": body.id, "action": body.action, "success": True})

    return router
