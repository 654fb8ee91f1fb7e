"""The turns of a chat, for dialects that send what was said, thought, called and given back in pieces of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Turns:
    """A chat that is put together.

    Attributes:
        messages: so far, in OpenAI's form.
        functions: the names of those called so far, by the id of the call.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)

    def add(self, role: str, text: str = "", *, thought: str = "", joint: str | None = None) -> None:
        """Adds what was said and thought: to the last message, with `joint` between, if that is of the same role."""
        if joint is None or not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        turn = self.messages[-1]
        for name, more in (("content", text), ("reasoning_content", thought)):
            if more:
                turn[name] = f"{turn[name]}{joint}{more}" if turn.get(name) else more

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Adds a call to the assistant's turn."""
        self.add("assistant", joint="")
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self.functions[call_id] = name

    def result(self, call_id: str, text: str) -> None:
        """Adds what a call gave back."""
        name = self.functions.get(call_id, "")
        self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id, "name": name})
