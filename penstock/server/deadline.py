"""A request's own deadline: what nobody will wait for any more is not computed."""

from __future__ import annotations

import asyncio
import math
import re

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from penstock.config.errors import format_value
from penstock.server.errors import ClientGone, HttpError

DEADLINE = "penstock.deadline"
"""Key of an `http.disconnect` that says that time is up; the client is still there."""
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?|\.[0-9]{1,20}", re.ASCII)
_UNITS = (("x-request-timeout", 1.0), ("x-envoy-expected-rq-timeout-ms", 0.001))


def timeout_of(headers: Headers) -> float | None:
    """Seconds from now in which the whole answer is wanted, as the client or a proxy before the server says.

    Raises:
        HttpError: 400, it says so in other words.
    """
    for name, unit in _UNITS:
        if (text := headers.get(name)) is not None:
            seconds = float(text) * unit if _NUMBER.fullmatch(text) else math.nan
            if not seconds > 0:
                allowed = "a number of seconds above 0" if unit == 1.0 else "a number of milliseconds above 0"
                raise HttpError(
                    400, f"The header {name} is {format_value(text)}; allowed: {allowed}.", code="invalid_header"
                )
            return seconds
    return None


def until(receive: Receive, seconds: float | None) -> Receive:
    """An ASGI `receive` that says that the client has gone when time is up; before the body is there it raises that."""
    if seconds is None:
        return receive
    end, complete = asyncio.get_running_loop().time() + seconds, False

    async def bounded() -> Message:
        nonlocal complete
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            message = {"type": "http.disconnect", DEADLINE: seconds}
            if not complete:
                raise gone(message) from None
        complete = complete or not message.get("more_body", False)
        return message

    return bounded


def gone(message: Message) -> Exception:
    """What an `http.disconnect` means for the work it ends."""
    if DEADLINE not in message:
        return ClientGone()
    sentence = f"The answer was not complete within the {message[DEADLINE]:g} s that the request gives it."
    return HttpError(504, sentence, code="deadline_exceeded")
