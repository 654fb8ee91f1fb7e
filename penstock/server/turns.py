"""The turns of a chat, for dialects that send what was said, thought, called and given back in pieces of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ChatTurn:
    """A message in the making; `more` are the fields of a tool's result."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    more: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """In OpenAI's form."""
        message: dict[str, Any] = {"role": self.role, **self.more, "content": "".join(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass(slots=True)
class ChatTurns:
    """A chat that is put together.

    Attributes:
        turns: so far.
        functions: the names of those called so far, by the id of the call.
    """

    turns: list[ChatTurn] = field(default_factory=list)
    functions: dict[str, str] = field(default_factory=dict)

    def add(self, role: str, text: str = "", *, thought: str = "", joint: str | None = None) -> None:
        """Adds what was said and thought: to the last turn, with `joint` between, if that is of the same role."""
        if joint is None or not self.turns or self.turns[-1].role != role:
            self.turns.append(ChatTurn(role))
        turn = self.turns[-1]
        for pieces, more in ((turn.texts, text), (turn.thoughts, thought)):
            if more:
                pieces += (joint or "", more) if pieces else (more,)

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """Adds a call to the assistant's turn."""
        self.add("assistant", joint="")
        function = {"name": name, "arguments": arguments}
        self.turns[-1].calls.append({"id": call_id, "type": "function", "function": function})
        self.functions[call_id] = name

    def result(self, call_id: str, text: str) -> None:
        """Adds what a call gave back."""
        more = {"tool_call_id": call_id, "name": self.functions.get(call_id, "")}
        self.turns.append(ChatTurn("tool", [text], more=more))

    def messages(self) -> list[dict[str, Any]]:
        """In OpenAI's form."""
        return [turn.message() for turn in self.turns]
