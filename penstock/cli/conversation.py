"""A conversation at the terminal: what was said, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.errors import RequestError, format_value

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MOST_BYTES = 64 << 20


@dataclass(slots=True)
class Conversation:
    """What was said so far.

    Attributes:
        messages: turns of user, assistant and tools, as OpenAI spells them.
        system: the system message, if any.
        tools: declarations of functions that the model may call.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    system: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    def all(self) -> list[dict[str, Any]]:
        """The messages as the model gets them."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def take_back(self) -> dict[str, Any] | None:
        """Removes the last question with all that was said after it; the question, or None where there is none."""
        for place in range(len(self.messages) - 1, -1, -1):
            if self.messages[place]["role"] in ("user", "tool"):
                question = self.messages[place]
                del self.messages[place:]
                return question
        return None

    def open_call(self) -> str | None:
        """The id of a call of the last answer's that has no result yet."""
        answered = set[str]()
        for message in reversed(self.messages):
            if message["role"] == "tool":
                answered.add(str(message.get("tool_call_id")))
                continue
            calls = message.get("tool_calls") or ()
            return next((str(call["id"]) for call in calls if str(call["id"]) not in answered), None)
        return None

    def save(self, path: str) -> None:
        """Writes the messages as JSON.

        Raises:
            RequestError: the file cannot be written.
        """
        text = json.dumps(self.all(), ensure_ascii=False, indent=2)
        try:
            Path(path).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None

    def load(self, path: str) -> None:
        """Takes the place of what was said by what `save` wrote, or any list of messages.

        Raises:
            RequestError: the file cannot be read, or holds something else; what was said stays.
        """
        found = read_json(path)
        if isinstance(found, dict):
            found = found.get("messages")
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise RequestError(f"{path} holds no conversation: a list of messages with role and content is needed.")
        first = found[0] if found else {}
        begins = first.get("role") in ("system", "developer")
        self.system = str(first["content"]) if begins else None
        self.messages = found[1:] if begins else found


def _is_message(found: object) -> bool:
    if not isinstance(found, dict) or found.get("role") not in _ROLES:
        return False
    return isinstance(found.get("content"), str) or bool(found.get("tool_calls"))


def read_json(path: str) -> Any:
    """What a file of JSON holds.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        file = Path(path).expanduser()
        if file.stat().st_size > _MOST_BYTES:
            raise RequestError(f"{path} is larger than {_MOST_BYTES >> 20} MiB.")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is no JSON: {format_value(str(error))}.") from None


def read_tools(path: str) -> tuple[Mapping[str, Any], ...]:
    """Declarations of functions from a file, a list as OpenAI spells them.

    Raises:
        RequestError: the file cannot be read, or holds something else.
    """
    found = read_json(path)
    listed: Sequence[Any] = found if isinstance(found, list) else [found]
    for tool in listed:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise RequestError(f'{path} holds no list of tools: {{"type": "function", "function": {{"name": …}}}}.')
    return tuple(listed)
