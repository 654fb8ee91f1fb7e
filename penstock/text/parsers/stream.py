"""Text that arrives in pieces, read as if it were whole: readers are generators that wait for more of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, TypeVar

_Result = TypeVar("_Result")
Reader = Generator[None, None, _Result]
Sink = Callable[[str], None]
MAX_HELD: Final = 16_384  # characters that wait for the decision whether they are a call


@dataclass(frozen=True, slots=True)
class Finder:
    """Strings to look for, the leftmost first and of those the longest."""

    pattern: re.Pattern[str]
    prefixes: frozenset[str]
    longest: int

    def held(self, text: str, start: int) -> int:
        """Where the part of a text begins, from `start` on, that might grow into one of the strings."""
        for size in range(min(len(text) - start, self.longest - 1), 0, -1):
            if text[-size:] in self.prefixes:
                return len(text) - size
        return len(text)


@lru_cache(maxsize=1024)
def finder(strings: frozenset[str]) -> Finder:
    """Looks for non-empty strings; for none of them it never finds anything."""
    ordered = sorted(strings, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
    prefixes = frozenset(text[:size] for text in ordered for size in range(1, len(text)))
    return Finder(pattern, prefixes, len(ordered[0]) if ordered else 0)


def finding(strings: Iterable[str]) -> Finder:
    """A finder of the non-empty ones among the strings."""
    return finder(frozenset(filter(None, strings)))


@dataclass(slots=True)
class Stream:
    """What has arrived and was not read yet.

    Attributes:
        text, at: arrived text and how far it was read.
        ended: no more will come.
        cut: it ended where there was no more room, so that what is begun would have gone on.
        log: while set, everything that is read is noted there as well, for the case that it has to be given back;
            the text seems to end after MAX_HELD characters of it, so that memory is bounded.
    """

    text: str = ""
    at: int = 0
    ended: bool = False
    cut: bool = False
    log: list[str] | None = None
    _logged: int = field(default=0)

    def feed(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def start_log(self, text: str = "") -> None:
        """Notes what is read from now on, after `text`, which was read already."""
        self.log, self._logged = [text], len(text)

    def end_log(self) -> str:
        """What was noted; noting ends."""
        noted = "".join(self.log or ())
        self.log = None
        self._logged = 0
        return noted

    @property
    def _limit(self) -> int:
        """Where reading has to stop for now: while noting, after MAX_HELD characters."""
        if self.log is None:
            return len(self.text)
        return min(len(self.text), self.at + MAX_HELD - self._logged)

    @property
    def _final(self) -> bool:
        """Whether nothing comes after the limit."""
        return self.ended or (self.log is not None and len(self.text) - self.at >= MAX_HELD - self._logged)

    @property
    def broke_off(self) -> bool:
        """Whether all of a text that was cut is read."""
        return self.cut and self.ended and self.at >= len(self.text)

    def skip(self, count: int) -> str:
        """Reads characters that are there."""
        part = self.text[self.at : self.at + count]
        self.at += count
        if self.log is not None:
            self.log.append(part)
            self._logged += count
        return part

    def unread(self, text: str) -> None:
        """Gives back what was read last; in one piece, if that is noted."""
        self.text, self.at = text + self.text[self.at :], 0
        if self.log is not None:
            self.log.pop()
            self._logged -= len(text)

    def peek(self) -> Reader[str]:
        """The next character, "" at the end; it is not read."""
        while self.at >= self._limit:
            if self._final:
                return ""
            yield
        return self.text[self.at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads what matches from here on of what has arrived; the pattern must match texts character by character."""
        match = pattern.match(self.text, self.at, self._limit)
        return self.skip(match.end() - self.at) if match else ""

    def spaces(self) -> Reader[str]:
        """Reads white space; returns the character after it, which is not read, "" at the end."""
        while (char := (yield from self.peek())).isspace():
            self.run(_SPACES)
        return char

    def follows(self, wanted: Finder) -> Reader[str]:
        """Reads one of the strings if it comes next (the longest of several), else nothing and returns "".

        The beginning of one, where the text was cut in it, is read too.
        """
        while wanted.longest:
            rest = self.text[self.at : min(self._limit, self.at + wanted.longest)]
            if self._final or (rest and rest not in wanted.prefixes):
                match = wanted.pattern.match(rest)
                if not match and self.cut and rest in wanted.prefixes and self.at + len(rest) >= len(self.text):
                    self.skip(len(rest))
                return self.skip(match.end()) if match else ""
            yield
        return ""

    def until(self, wanted: Finder, sink: Sink, *, begun: bool = True) -> Reader[str]:
        """Gives the text before the next of the strings to the sink; returns the string, which is read too.

        Returns "" at the end. Where the text was cut within one of them, its beginning is given only with `begun`.
        """
        while True:
            limit, final = self._limit, self._final
            safe = limit if final else wanted.held(self.text, self.at)
            match = wanted.pattern.search(self.text, self.at, limit)
            if match and (final or match.start() < safe):
                if match.start() > self.at:
                    sink(self.skip(match.start() - self.at))
                return self.skip(len(match[0]))
            if final and self.cut and self.ended and not begun:
                safe = min(limit, wanted.held(self.text, self.at))
            if safe > self.at:
                sink(self.skip(safe - self.at))
            if final:
                self.at = limit
                return ""
            yield


_SPACES = re.compile(r"\s+")
