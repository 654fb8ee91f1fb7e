"""Reads what a person types: several lines, pasted ones as a whole, completed, and kept for the next time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from penstock.config.environment import state_folder

_MOST_HISTORY: Final = 1 << 20  # bytes; half of them stay when there are more


class LineEditor:
    """A prompt of a chat.

    Enter ends what is typed, unless a line ends in a backslash or stands between three quotes; Alt-Enter begins
    another line. What is pasted stays together, whatever line breaks are in it.
    """

    def __init__(self, commands: Sequence[str], parameters: Sequence[str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            key_bindings=_keys(),
            completer=_Commands(commands, parameters),
            complete_while_typing=False,
            enable_open_in_editor=True,
            prompt_continuation=lambda width, number, wrapped: "  ",
        )

    def read(self) -> str:
        """What was typed.

        Raises:
            EOFError: Ctrl-D; KeyboardInterrupt: Ctrl-C.
        """
        return _plain(self._session.prompt("> "))


def _plain(text: str) -> str:
    """Without the backslashes and quotes that said that it goes on."""
    if text.startswith('"""'):
        return text.removeprefix('"""').removesuffix('"""').strip("\n")
    return text.replace("\\\n", "\n")


def _goes_on(text: str) -> bool:
    if text.startswith('"""'):
        return len(text) < 6 or not text.endswith('"""')
    return text.endswith("\\")


def _keys() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    @bindings.add("c-j")  # what Enter becomes that was pressed before there was a prompt
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.complete_state is not None and buffer.complete_state.current_completion is not None:
            buffer.complete_state = None
        elif _goes_on(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _another_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _Commands(Completer):
    """Commands, what /set knows, and files."""

    def __init__(self, commands: Sequence[str], parameters: Sequence[str]) -> None:
        self._commands = tuple(commands)
        self._parameters = tuple(parameters)
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """As prompt_toolkit asks."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            yield from _matching(name, self._commands)
        elif name == "/set" and " " not in rest:
            yield from _matching(rest, self._parameters)
        elif name == "/show" and " " not in rest:
            yield from _matching(rest, ("info", "system", "messages"))
        elif name in ("/save", "/load", "/model"):
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


def _matching(begun: str, names: Sequence[str]) -> Iterator[Completion]:
    yield from (Completion(name, -len(begun)) for name in names if name.startswith(begun))


def _history() -> History:
    """In a file that only this user reads; in memory where there can be none."""
    try:
        path = state_folder() / "history"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        _shorten(path)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))


def _shorten(path: Path) -> None:
    """Keeps a file of history from growing for ever: entries begin with an empty line."""
    if path.stat().st_size > _MOST_HISTORY:
        kept = path.read_bytes()[-_MOST_HISTORY // 2 :].partition(b"\n\n")[2]
        path.write_bytes(b"\n" + kept)
