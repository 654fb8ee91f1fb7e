"""Answers of the engine to Anthropic's messages: one walk over the events, sent as they are or gathered."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator
from types import MappingProxyType
from typing import Any, Final

from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.active_call import ActiveCall, event, typed_event
from penstock.server.dialects.anthropic.translate import AnthropicCall
from penstock.server.tool_calls import arguments_of

PING = event({"type": "ping"}, "ping")
_Event = dict[str, Any]
_JSON = "partial_json"
_NOT_HERE: Final = MappingProxyType({"stop_details": None, "container": None})
"""Fields of a message that its schema requires, for services that refuse and that run code."""


class AnthropicReply:
    """The answer to one call."""

    def __init__(self, call: AnthropicCall, active: ActiveCall) -> None:
        self._call, self._active = call, active
        self._output_tokens = self._thinking_tokens = 0
        self._blocks = -1  # number of the last one
        self._open: tuple[str, int] | None = None  # its kind, and which call it is
        self._thought = hashlib.sha256()
        self._blank: list[str] = []  # white space that may turn out to be the beginning of a text
        self._called = False
        self._last = Delta(0, finish_reason=FinishReason.STOP)

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream."""
        async for body in self._walk():
            yield typed_event(body)
            if body["type"] == "message_start":
                yield PING

    async def whole(self) -> dict[str, Any]:
        """The complete message."""
        message: dict[str, Any] = {}
        content: list[dict[str, Any]] = []
        pieces: dict[str, list[str]] = {}  # of the open block, by field
        async for body in self._walk():
            match body:
                case {"type": "message_start", "message": message}:
                    pass
                case {"type": "content_block_start", "content_block": block}:
                    content.append(block)
                    pieces = {}
                case {"type": "content_block_delta", "delta": delta}:
                    name = delta["type"].removesuffix("_delta")
                    pieces.setdefault(name, []).append(delta[_JSON if name == "input_json" else name])
                case {"type": "content_block_stop"}:
                    told = {name: "".join(texts) for name, texts in pieces.items()}
                    if arguments := told.pop("input_json", ""):
                        content[-1]["input"] = arguments_of(arguments)
                    content[-1] |= told
                case {"type": "message_delta", "delta": ending, "usage": usage}:
                    message |= {**ending, "content": content, "usage": usage}
        return message

    async def _walk(self) -> AsyncIterator[_Event]:
        started = False
        async for _, delta in self._active.deltas():
            if not started:  # from the first delta on it is known what came from the cache
                started = True
                yield {"type": "message_start", "message": self._message()}
            if self._call.max_tokens:
                self._output_tokens += len(delta.token_ids)
                self._thinking_tokens += delta.reasoning_tokens
                for body in self._pieces(delta):
                    yield body
            self._last = delta
        for body in self._close():
            yield body
        stopped = self._last.stop_reason if isinstance(self._last.stop_reason, str) else None
        ending = {"stop_reason": self._stop_reason(), "stop_sequence": stopped, **_NOT_HERE}
        yield {"type": "message_delta", "delta": ending, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _message(self) -> dict[str, Any]:
        head = {"id": f"msg_{self._call.request.request_id}", "type": "message", "role": "assistant"}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, **_NOT_HERE}
        return {**head, "model": self._call.model, **empty, "usage": self._usage()}

    def _usage(self) -> dict[str, Any]:
        cached = self._active.cached_tokens
        return {
            "input_tokens": self._active.prompt_tokens - cached,
            "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"thinking_tokens": self._thinking_tokens},
            "server_tool_use": None,
            "service_tier": "standard",
            "inference_geo": None,
        }

    def _stop_reason(self) -> str:
        if self._last.finish_reason is FinishReason.LENGTH:
            whole = self._output_tokens >= self._call.max_tokens
            return "max_tokens" if whole else "model_context_window_exceeded"
        if isinstance(self._last.stop_reason, str):
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _pieces(self, delta: Delta) -> Iterator[_Event]:
        if delta.reasoning:
            yield from self._enter("thinking", {"thinking": "", "signature": ""})
            self._thought.update(delta.reasoning.encode("utf-8", "replace"))
            if not self._call.hide_thinking:
                yield self._piece({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.text.isspace() and self._open != ("text", 0):
            self._blank.append(delta.text)
        elif delta.text:
            yield from self._enter("text", {"text": "", "citations": []})
            yield self._piece({"type": "text_delta", "text": "".join((*self._blank, delta.text))})
            self._blank.clear()
        for call in delta.tool_calls:
            yield from self._call_piece(call)

    def _call_piece(self, call: ToolCallDelta) -> Iterator[_Event]:
        self._called = True
        self._blank.clear()
        fields = {"id": call.id, "name": call.name, "input": {}, "caller": {"type": "direct"}}
        yield from self._enter("tool_use", fields, call.index)
        if call.arguments:
            yield self._piece({"type": "input_json_delta", _JSON: call.arguments})

    def _enter(self, kind: str, fields: dict[str, Any], index: int = 0) -> Iterator[_Event]:
        """Makes a block the open one."""
        if self._open == (kind, index):
            return
        yield from self._close()
        self._blocks += 1
        self._open = kind, index
        yield {"type": "content_block_start", "index": self._blocks, "content_block": {"type": kind, **fields}}

    def _close(self) -> Iterator[_Event]:
        if self._open is None:
            return
        if self._open[0] == "thinking":
            yield self._piece({"type": "signature_delta", "signature": self._thought.hexdigest()})
        self._open = None
        yield {"type": "content_block_stop", "index": self._blocks}

    def _piece(self, delta: dict[str, Any]) -> _Event:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}
