"""Python callables before and after a model: what a request asks, and what a whole answer says, as JSON objects."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.config.errors import ConfigError, PenstockError
from penstock.server.encoding import encode_json
from penstock.server.errors import HttpError
from penstock.server.middleware import COMPUTING
from penstock.server.strict_json import parse_json

Hook = Callable[[dict[str, Any]], object]
HOOKED: Final = COMPUTING | {"/v1/embeddings", "/api/embed"}
"""Paths whose bodies and answers go through hooks."""


def load_hook(named: str, flag: str) -> Hook:
    """The callable that is named `module:function`.

    Raises:
        ConfigError: there is none of that name.
    """
    module, _, function = named.partition(":")
    if not module or not function:
        raise ConfigError(f"{flag} is {named!r}; allowed: module:function.")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        where = "it has to be installed, or in a folder of PYTHONPATH"
        raise ConfigError(f"{flag} {named} is not there: {error}; {where}.") from None
    if not callable(found):
        raise ConfigError(f"{flag} {named} is no function.")
    hook: Hook = found
    return hook


@dataclass(slots=True)
class HookMiddleware:
    """ASGI middleware behind the one that checks keys and sizes.

    `before` gets the body of a request and gives the one that is asked instead; `after` gets the whole answer and gives
    what is told instead. Streams are told as they come. A ValueError of either is the client's: a 400 with its text.
    """

    app: ASGIApp
    before: Hook | None = None
    after: Hook | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in HOOKED:
            await self.app(scope, receive, send)
            return
        if self.before is not None:
            receive = await self._asked(self.before, receive)
        answer = _Answer(send) if self.after is not None else None
        await self.app(scope, receive, send if answer is None else answer.send)
        if self.after is not None and answer is not None and answer.begin is not None:
            told = await _called(self.after, json.loads(answer.body))
            await answer.tell(encode_json(told))

    async def _asked(self, hook: Hook, receive: Receive) -> Receive:
        """A `receive` that gives what the hook makes of the body; bodies that are no JSON object stay as they are."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return _then(message, receive)
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            asked = await asyncio.to_thread(parse_json, body)
        except PenstockError:  # which whoever reads it tells
            return _then({"type": "http.request", "body": body, "more_body": False}, receive)
        made = encode_json(await _called(hook, asked))
        return _then({"type": "http.request", "body": made, "more_body": False}, receive)


def _then(first: Message, receive: Receive) -> Receive:
    left = [first]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received


async def _called(hook: Hook, given: dict[str, Any]) -> dict[str, Any]:
    """What a hook makes of an object, in a thread of its own.

    Raises:
        HttpError: 400 with the text of its ValueError, 500 for anything else.
    """
    try:
        made = await asyncio.to_thread(hook, given)
    except ValueError as error:
        raise HttpError(400, str(error) or "The request was refused.", code="refused_by_hook") from None
    except Exception:
        logging.getLogger("penstock.server").exception("a hook failed")
        raise HttpError(500, "A hook of this server failed; its log says why.", code="hook_failed") from None
    if not isinstance(made, Mapping):
        logging.getLogger("penstock.server").error("a hook gave %s instead of an object", type(made).__name__)
        raise HttpError(500, "A hook of this server failed; its log says why.", code="hook_failed")
    return dict(made)


class _Answer:
    """Holds back a whole answer; anything else is sent on."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begin: Message | None = None
        self.body = b""

    async def send(self, message: Message) -> None:
        """An ASGI `send`."""
        if message["type"] == "http.response.start" and _is_whole(message):
            self.begin = message
        elif self.begin is not None and message["type"] == "http.response.body":
            self.body += message.get("body", b"")
        else:
            await self._send(message)

    async def tell(self, body: bytes) -> None:
        """Sends the answer that was held back with another body."""
        assert self.begin is not None
        MutableHeaders(raw=self.begin["headers"])["content-length"] = str(len(body))
        await self._send(self.begin)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


def _is_whole(message: Message) -> bool:
    kind = Headers(raw=message["headers"]).get("content-type", "")
    return message["status"] == 200 and kind.startswith("application/json")
