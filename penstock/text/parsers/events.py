"""What a parser tells of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from penstock.text.parsers.format import CallIds

_ALPHANUMERIC: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_MAX_SPACES: Final = 1024


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The pieces of one call have its index; joined, `arguments` is a JSON object.

    Attributes:
        index: number of the call in its sequence.
        id, name: on a call's first piece.
        arguments: new text of the arguments.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """News of an answer: what was added to its reasoning, then to its content, then to its calls."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def call_id(kind: CallIds, key: str, index: int, name: str, earlier: int = 0) -> str:
    """The id of an answer's call: the same for the same key and index.

    Args:
        kind: by which rule.
        key: of the answer, unique among all.
        index: of the call in the answer.
        name: of the function.
        earlier: calls in the conversation before this answer.
    """
    digest = blake2b(f"{key}\0{index}".encode("utf-8", "surrogatepass"), digest_size=12)
    if kind is CallIds.KIMI:
        return f"functions.{name}:{earlier + index}"
    if kind is CallIds.CALL:
        return f"call_{digest.hexdigest()}"
    number, letters = int.from_bytes(digest.digest(), "big"), ""
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHANUMERIC))
        letters += _ALPHANUMERIC[digit]
    return letters


@dataclass(slots=True)
class Trimmed:
    """Text without the white space at its ends, as far as it belongs to the marks around it.

    Attributes:
        emit: takes the text.
        begun: whether any text but white space was given.
        strip: white space that comes next is left out, unless it stands between texts.
    """

    emit: Callable[[str], None]
    begun: bool = False
    strip: bool = False
    _spaces: str = field(default="")

    def say(self, text: str) -> None:
        body = text.rstrip()
        if body:
            whole = self._spaces + body
            self.emit(whole.lstrip() if self.strip and not self.begun else whole)
            self._spaces = text[len(body) :]
            self.begun = True
            self.strip = False
        else:
            self._spaces += text
        if (sure := (len(self._spaces) - 1) // _MAX_SPACES * _MAX_SPACES) > 0:
            if not self.strip:
                self.emit(self._spaces[:sure])
            self._spaces = self._spaces[sure:]

    def drop(self) -> None:
        """Leaves out the white space before this place, and that after it unless it stands between texts."""
        self._spaces, self.strip = "", True

    def finish(self) -> None:
        """Gives what was held back: white space at the end belongs to the text where no mark came before it."""
        if not self.strip:
            self.emit(self._spaces)
        self._spaces = ""
