"""A response as it grows: deltas of the engine become output items, and the typed events that tell of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.active_call import typed_event
from penstock.server.context import ModelContext
from penstock.server.custom_tools import InputReader, custom_names
from penstock.server.dialects.responses.items import Item, item_id
from penstock.server.dialects.responses.schema import ENCRYPTED, Reasoning
from penstock.server.dialects.responses.translate import ResponsesCall
from penstock.server.error_shapes import error_object
from penstock.server.errors import failure_of
from penstock.server.logprobs import logprob_object
from penstock.server.opaque import content_of

Event = dict[str, Any]
_TOOLS: Mapping[str, Item] = {
    "function": {"description": None, "parameters": None, "strict": None},
    "custom": {"description": None, "format": {"type": "text"}},
}
"""What the response tells of tools besides what was sent, by type."""
_ECHOED: tuple[tuple[str, Any], ...] = (
    *((name, None) for name in ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "user")),
    *(("prompt_cache_key", None), ("safety_identifier", None), ("background", False), ("metadata", {})),
    *(("tool_choice", "auto"), ("top_logprobs", 0), ("truncation", "disabled")),
)
"""Fields of the request that the response repeats, and what they are when left out."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How an item's text is told: what its events are called, and if it is in a part, the list and type of that.

    `rest`: fields of the item before anything is said.
    """

    item: str
    told: str
    rest: Item
    parts: str = ""
    part: str = ""
    text: str = "text"


_MESSAGE = _Kind("message", "output_text", {"role": "assistant", "content": []}, "content", "output_text")
_REASONING = _Kind("reasoning", "reasoning_text", {"summary": [], "content": []}, "content", "reasoning_text")
_SUMMARY = _Kind("reasoning", "reasoning_summary_text", _REASONING.rest, "summary", "summary_text")
_CUSTOM = _Kind("custom_tool_call", "custom_tool_call_input", {"input": ""}, text="input")
_CALL = _Kind("function_call", "function_call_arguments", {"arguments": ""}, text="arguments")


@dataclass(slots=True)
class _Open:
    """The item that grows now."""

    kind: _Kind
    item: Item
    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[Item] = field(default_factory=list)

    @property
    def place(self) -> Event:
        """Where its text is; there is one part at the most."""
        part = {f"{self.kind.parts}_index": 0} if self.kind.parts else {}
        return {"item_id": self.item["id"], "output_index": self.index, **part}


class Composer:
    """The state of one response.

    Attributes:
        response: the object as it is now.
    """

    def __init__(self, call: ResponsesCall, context: ModelContext) -> None:
        self._call, self._frontend = call, context.frontend
        self._numbers = itertools.count()
        self._open: _Open | None = None
        self._logprobs: list[Item] = []
        self._tokens = self._reasoning = 0
        self._length = False
        self._custom = custom_names(call.body.tools)
        self._input: InputReader | None = None
        self._opaque = ENCRYPTED in (call.body.include or ())
        self.response = _response(call, context)
        self._thought = _SUMMARY if self.response["reasoning"]["summary"] else _REASONING

    def event(self, kind: str, /, **fields: Any) -> Event:
        """The next event."""
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

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
            if piece.id is not None:
                self._input = InputReader() if piece.name in self._custom else None
            if self._input is not None:
                yield from self._told(_CUSTOM, self._input.push(piece.arguments), piece)
            else:
                yield from self._told(_CALL, piece.arguments, piece)

    def finish(self, error: BaseException | None = None) -> Iterator[Event]:
        """The events that end the items; the response has its outcome after them.

        `error`: why it failed; CancelledError where its client ended it.
        """
        # An empty answer has a message too.
        if error is None and self._open is None and not self.response["output"]:
            yield from self._begin(_MESSAGE, None)
        yield from self._end("incomplete" if error is not None or self._length else "completed")
        if isinstance(error, asyncio.CancelledError):
            self.response["status"] = "cancelled"
        elif error is not None:
            failure = failure_of(error)
            code = "invalid_prompt" if failure.status < 500 else "server_error"
            self.response |= {"status": "failed", "error": {"code": code, "message": failure.message}}
        elif self._length:
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.response |= {"status": "completed", "completed_at": int(time.time())}

    def broken(self, error: BaseException) -> bytes:
        """The last event of a stream that cannot be brought to an end."""
        failure = failure_of(error)
        return typed_event(self._error(failure.status, failure.message, failure.code, failure.param))

    def end(self) -> Event:
        """The last event. That of a cancelled response is an error, as there is none of its own."""
        if self.response["status"] == "cancelled":
            return self._error(499, "The response was cancelled.", "cancelled")
        return self.status(self.response["status"])

    def _error(self, status: int, message: str, code: str | None, param: str | None = None) -> Event:
        """OpenAI's clients read the event's own fields, those of Open Responses its `error`."""
        inner = error_object(status, message, param, code)
        return self.event("error", code=code, message=message, param=param, **inner)

    def count(self, prompt: int, cached: int) -> None:
        """Writes the usage into the response: tokens of the prompt, those of it that were cached, and those told."""
        self.response["usage"] = usage_of(prompt, cached, self._tokens, self._reasoning)

    def _told(self, kind: _Kind, text: str, piece: ToolCallDelta | None = None) -> Iterator[Event]:
        if self._open is None or self._open.kind is not kind or (piece is not None and piece.id is not None):
            yield from self._end("completed")
            yield from self._begin(kind, piece)
        now = self._open
        assert now is not None
        if text:
            now.text.append(text)
            fields: Event = {**now.place, "delta": text}
            if kind is _MESSAGE:
                fields["logprobs"] = self._logprobs
                now.logprobs += self._logprobs
            yield self.event(f"response.{kind.told}.delta", **fields)
        self._logprobs = []

    def _begin(self, kind: _Kind, piece: ToolCallDelta | None) -> Iterator[Event]:
        index = len(self.response["output"])
        name = item_id(kind.item, f"{self._call.request.request_id}_{index}")
        item: Item = {"id": name, "type": kind.item, "status": "in_progress", **kind.rest}
        if piece is not None:
            item |= {"call_id": piece.id or f"call_{name[3:]}", "name": piece.name or ""}
        self._open = _Open(kind, item, index)
        yield self.event("response.output_item.added", output_index=index, item=item)
        if kind.parts:
            yield self._part_event("added", self._open, self._part(self._open))

    def _end(self, status: str) -> Iterator[Event]:
        now, self._open = self._open, None
        if now is None:
            return
        kind, part = now.kind, self._part(now)
        about: Event = {**now.place, kind.text: "".join(now.text)}
        if kind is _MESSAGE:
            about["logprobs"] = now.logprobs
        elif kind is _CALL:
            about["name"] = now.item["name"]
        yield self.event(f"response.{kind.told}.done", **about)
        if kind.parts:
            yield self._part_event("done", now, part)
        if kind.item == "reasoning" and self._opaque and now.text:
            now.item["encrypted_content"] = content_of(about[kind.text])
        item = {**now.item, "status": status} | ({kind.parts: [part]} if kind.parts else {kind.text: about[kind.text]})
        self.response["output"].append(item)
        yield self.event("response.output_item.done", output_index=now.index, item=item)

    def _part(self, now: _Open) -> Item:
        part: Item = {"type": now.kind.part, "text": "".join(now.text)}
        return part | {"annotations": [], "logprobs": now.logprobs} if now.kind is _MESSAGE else part

    def _part_event(self, what: str, now: _Open, part: Item) -> Event:
        name = "reasoning_summary_part" if now.kind is _SUMMARY else "content_part"
        return self.event(f"response.{name}.{what}", **now.place, part=part)


def usage_of(prompt: int, cached: int, output: int, reasoning: int) -> Item:
    """What a call cost, in tokens: of the prompt, those of it that were cached, of the answer, and of its reasoning."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + output,
    }


def _response(call: ResponsesCall, context: ModelContext) -> Item:
    """The object before anything is generated: what was asked, in full."""
    body, sampling = call.body, call.request.sampling
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    reasoning = body.reasoning or Reasoning()
    return {
        "id": call.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": context.model,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "output": [],
        "parallel_tool_calls": call.request.tool_choice.parallel,
        **{name: getattr(body, name) or default for name, default in _ECHOED},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "service_tier": "default",
        "store": call.stored,
        "temperature": sampling.temperature,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "text": {"verbosity": "medium", **text, "format": _format(text.get("format"))},
        "tools": [{**_TOOLS[tool["type"]], **tool} for tool in body.tools or ()],
        "top_p": sampling.top_p,
        "usage": None,
    }


def _format(given: Item | None) -> Item:
    """The text's form in full; answers follow their schema whether or not `strict` asks for it."""
    if given is None:
        return {"type": "text"}
    return {"description": None, "strict": True, **given} if given.get("type") == "json_schema" else given
