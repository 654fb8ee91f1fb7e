"""Values as models write them (JSON, Python literals, Gemma's), read with tolerance and given on as valid JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.text.parsers.stream import Reader, Sink, Stream, finding

MAX_DEPTH: Final = 64
_MAX_ATOM: Final = 1024
_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_ATOM: Final = re.compile(r"""[^\s"'\\,:=(){}\[\]<>]+""")
_PLAIN: Final = {
    '"': re.compile(r'[^"\\\x00-\x1f]+'),
    "'": re.compile(r"""[^'"\\\x00-\x1f]+"""),
}
_HEX: Final = re.compile(r"[0-9a-fA-F]{1,4}")
_KEPT_ESCAPES: Final = frozenset('"\\/bfnrt')
_HEX_ESCAPES: Final = {"u": 4, "x": 2}


class MalformedError(Exception):
    """The text is no value. What was given on before is closed so that it is valid JSON."""


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The inside of a JSON string."""
    return quoted(text)[1:-1]


@dataclass(slots=True)
class ValueReader:
    """Reads one value and gives it on as JSON, `, ` and `: ` between parts, piece by piece.

    Accepted besides JSON: single quotes, Python's True, False, None and tuples, control characters and unknown escapes
    in strings, commas before a closing bracket, names without quotes. A value that ends in the middle is closed, unless
    the stream was cut there.

    Attributes:
        stream: where from.
        emit: takes the JSON text.
        quotes: further strings that open and close a string (Gemma's).
        pending: text before the value (separator and key), given on once the value begins.
    """

    stream: Stream
    emit: Sink
    quotes: Sequence[str] = ()
    pending: str = ""
    _open: list[str] = field(default_factory=list)

    def read(self) -> Reader[None]:
        """Raises MalformedError, after closing what was open."""
        try:
            yield from self._value()
            while self._open:
                yield from self._next()
        except MalformedError:
            if not self.stream.broke_off:
                self.emit("".join(_CLOSERS[opener] for opener in reversed(self._open)))
            self._open.clear()
            raise

    def _value(self) -> Reader[None]:
        """One atom or string, or the opening of a container."""
        char = yield from self.stream.spaces()
        mark = yield from self._quote(char)
        if mark:
            self._give('"')
            yield from self.string(mark)
        elif char in _CLOSERS and char:
            if len(self._open) >= MAX_DEPTH:
                raise MalformedError
            self._give("{" if char == "{" else "[")
            self._open.append("{" if char == "{" else "[")
            self.stream.skip(1)
            yield from self._first()
        else:
            self._give((yield from self._atom()))

    def _first(self) -> Reader[None]:
        """The first member of a container, or its end."""
        char = yield from self.stream.spaces()
        if char and char in ")}]":
            self._close(char)
        elif self._open[-1] == "{":
            yield from self._member("")
        else:
            yield from self._value()

    def _next(self) -> Reader[None]:
        """What comes after a member: a comma and another one, or the end of the container."""
        char = yield from self.stream.spaces()
        if char and char in ")}]":
            self._close(char)
            return
        if char != ",":
            raise MalformedError
        self.stream.skip(1)
        char = yield from self.stream.spaces()
        if char and char in ")}]":
            self._close(char)
        elif self._open[-1] == "{":
            yield from self._member(", ")
        else:
            self.pending = ", "
            yield from self._value()

    def _member(self, separator: str) -> Reader[None]:
        key = yield from self.key()
        if (yield from self.stream.spaces()) != ":":
            raise MalformedError
        self.stream.skip(1)
        self.pending = f"{separator}{quoted(key)}: "
        yield from self._value()

    def _close(self, char: str) -> None:
        opener = self._open[-1]
        if (char == "}") != (opener == "{"):
            raise MalformedError
        self.stream.skip(1)
        self._open.pop()
        self.emit(_CLOSERS[opener])

    def _give(self, text: str) -> None:
        self.emit(self.pending + text)
        self.pending = ""

    def key(self) -> Reader[str]:
        """A key, decoded: a string or a bare name.

        Raises:
            MalformedError: neither.
        """
        mark = yield from self._quote((yield from self.stream.spaces()))
        if not mark:
            return str(json.loads(text)) if (text := (yield from self._atom())).startswith('"') else text
        parts: list[str] = []
        inner = ValueReader(self.stream, parts.append, self.quotes)
        yield from inner.string(mark)
        decoded: str = json.loads('"' + "".join(parts))
        return decoded

    def _quote(self, char: str) -> Reader[str]:
        """Reads what opens a string, "" if none is there."""
        if char and char in _PLAIN:
            return self.stream.skip(1)
        return (yield from self.stream.follows(finding(self.quotes))) if self.quotes else ""

    def string(self, mark: str) -> Reader[None]:
        """The rest of a string whose opening mark is read and given on already, its closing quote included.

        Raises:
            MalformedError: the text ends first; the string is closed, unless it was cut.
        """
        if mark not in _PLAIN:
            end = finding((mark,))
            found = yield from self.stream.until(end, lambda part: self.emit(escaped(part)), begun=False)
            if found or not self.stream.broke_off:
                self.emit('"')
            if not found:
                raise MalformedError
            return
        stream, plain = self.stream, _PLAIN[mark]
        while True:
            char = yield from stream.peek()
            if not char:
                if not stream.broke_off:
                    self.emit('"')
                raise MalformedError
            if part := stream.run(plain):
                self.emit(part)
                continue
            stream.skip(1)
            if char == mark:
                self.emit('"')
                return
            if char == "\\":
                self.emit((yield from self._escape()))
            else:
                self.emit(escaped(char))

    def _escape(self) -> Reader[str]:
        char = yield from self.stream.peek()
        if char in _HEX_ESCAPES and char:
            self.stream.skip(1)
            digits = ""
            while len(digits) < _HEX_ESCAPES[char] and (more := (yield from self.stream.peek())):
                if not _HEX.match(more):
                    break
                digits += self.stream.skip(1)
            if len(digits) == _HEX_ESCAPES[char]:
                return f"\\u{digits:0>4}"
            return "" if self.stream.broke_off else escaped(f"\\{char}{digits}")
        if not char:
            return ""
        self.stream.skip(1)
        if char in _KEPT_ESCAPES:
            return "\\" + char
        return escaped(char if char in "'\n" else "\\" + char)

    def _atom(self) -> Reader[str]:
        """A number, a known word, or another one as a string."""
        parts: list[str] = []
        size = 0
        while (more := (yield from self.stream.peek())) and (part := self.stream.run(_ATOM)):
            parts.append(part)
            size += len(part)
            if size > _MAX_ATOM:
                raise MalformedError
        text = "".join(parts)
        if not text or (not more and text not in _WORDS and not _NUMBER.fullmatch(text)):
            raise MalformedError  # the text ended within a word
        return atom(text)


def atom(text: str) -> str:
    """JSON of an unquoted word: a number or a known word as it is, another one as a string."""
    if text in _WORDS:
        return _WORDS[text]
    return text if _NUMBER.fullmatch(text) else quoted(text)


def as_json(text: str, quotes: Sequence[str] = ()) -> str | None:
    """A whole text as JSON, None if it is no value from beginning to end, by the same tolerance."""
    stream, parts = Stream(text, ended=True), list[str]()
    try:
        drain(ValueReader(stream, parts.append, quotes).read())
        left = drain(stream.spaces())
    except MalformedError:
        return None
    return None if left else "".join(parts)


def drain(reader: Reader[Any]) -> Any:
    """The result of a reader over a stream that has ended."""
    while True:
        try:
            next(reader)
        except StopIteration as done:
            return done.value
