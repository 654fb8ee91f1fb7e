"""Request bodies: read under limits, parsed strictly, validated with messages that name field, value and remedy."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive

from penstock.config import limits
from penstock.config.errors import OverloadedError, format_value
from penstock.server.differences import DIFFERENCES, without_differences
from penstock.server.errors import HttpError
from penstock.server.patience import patience
from penstock.server.refusals import refusal
from penstock.server.slots import note_slot
from penstock.server.spoken import SPOKEN, Dialect
from penstock.server.strict_json import parse_json

UPLOADS = "/api/blobs/"
"""Where files of models are sent, which are written to disk as they come."""
TURN = "penstock.turn"
"""Key, in a request's ASGI scope, of the lock of work on large bodies."""
PARSED = "penstock.parsed"
"""Key, in a request's ASGI scope, of what its body says, where that has been read already."""
_INLINE_BYTES = 16 * 2**10  # larger bodies are read and translated in a thread, so that running streams go on
_Made = TypeVar("_Made")
_Model = TypeVar("_Model", bound=BaseModel)


class BodyMemory:
    """What the bodies of all requests in flight take, which is bounded; small ones are always taken."""

    def __init__(self, processes: int = 1) -> None:
        """Each of so many processes has its share of the memory, which the longest body fits into."""
        self._held = 0
        self._processes = processes

    @property
    def _most(self) -> int:
        share = limits.MAX_BODIES_BYTES // self._processes
        return share if self._processes == 1 else max(limits.MAX_BODY_BYTES, share)

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """For as long as a request is in flight: what to call with the number of bytes that have come of its body.

        Raises:
            OverloadedError: from that call, if there is no room for them.
        """
        own = 0

        def grow(received: int) -> None:
            nonlocal own
            more = max(0, received - limits.SMALL_BODY_BYTES) - own
            if self._held + more > self._most:
                raise OverloadedError("Too many large request bodies are in flight; try again later.")
            self._held += more
            own += more

        try:
            yield grow
        finally:
            self._held -= own


def most_bytes(scope: Mapping[str, Any]) -> int:
    """How long the body of a request may be: files of models are longer than what is kept in memory."""
    is_file = scope["method"] == "POST" and scope["path"].startswith(UPLOADS)
    return limits.MAX_UPLOAD_BYTES if is_file else limits.MAX_BODY_BYTES


def limited(
    receive: Receive, declared: int | None, announced: Mapping[str, int], grow: Callable[[int], None], most: int
) -> Receive:
    """An ASGI `receive` that refuses a body which is too large (413, or 429 for all together) or too slow (408).

    Args:
        receive: the server's own.
        declared: the Content-Length, or None for a chunked body.
        announced: under "bytes", how long a chunked body will be at least, which is known as it comes in.
        grow: as `BodyMemory.request` gives it.
        most: bytes, as of `most_bytes`; a body that is no longer than others is kept in memory.
    """
    received = 0
    complete = False
    waited = 0.0

    def refuse() -> NoReturn:
        raise HttpError(413, f"The request body is larger than {most} bytes; send less.", code="body_too_large")

    async def bounded() -> Message:
        nonlocal received, complete, waited
        if complete:
            return await receive()
        if declared is not None and declared > most:
            refuse()
        try:
            allowed = limits.BODY_TIMEOUT_S + received / limits.SLOWEST_BODY_BYTES_PER_S
            async with patience(allowed - waited) as timer:
                message = await receive()
                waited += timer.elapsed()
        except TimeoutError:
            raise HttpError(408, "The request body came in too slowly; send it in one go.", code="timeout") from None
        received += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if max(received, announced.get("bytes", 0)) > most:
            refuse()
        if most == limits.MAX_BODY_BYTES:
            grow(received)
        return message

    return bounded


async def whole_body(request: Request) -> bytes:
    """All of a request's body; the pieces of a long one are put together beside the event loop."""
    if not hasattr(request, "_body"):  # where starlette keeps it
        pieces = [piece async for piece in request.stream() if piece]
        large = sum(map(len, pieces)) > _INLINE_BYTES and len(pieces) > 1
        request._body = await asyncio.to_thread(b"".join, pieces) if large else b"".join(pieces)
    return await request.body()


async def read_body(request: Request, model: type[_Model], *, any_type: bool = False, passing: bool = False) -> _Model:
    """What is in a body, checked against its schema; beside the event loop if that is large.

    Args:
        any_type: whatever content type it says to be.
        passing: fields that the schema does not have are passed over.

    Raises:
        HttpError: 415 for a content type other than JSON or a compressed body, 413, 408.
        RequestError: not UTF-8, not JSON, not an object, nested too deeply, with values JSON does not have, or with a
            field the schema does not allow.
    """
    check_type(request, any_type=any_type)
    raw = await whole_body(request)

    def read() -> _Model:
        data = request.scope.get(PARSED) or parse_json(raw)
        note_slot(request.scope, data)
        if passing:
            data = {name: data[name] for name in model.model_fields if name in data}
        return validate(model, data)

    return await translated(request, read)


class Marked(NamedTuple):
    """A body that is told by a field which no other body of its route has; and its dialect, if not its path's."""

    mark: str
    model: type[BaseModel]
    dialect: Dialect | None = None


async def read_either(request: Request, usual: type[BaseModel], *others: Marked) -> Any:
    """As `read_body`, of a route that several dialects have: an other body where there is its mark, else the usual."""
    check_type(request)
    raw = await whole_body(request)

    def read() -> BaseModel:
        data = parse_json(raw)
        for mark, model, dialect in others:
            if mark in data:
                if dialect is not None:
                    request.scope[SPOKEN] = dialect
                return validate(model, data)
        return validate(usual, data)

    return await translated(request, read)


async def translated(request: Request, work: Callable[..., _Made], *args: Any, besides: int = 0) -> _Made:
    """What `work` makes of these and a request's body; beside the event loop if that, or what is `besides`, is large.

    One such work is done at a time: it needs the interpreter's lock, for which the event loop would have to wait as
    many turns as there are others.
    """
    if len(await whole_body(request)) + besides <= _INLINE_BYTES:
        return work(*args)
    async with request.scope[TURN]:
        return await asyncio.to_thread(work, *args)


def check_type(request: Request, *, any_type: bool = False, allowed: tuple[str, ...] = ("application/json",)) -> None:
    """That a body is of a content type that a foreign page cannot send unasked, in UTF-8, and not compressed.

    Raises:
        HttpError: 415.
    """
    kind, _, options = request.headers.get("content-type", "").partition(";")
    if not any_type and kind.strip().lower() not in allowed:
        message = f"Content-Type is {format_value(kind.strip())}; allowed: {', '.join(allowed)}."
        raise HttpError(415, message, code="unsupported_media_type")
    charset = re.search(r'charset\s*=\s*"?([^\s";]+)', options, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        message = f"The charset is {format_value(charset[1])}; allowed: utf-8."
        raise HttpError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding is {format_value(encoding)}; allowed: identity. Send the body uncompressed."
        raise HttpError(415, message, code="unsupported_media_type")


def validate(model: type[_Model], data: dict[str, Any]) -> _Model:
    """Checks a body against its schema, after taking out the fields that do nothing here.

    Raises:
        RequestError: naming the first offending field, its value and what is allowed.
    """
    data = without_differences(model.__name__, data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        known = [*model.model_fields, *DIFFERENCES.get(model.__name__, ())]
        raise refusal(error, data, known) from None


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(map(_is_list, get_args(annotation)))


def read_query(model: type[_Model], request: Request) -> _Model:
    """Checks a query against its schema; a list is written as its name again and again, with `[]` behind it or without.

    Raises:
        RequestError: as `validate`.
    """
    if request.scope["query_string"].count(b"&") >= limits.MAX_QUERY_FIELDS:
        message = f"The query has more than {limits.MAX_QUERY_FIELDS} fields; send the ones the route knows."
        raise HttpError(400, message, code="invalid_query")
    given: dict[str, Any] = dict(request.query_params)
    for name, field in model.model_fields.items():
        values = [*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]")]
        if values and _is_list(field.annotation):
            given[name] = values
    return validate(model, given)
