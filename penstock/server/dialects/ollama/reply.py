"""Answers of the engine to Ollama's lines, or to the one object that their sum is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.core.protocol import TokenLogprobs
from penstock.core.request import FinishReason
from penstock.engine.api import Delta, ToolCallDelta
from penstock.server.active_call import ActiveCall
from penstock.server.dialects.ollama.translate import OllamaCall
from penstock.server.encoding import encode_json
from penstock.server.logprobs import logprob_object
from penstock.server.tool_calls import arguments_of

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend


def timestamp() -> str:
    """Now, in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(body: object) -> bytes:
    """One line of a stream."""
    return encode_json(body) + b"\n"


def loaded(model: str, *, chat: bool, unloaded: bool = False) -> dict[str, Any]:
    """The answer to a call that only wants the model loaded, which it is, or unloaded."""
    said: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    reason = "unload" if unloaded else "load"
    return {"model": model, "created_at": timestamp(), **said, "done": True, "done_reason": reason}


class OllamaReply:
    """The answer to one call."""

    def __init__(self, call: OllamaCall, active: ActiveCall, frontend: Frontend) -> None:
        self._call = call
        self._active = active
        self._frontend = frontend
        self._first = self._last = active.started
        self._token_ids: list[int] = []
        self._tokens = 0
        self._tool_call: ToolCallDelta | None = None  # whose arguments are still coming in
        self._arguments: list[str] = []

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of a stream."""
        async for part in self._walk():
            yield line(part)

    async def whole(self) -> dict[str, Any]:
        """The complete object."""
        texts: dict[str, list[str]] = {}
        lists: dict[str, list[Any]] = {}
        last: dict[str, Any] = {}
        async for last in self._walk():
            for name, value in {**last, **last.get("message", {})}.items():
                if name in ("response", "content", "thinking"):
                    texts.setdefault(name, []).append(value)
                elif name in ("tool_calls", "logprobs"):
                    lists.setdefault(name, []).extend(value)
        said = {name: "".join(pieces) for name, pieces in texts.items()} | lists
        if not self._call.chat:
            return last | said
        beside = {name: said.pop(name) for name in ("logprobs",) if name in said}
        return {**last, **beside, "message": last["message"] | said}

    async def _walk(self) -> AsyncIterator[dict[str, Any]]:
        async for _, delta in self._active.deltas():
            self._count(delta)
            calls = self._calls(delta.tool_calls, ended=delta.finish_reason is not None)
            thinking = delta.reasoning if self._call.thinking else ""
            if delta.text or thinking or calls or delta.logprobs:
                yield self._part(delta.text, thinking, calls, delta.logprobs)
            if delta.finish_reason is not None:
                reason = "length" if delta.finish_reason is FinishReason.LENGTH else "stop"
                yield {**self._part("", "", [], ()), "done": True, "done_reason": reason, **self._figures()}

    def _count(self, delta: Delta) -> None:
        if not delta.token_ids:
            return
        self._last = time.monotonic()
        if not self._tokens:
            self._first = self._last
        self._tokens += len(delta.token_ids)
        if self._call.keeps_context:
            self._token_ids += delta.token_ids

    def _part(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"content" if self._call.chat else "response": text}
        if thinking:
            said["thinking"] = thinking
        if calls:
            said["tool_calls"] = calls
        if self._call.chat:
            said = {"message": {"role": "assistant", **said}}
        if self._call.logprobs is not None and logprobs:
            said["logprobs"] = [logprob_object(self._frontend, entry, self._call.logprobs) for entry in logprobs]
        return {"model": self._call.model, "created_at": timestamp(), **said, "done": False}

    def _calls(self, pieces: Sequence[ToolCallDelta], *, ended: bool) -> list[dict[str, Any]]:
        """The calls that are complete with these pieces."""
        complete: list[dict[str, Any]] = []
        for piece in pieces:
            if self._tool_call is None or piece.index != self._tool_call.index:
                complete += self._finished_call()
                self._tool_call = piece
            self._arguments.append(piece.arguments)
        return [*complete, *self._finished_call()] if ended else complete

    def _finished_call(self) -> list[dict[str, Any]]:
        """The call whose arguments came in, if there is one."""
        call, arguments = self._tool_call, "".join(self._arguments)
        self._tool_call, self._arguments = None, []
        if call is None:
            return []
        function = {"index": call.index, "name": call.name, "arguments": arguments_of(arguments)}
        return [{"id": call.id, "function": function}]

    def _figures(self) -> dict[str, Any]:
        """Counts, and durations in ns; that of loading is the wait for a place in the batch."""
        active = self._active
        waited = active.generations[0].queue_seconds or 0.0
        seconds = {
            "total_duration": time.monotonic() - active.started,
            "load_duration": waited,
            "prompt_eval_duration": max(self._first - active.started - waited, 0.0),
            "eval_duration": self._last - self._first,
        }
        figures = {name: int(value * 1e9) for name, value in seconds.items()}
        figures |= {"prompt_eval_count": active.prompt_tokens, "eval_count": self._tokens}
        if not self._call.keeps_context:
            return figures
        return {**figures, "context": [*active.generations[0].prompt_ids, *self._token_ids]}
