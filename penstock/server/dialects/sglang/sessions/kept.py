"""Sessions as they are kept: each of one owner, for a time, in the store of what clients come back to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.server.active_call import ActiveCall
from penstock.server.dialects.sglang.schema import SglangBody
from penstock.server.dialects.sglang.sessions.history import (
    Node,
    going_on_from,
    replaced,
    tokens_of,
    with_output,
    with_request,
)
from penstock.server.dialects.sglang.sessions.schema import OpenSessionBody, SessionParams
from penstock.server.errors import HttpError
from penstock.server.store import Record, ResponseStore

_PREFIX: Final = "sglang-session-"
_FIELD: Final = "session_params.id"
End = Callable[[str], Awaitable[None]]
"""Ends a running request, by its id."""


class NoSession:
    """What a request without a session has to do with one: nothing.

    Attributes:
        body: the call as it is translated.
    """

    def __init__(self, body: SglangBody) -> None:
        self.body = body

    async def opened(self, opening: Awaitable[ActiveCall], end: End) -> ActiveCall:
        """The call once it is opened, with which the request is one of its session; `end` ends what it replaces."""
        active = await opening
        try:
            await self.begin(end)
        except BaseException:
            await active.aclose()
            raise
        return active

    async def begin(self, end: End) -> None:
        """The request is computed from now on."""

    async def end(self, output: Sequence[int]) -> None:
        """It has ended with this answer."""


@dataclass(slots=True)
class _Turn(NoSession):
    """A request of a session."""

    body: SglangBody
    store: ResponseStore
    owner: str
    params: SessionParams
    node: Node

    async def begin(self, end: End) -> None:
        running: list[str] = []

        def begun(record: Record) -> Record:
            _check_alive(record, self.params.id)
            nodes, ended = replaced(record.items, self.params)
            going_on_from(nodes, self.params)
            running.extend(ended)
            nodes = with_request(nodes, self.node, record.object["capacity"])
            return replace(record, items=nodes, object=_used(record))

        if await self.store.change(self.owner, _name(self.params.id), begun) is None:
            raise _unknown(self.params.id)
        for rid in running:
            await end(rid)

    async def end(self, output: Sequence[int]) -> None:
        def ended(record: Record) -> Record:
            return replace(record, items=with_output(record.items, self.node["rid"], output), object=_used(record))

        await self.store.change(self.owner, _name(self.params.id), ended)


class Sessions:
    """The sessions of a store. Each is seen by its owner alone."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def open(self, owner: str, body: OpenSessionBody) -> str:
        """The id of a new one.

        Raises:
            HttpError: 400, there is one of that id.
        """
        session = body.session_id or uuid.uuid4().hex
        record = await self._store.get(owner, _name(session))
        if record is not None and record.object["until"] > time.time():
            raise HttpError(400, f"The session {format_value(session)} is open; close it first.", param="session_id")
        about = {"capacity": body.capacity_of_str_len, "timeout": body.timeout, "id": _name(session)}
        await self._store.put(owner, Record(about | {"until": _until(body.timeout)}, []))
        return session

    async def close(self, owner: str, session: str) -> None:
        """Ends one; of others nothing is said, as in SGLang."""
        await self._store.delete(owner, _name(session))

    async def take(self, owner: str, body: SglangBody, frontend: Frontend) -> NoSession:
        """What a call has to do with a session, and the call with all its tokens.

        Raises:
            RequestError: there is no such session or request, or the call has several prompts or answers.
        """
        params = body.session_params
        if params is None or params.id is None:
            return NoSession(body)
        own = await _tokens(body, frontend)
        record = await self._store.get(owner, _name(params.id))
        if record is None:
            raise _unknown(params.id)
        _check_alive(record, params.id)
        parent = going_on_from(record.items, params)
        history = tokens_of(record.items, parent, output=not params.drop_previous_output)
        if parent is not None and own[:1] == [frontend.text.tokenizer.bos_id]:
            del own[0]
        kept = history[: params.offset] if params.offset else history
        rid = body.rid if isinstance(body.rid, str) else uuid.uuid4().hex
        node = {"rid": rid, "parent": params.rid, "kept": len(kept), "own": own, "output": None}
        whole = body.model_copy(update={"text": None, "input_ids": kept + own, "rid": rid})
        return _Turn(whole, self._store, owner, params, node)


async def _tokens(body: SglangBody, frontend: Frontend) -> list[int]:
    """The one prompt of a call of a session, which may be nothing new."""
    params = body.sampling_params
    several = isinstance(body.rid, list) or isinstance(params, list) or (params is not None and (params.n or 1) > 1)
    if several or (isinstance(body.text, list) or (isinstance(body.input_ids, list) and [] in body.input_ids)):
        raise ParameterError("session_params", "a session", "one prompt and one answer with it")
    if body.input_ids is not None and body.text is None:
        if not all(isinstance(token, int) for token in body.input_ids):
            raise ParameterError("session_params", "a session", "one prompt and one answer with it")
        return list(body.input_ids)
    request = GenerationRequest("", SamplingParams(), prompt=body.text)
    return list(await frontend.tokenize(request))


def _name(session: str | None) -> str:
    return f"{_PREFIX}{session}"


def _until(timeout: float | None) -> float:
    return time.time() + (timeout or float(1 << 40))


def _used(record: Record) -> dict[str, object]:
    return record.object | {"until": _until(record.object["timeout"])}


def _check_alive(record: Record, session: str | None) -> None:
    if record.object["until"] < time.time():
        raise _unknown(session)


def _unknown(session: str | None) -> RequestError:
    message = f"There is no session {format_value(session)}, or not any more: open one with /open_session."
    return RequestError(message, param=_FIELD, code="session_not_found")
