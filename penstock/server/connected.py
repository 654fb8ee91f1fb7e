"""Work for a client who may leave before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.types import Message, Receive

from penstock.server.deadline import gone
from penstock.server.errors import not_ready
from penstock.server.lifecycle import Lifecycle

_Result = TypeVar("_Result")


async def cancel_all(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancels all and waits until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def disconnected(receive: Receive) -> Message:
    """Waits until the client has left: the message that says so."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    return message


async def while_connected(work: Coroutine[Any, Any, _Result], receive: Receive, lifecycle: Lifecycle) -> _Result:
    """The result of `work`, which is cancelled when the client leaves or the server aborts.

    Raises:
        ClientGone: the client left first.
        HttpError: 503, the server is aborting; 504, the request's deadline has passed.
    """
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(disconnected(receive))
    aborted = asyncio.ensure_future(lifecycle.aborted.wait())
    try:
        await asyncio.wait((task, left, aborted), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if left.done():
            raise gone(left.result())
        raise not_ready("The server is shutting down.", "shutting_down")
    finally:
        await cancel_all((task, left, aborted))
