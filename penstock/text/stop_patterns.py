"""Patterns at which an answer ends, searched in its characters as they come.

A pattern becomes Thompson's automaton (Communications of the ACM 11(6), 1968), whose states are followed side by side,
each with the place where its match began. A character costs as many looks as there are states, whatever the text; what
it does to states that were live together before is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, NamedTuple

from penstock.config import limits
from penstock.config.errors import ParameterError

Test = Callable[[str], bool]
_FIELD: Final = "stop_regex"
_ALLOWED: Final = "characters, ., [...], \\d \\w \\s and their opposites, escapes, (...), (?:...), |, *, +, ?, {m,n}"
_KINDS: Final[dict[str, Test]] = {"d": str.isdecimal, "s": str.isspace, "w": lambda char: char.isalnum() or char == "_"}
_CONTROLS: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_DIGITS: Final = {"x": 2, "u": 4}
_NONE: Final = -1
_MOST_MOVES: Final = 256  # that are kept


@dataclass(slots=True)
class _State:
    """Takes a character, if it has a test; else it goes on at once to `next` and `other`, or ends `pattern`."""

    test: Test | None = None
    next: int = _NONE
    other: int = _NONE
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """What a piece of a pattern says, before it has states: `kind` is one of char, join, either, repeat.

    A character's `weight` is how much its test looks at.
    """

    kind: str
    test: Test | None = None
    parts: tuple[_Part, ...] = ()
    least: int = 1
    most: int | None = 1
    weight: int = 1

    @property
    def empty(self) -> bool:
        """Whether it matches no character at all."""
        parts = [part.empty for part in self.parts]
        if self.kind == "join":
            return all(parts)
        return any(parts) or (self.kind == "repeat" and (self.least == 0 or self.most == 0))

    @property
    def size(self) -> int:
        """How many states it takes, at most, and what their tests weigh; repeats count for each time."""
        own = sum(part.size for part in self.parts)
        if self.kind != "repeat":
            return self.weight + own
        return own * (self.least + 1) + 1 if self.most is None else own * self.most + self.most - self.least


class _Reader:
    """Reads one pattern, from the left to the right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._place = 0
        self._depth = 0

    def read(self) -> _Part:
        found = self._either()
        if self._place < len(self._pattern):
            raise self._wrong("has a ) without its (")
        return found

    def _wrong(self, what: str) -> ParameterError:
        return ParameterError(_FIELD, self._pattern, f"a pattern of {_ALLOWED}; this one {what}")

    @property
    def _next(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _take(self, count: int = 1) -> str:
        taken = self._pattern[self._place : self._place + count]
        if len(taken) < count:
            raise self._wrong("ends in the middle")
        self._place += count
        return taken

    def _skips(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._place)
        self._place += len(text) * found
        return found

    def _either(self) -> _Part:
        ways = [self._join()]
        while self._skips("|"):
            ways.append(self._join())
        return ways[0] if len(ways) == 1 else _Part("either", parts=tuple(ways))

    def _join(self) -> _Part:
        parts: list[_Part] = []
        while self._next not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))
        return _Part("join", parts=tuple(parts))

    def _one(self) -> _Part:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            test, weight = self._class()
            return _Part("char", test, weight=weight)
        if char == "\\":
            return _Part("char", self._escaped())
        if char == ".":
            return _Part("char", lambda other: other != "\n")
        if char in "^$":
            raise self._wrong(f"has {char}, and where an answer begins or ends is not looked at")
        if char in "*+?":
            raise self._wrong(f"has {char} with nothing before it")
        return _Part("char", char.__eq__)

    def _group(self) -> _Part:
        if self._next == "?" and not self._skips("?:"):
            raise self._wrong(f"has (?{self._pattern[self._place + 1 :][:1]}, which is not among these")
        self._depth += 1
        if self._depth > limits.MAX_STOP_REGEX_DEPTH:
            raise self._wrong(f"has groups deeper than {limits.MAX_STOP_REGEX_DEPTH}")
        found = self._either()
        if not self._skips(")"):
            raise self._wrong("has a ( without its )")
        self._depth -= 1
        return found

    def _escaped(self) -> Test:
        char = self._take()
        if char.lower() in _KINDS:
            kind = _KINDS[char.lower()]
            return kind if char.islower() else lambda other: not kind(other)
        return self._spelled(char).__eq__

    def _spelled(self, char: str) -> str:
        """The character that is meant behind a backslash."""
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _DIGITS:
            digits = self._take(_DIGITS[char])
            if not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self._wrong(f"has \\{char} without {_DIGITS[char]} hexadecimal digits")
            return chr(int(digits, 16))
        if char.isalnum():
            raise self._wrong(f"has \\{char}, which is not among these")
        return char

    def _class(self) -> tuple[Test, int]:
        """What stands in brackets, and how many looks it takes."""
        negated = self._skips("^")
        kinds: list[Test] = []
        ranges: list[tuple[str, str]] = []
        first = True
        while first or self._next != "]":
            first = False
            low = self._member(kinds)
            if low is None:
                continue
            high = low
            if self._next == "-" and self._pattern[self._place + 1 : self._place + 2] not in ("]", ""):
                self._take()
                high = self._member([]) or ""
                if high < low:
                    raise self._wrong(f"has a range from {low!r} that does not go up")
            ranges.append((low, high))
        self._take()
        alone = frozenset(low for low, high in ranges if low == high)
        spans = sorted({(low, high) for low, high in ranges if low != high})
        held = tuple(kinds)

        def within(char: str) -> bool:
            found = char in alone or any(low <= char <= high for low, high in spans)
            return found or any(kind(char) for kind in held)

        return (lambda char: not within(char)) if negated else within, 1 + len(spans) + len(kinds)

    def _member(self, kinds: list[Test]) -> str | None:
        """A character in brackets, None for a kind of them, which is added."""
        char = self._take()
        if char != "\\":
            return char
        if self._next and self._next.lower() in _KINDS:
            kinds.append(self._escaped())
            return None
        return "\b" if self._skips("b") else self._spelled(self._take())

    def _repeated(self, part: _Part) -> _Part:
        bounds = self._bounds()
        if bounds is None:
            return part
        least, most = bounds
        self._skips("?")  # the shortest match is the one that ends an answer, greedy or not
        if self._bounds() is not None:
            raise self._wrong("repeats what is repeated; put that into a group")
        if most is not None and most < least:
            raise self._wrong(f"repeats from {least} to {most} times")
        return _Part("repeat", parts=(part,), least=least, most=most)

    def _bounds(self) -> tuple[int, int | None] | None:
        """How often what stands before may come, None for once."""
        for mark, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._skips(mark):
                return bounds
        end = self._pattern.find("}", self._place)
        if self._next != "{" or end < 0:
            return None
        low, comma, high = self._pattern[self._place + 1 : end].partition(",")
        if not (low or high) or not all(text == "" or (text.isascii() and text.isdigit()) for text in (low, high)):
            return None  # as in Python's expressions, these are the characters themselves
        self._place = end + 1
        most = min(int(high), limits.MAX_STOP_REGEX_STATES + 1) if len(high) < 9 and high else None
        if len(low) > 8 or len(high) > 8:
            raise self._wrong(f"repeats more than {limits.MAX_STOP_REGEX_STATES} times")
        return int(low or 0), (most if comma else int(low))


class Move(NamedTuple):
    """What a character does to the matches that are under way.

    Attributes:
        live: the states they are in now.
        sources: of each, its place among those before; their number stands for a match that begins.
        pattern, source: one that is complete, and the same of its match.
    """

    live: tuple[int, ...]
    sources: tuple[int, ...]
    pattern: str | None
    source: int


@dataclass(slots=True)
class Patterns:
    """The automaton of several patterns, shared by all who look for them.

    Attributes:
        states: all of them.
        begins: those that take the first character of a match.
        moves: what characters do in states that are live together, as far as it is known.
    """

    states: list[_State] = field(default_factory=list)
    begins: tuple[int, ...] = ()
    moves: dict[tuple[tuple[int, ...], str], Move] = field(default_factory=dict)

    def add(self, part: _Part, then: int) -> int:
        """The state at which a part begins that goes on to `then`."""
        if part.kind == "char":
            return self._state(_State(part.test, then))
        if part.kind == "join":
            for piece in reversed(part.parts):
                then = self.add(piece, then)
            return then
        if part.kind == "either":
            ways = [self.add(way, then) for way in part.parts]
            begin = ways[0]
            for way in ways[1:]:
                begin = self._state(_State(next=begin, other=way))
            return begin
        (piece,) = part.parts
        if part.most is None:
            loop = self._state(_State(other=then))
            self.states[loop].next = self.add(piece, loop)
            then = loop
        else:
            end = then
            for _ in range(part.most - part.least):
                then = self._state(_State(next=self.add(piece, then), other=end))
        for _ in range(part.least):
            then = self.add(piece, then)
        return then

    def move(self, live: tuple[int, ...], char: str) -> Move:
        """What a character does; in each state only the match that began first goes on."""
        reached, sources = list[int](), list[int]()
        pattern, first = None, 0
        seen = bytearray(len(self.states))
        for source, number in (*enumerate(live), *((len(live), begin) for begin in self.begins)):
            state = self.states[number]
            if state.test is None or not state.test(char):
                continue
            for following in self.behind(state.next, seen):
                ended = self.states[following].pattern
                if ended is None:
                    reached.append(following)
                    sources.append(source)
                elif pattern is None:
                    pattern, first = ended, source
        return Move(tuple(reached), tuple(sources), pattern, first)

    def behind(self, begin: int, seen: bytearray) -> list[int]:
        """The states that take a character, or end a pattern, and are reached without any; none that was seen."""
        found, todo = list[int](), [begin]
        while todo:
            number = todo.pop()
            if number == _NONE or seen[number]:
                continue
            seen[number] = 1
            state = self.states[number]
            if state.test is None and state.pattern is None:
                todo += (state.other, state.next)
            else:
                found.append(number)
        return found

    def _state(self, state: _State) -> int:
        self.states.append(state)
        return len(self.states) - 1


@lru_cache(maxsize=16)  # the answers to a call have the same
def stop_patterns(patterns: tuple[str, ...]) -> Patterns:
    """The automaton of patterns, none of which matches the empty text.

    Raises:
        ParameterError: one is no such pattern, or they are too large together.
    """
    parts = [(pattern, _Reader(pattern).read()) for pattern in patterns]
    if sum(part.size for _, part in parts) > limits.MAX_STOP_REGEX_STATES:
        most = limits.MAX_STOP_REGEX_STATES
        told = f"at most {most} characters, classes and groups together, where what is repeated counts each time"
        raise ParameterError(_FIELD, "too large", told)
    made, begins = Patterns(), []
    for pattern, part in parts:
        if part.empty:
            raise ParameterError(_FIELD, pattern, "patterns that match at least one character")
        end = made._state(_State(pattern=pattern))
        begins.append(made.add(part, end))
    seen = bytearray(len(made.states))
    made.begins = tuple(state for begin in begins for state in made.behind(begin, seen))
    return made


class PatternSearch:
    """Looks for the patterns in one text, character by character."""

    def __init__(self, patterns: Patterns) -> None:
        self._patterns = patterns
        self._live: tuple[int, ...] = ()  # states in which matches are, those that began first before others
        self._began: list[int] = []  # where each of those began
        self._place = 0

    @property
    def pending(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a match."""
        return self._place - self._began[0] if self._began else 0

    def take(self, char: str) -> tuple[str, int] | None:
        """Takes a character; the pattern that it completes, and how many characters match: of several the longest."""
        moves = self._patterns.moves
        move = moves.get((self._live, char))
        if move is None:
            if len(moves) >= _MOST_MOVES:
                moves.clear()
            move = moves[self._live, char] = self._patterns.move(self._live, char)
        began = (*self._began, self._place)
        self._place += 1
        self._live, self._began = move.live, [began[source] for source in move.sources]
        return None if move.pattern is None else (move.pattern, self._place - began[move.source])
