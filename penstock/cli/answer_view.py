"""How an answer is shown: its text as it comes, reasoning dimmed or hidden, calls as calls, and what it took."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.talkers import Usage
from penstock.config.errors import EngineDeadError
from penstock.core.request import FinishReason
from penstock.engine.api import Delta

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(slots=True)
class Call:
    """A call of a function, as its pieces come."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def shown(self) -> str:
        """As a programmer would write it: GetWeather(city="San Francisco")."""
        try:
            given = json.loads(self.arguments or "{}")
        except ValueError:
            return f"{self.name}({self.arguments})"
        if not isinstance(given, dict):
            return f"{self.name}({self.arguments})"
        parts = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
        return f"{self.name}({', '.join(parts)})"


def harmless(text: str) -> str:
    """A text of a model or server as a terminal may get it: without characters that command it."""
    return _CONTROL.sub("�", text)


@dataclass(slots=True)
class AnswerView:
    """Writes an answer as it comes.

    Attributes:
        person: somebody looks: control characters are taken out, reasoning is dimmed. Else only the answer is written.
        reasoning: show it, where a person looks.
        write: where to; standard output.
        text, thoughts, calls: what came.
        finish: why it ended.
    """

    person: bool
    reasoning: bool = True
    write: Callable[[str], object] = field(default=lambda text: sys.stdout.write(text))
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)
    finish: FinishReason | None = None
    _dimmed: bool = False
    _open: bool = False  # the cursor stands behind something

    async def show(self, deltas: AsyncIterator[Delta]) -> None:
        """Reads an answer to its end.

        Raises:
            EngineDeadError: it ended with an error.
        """
        error: str | None = None
        try:
            async for delta in deltas:
                self._take(delta)
                error = delta.error or error
                self.finish = delta.finish_reason or self.finish
        finally:
            self._dim(False)
            for call in self.calls.values():
                self._line(f"→ {call.shown()}" if self.person else call.shown())
            if self._open:
                self._write("\n")
        if error:
            raise EngineDeadError(error)

    def message(self) -> dict[str, Any] | None:
        """The answer as a message; None if nothing was said."""
        text = "".join(self.text)
        if not text and not self.calls:
            return None
        message: dict[str, Any] = {"role": "assistant", "content": text.strip() if self.calls else text}
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls.values()
            ]
        return message

    def _take(self, delta: Delta) -> None:
        if delta.reasoning:
            self.thoughts.append(delta.reasoning)
        if delta.reasoning and self.person and self.reasoning:
            self._dim(True)
            self._write(delta.reasoning)
        if delta.text:
            self.text.append(delta.text)
            shown = delta.text if self._open and not self._dimmed else delta.text.lstrip("\n")
            if shown:
                if self._dimmed:
                    self._dim(False)
                    self._line("")
                self._write(shown)
        for piece in delta.tool_calls:
            call = self.calls.setdefault(piece.index, Call())
            call.id, call.name = piece.id or call.id, piece.name or call.name
            call.arguments += piece.arguments

    def _dim(self, dimmed: bool) -> None:
        if dimmed != self._dimmed:
            self.write(_DIM if dimmed else _PLAIN)
            self._dimmed = dimmed

    def _line(self, text: str) -> None:
        """A line of its own."""
        if self._open:
            self._write("\n")
        if text:
            self._write(text)

    def _write(self, text: str) -> None:
        self.write(harmless(text) if self.person else text)
        sys.stdout.flush()
        self._open = not text.endswith("\n")


class Clock:
    """How long an answer took: to its first piece, and in all."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None

    async def watch(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        """The same pieces."""
        async for delta in deltas:
            if self._first is None and (delta.text or delta.reasoning or delta.tool_calls or delta.token_ids):
                self._first = time.perf_counter()
            yield delta

    def times(self) -> tuple[float, float]:
        """Seconds to the first piece, and from there until now."""
        ended = time.perf_counter()
        first = self._first or ended
        return first - self._began, ended - first

    def told(self, usage: Usage) -> str:
        """A line of figures."""
        first, rest = self.times()
        prompt = "" if usage.prompt is None else f"prompt {usage.prompt} tokens"
        if usage.cached:
            prompt += f" ({usage.cached} cached)"
        speed = f", {(usage.output - 1) / rest:.1f} tokens/s" if usage.output > 1 and rest > 0 else ""
        figures = (prompt, f"first token after {first:.2f} s", f"{usage.output} tokens in {rest + first:.2f} s{speed}")
        return "; ".join(part for part in figures if part)
