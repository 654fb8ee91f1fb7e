"""A response as it grows: deltas of the engine become output items, and the typed events that tell of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.answer import Answer, event
from penstock.server.dialects.responses.items import PREFIXES, Item
from penstock.server.dialects.responses.translate import Call
from penstock.server.errors import failure_of
from penstock.server.logprobs import logprob_object

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

Event = dict[str, Any]
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user"),
    *("prompt_cache_key", "safety_identifier"),
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an item's text is told: its part's type and place, and the names of its events."""

    item: str
    part: str = ""
    at: str = ""
    parts: str = ""
    events: str = ""
    text: str = "text"
    told: str = ""


_MESSAGE = _Kind("message", "output_text", "content_index", "content", "content_part", told="output_text")
_REASONING = _Kind("reasoning", "reasoning_text", "content_index", "content", "content_part", told="reasoning_text")
_SUMMARY = _Kind(
    *("reasoning", "summary_text", "summary_index", "summary"), "reasoning_summary_part", told="reasoning_summary_text"
)
_CALL = _Kind("function_call", text="arguments", told="function_call_arguments")
_EMPTY: dict[str, Item] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}


@dataclass(slots=True)
class _Open:
    """The item that grows now."""

    kind: _Kind
    item: Item
    index: int
    call: int = -1
    text: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)


class Composer:
    """The state of one response.

    Attributes:
        response: the object as it is now.
    """

    def __init__(self, call: Call, frontend: Frontend) -> None:
        self._call, self._frontend = call, frontend
        self._sequence = 0
        self._open: _Open | None = None
        self._logprobs: list[Item] = []
        self._tokens = self._reasoning = 0
        self._length = False
        wanted = call.body.reasoning
        self._thought = _SUMMARY if wanted and (wanted.summary or wanted.generate_summary) else _REASONING
        self.response = _response(call, frontend)

    def event(self, kind: str, /, **fields: Any) -> Event:
        """The next event."""
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}

    def status(self, status: str) -> Event:
        """The event that the response as a whole has come to a status; "created" leaves its status alone."""
        if status != "created":
            self.response["status"] = status
        return self.event(f"response.{status}", response={**self.response, "output": list(self.response["output"])})

    def take(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta."""
        self._tokens += len(delta.token_ids)
        self._reasoning += delta.reasoning_tokens
        self._length |= delta.finish_reason is FinishReason.LENGTH
        if (most := self._call.request.sampling.logprobs) is not None:
            self._logprobs += [logprob_object(self._frontend, entry, most) for entry in delta.logprobs]
        if delta.reasoning:
            yield from self._told(self._thought, delta.reasoning)
        if delta.text:
            yield from self._told(_MESSAGE, delta.text)
        for piece in delta.tool_calls:
            yield from self._told(_CALL, piece.arguments, piece)

    def finish(self) -> Iterator[Event]:
        """The events that end the items; the response has its status and usage after them."""
        if self._open is None and not self.response["output"]:  # an answer without a word is one all the same
            yield from self._begin(_MESSAGE, None)
        yield from self._end("incomplete" if self._length else "completed")
        if self._length:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())

    def fail(self, error: BaseException) -> Iterator[Event]:
        """As `finish`, for a response that failed."""
        yield from self._end("incomplete")
        failure = failure_of(error)
        code = "invalid_prompt" if failure.status < 500 else "server_error"
        self.response["error"] = {"code": code, "message": failure.message}

    def broken(self, error: BaseException) -> bytes:
        """The last words of a stream that cannot be brought to an end."""
        failure = failure_of(error)
        about = {"code": failure.code, "message": failure.message, "param": failure.param}
        return event(self.event("error", **about), "error")

    def cancel(self) -> Iterator[Event]:
        """As `finish`, for a response that its client ended."""
        yield from self._end("incomplete")
        self.response["status"] = "cancelled"

    def end(self) -> Event:
        """The last event. That of a cancelled response is an error, as there is none of its own."""
        if self.response["status"] == "cancelled":
            return self.event("error", code="cancelled", message="The response was cancelled.", param=None)
        failed = self.response["error"] is not None
        return self.status("failed" if failed else "incomplete" if self._length else "completed")

    def count(self, answer: Answer) -> None:
        """Writes the usage so far into the response."""
        prompt = answer.prompt_tokens
        self.response["usage"] = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning},
            "total_tokens": prompt + self._tokens,
        }

    def _told(self, kind: _Kind, text: str, piece: ToolCallDelta | None = None) -> Iterator[Event]:
        call = -1 if piece is None else piece.index
        if self._open is None or (self._open.kind, self._open.call) != (kind, call):
            yield from self._end("completed")
            yield from self._begin(kind, piece)
        now = self._open
        assert now is not None
        if text:
            now.text.append(text)
            fields: Event = {"item_id": now.item["id"], "output_index": now.index, "delta": text}
            if kind is _MESSAGE:
                fields["logprobs"] = self._logprobs
                now.logprobs += self._logprobs
            if kind.at:
                fields[kind.at] = 0
            yield self.event(f"response.{kind.told}.delta", **fields)
        self._logprobs = []

    def _begin(self, kind: _Kind, piece: ToolCallDelta | None) -> Iterator[Event]:
        index = len(self.response["output"])
        item: Item = {"id": f"{PREFIXES[kind.item]}_{self._call.request.request_id}_{index}", "type": kind.item}
        item |= {"status": "in_progress", **_EMPTY[kind.item]}
        if piece is not None:
            item |= {"call_id": piece.id or f"call_{item['id'][3:]}", "name": piece.name or ""}
        self._open = _Open(kind, item, index, -1 if piece is None else piece.index)
        yield self.event("response.output_item.added", output_index=index, item=item)
        if kind.part:
            yield self._part_event("added", self._open, self._part(self._open))

    def _end(self, status: str) -> Iterator[Event]:
        now, self._open = self._open, None
        if now is None:
            return
        kind, part = now.kind, self._part(now)
        about: Event = {"item_id": now.item["id"], "output_index": now.index, kind.text: "".join(now.text)}
        if kind is _MESSAGE:
            about["logprobs"] = now.logprobs
        if kind.at:
            about[kind.at] = 0
        else:
            about["name"] = now.item["name"]
        yield self.event(f"response.{kind.told}.done", **about)
        if kind.part:
            yield self._part_event("done", now, part)
        item = {**now.item, "status": status} | ({kind.parts: [part]} if kind.part else {kind.text: about[kind.text]})
        self.response["output"].append(item)
        yield self.event("response.output_item.done", output_index=now.index, item=item)

    def _part(self, now: _Open) -> Item:
        part: Item = {"type": now.kind.part, "text": "".join(now.text)}
        return part | {"annotations": [], "logprobs": now.logprobs} if now.kind is _MESSAGE else part

    def _part_event(self, what: str, now: _Open, part: Item) -> Event:
        place = {"item_id": now.item["id"], "output_index": now.index, now.kind.at: 0}
        return self.event(f"response.{now.kind.events}.{what}", **place, part=part)


def _response(call: Call, frontend: Frontend) -> Item:
    """The object before anything is generated: what was asked, in full."""
    body, sampling = call.body, call.request.sampling
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    reasoning = body.reasoning
    return {
        "id": call.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "model": frontend.served_name,
        "output": [],
        "parallel_tool_calls": call.request.tool_choice.parallel,
        **{name: getattr(body, name) for name in _ECHOED},
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "service_tier": "default",
        "store": call.stored,
        "temperature": sampling.temperature,
        "text": {"verbosity": "medium", **text, "format": text.get("format", {"type": "text"})},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "metadata": body.metadata or {},
    }
