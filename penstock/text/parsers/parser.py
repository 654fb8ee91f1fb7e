"""One answer told apart as it comes: reasoning, then content, then tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from penstock.text.parsers.calls import CallMarks, CallReader
from penstock.text.parsers.events import Parsed, ToolCallDelta, Trimmed
from penstock.text.parsers.format import AnswerFormat, ChannelsFormat
from penstock.text.parsers.stream import Finder, Reader, Stream, finding
from penstock.text.parsers.values import MalformedError

_REASONING, _TEXT, _CALL = range(3)  # in the order in which a Parsed is told


class AnswerParser:
    """Reads one sequence's text; what it tells in all does not depend on how the text is cut into pieces.

    It never fails: text that looks like a call but names no function is content; a call that breaks off has its
    arguments closed, unless the answer was cut there, which leaves them as far as they came; what stands between the
    place where a call breaks and its end mark is left out. Memory is bounded, but for arguments that have to be read
    whole before their type is known, and time is linear.

    Args:
        format: how the model writes.
        tools: parameter schemas by the function's name; None reads no calls.
        opened: whether the prompt has opened the reasoning; None if it has closed it.
        call_id: makes the id of a call from its index and name.
        single: calls after the first are left out.
        must: the answer has to call, so that what begins like a call is one.
        hidden: control tokens that are left out of the content where they mark nothing.

    Attributes:
        thinking: whether the text read so far ends within the reasoning.
        untold: whether the answer ended within a call of which nothing could be told.
    """

    def __init__(
        self,
        format: AnswerFormat,
        *,
        tools: Mapping[str, Any] | None = None,
        opened: bool | None = False,
        call_id: Callable[[int, str], str] = lambda index, name: f"call_{index}",
        single: bool = False,
        must: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        self._reasoning_format = format.reasoning
        self.thinking = bool(opened) or (opened is False and format.reasoning is not None and format.reasoning.assumed)
        self._call_id = call_id
        self._single, self._hidden = single, hidden
        self._must = must
        self.untold = False
        self._told: list[tuple[int, str | ToolCallDelta]] = []  # in order, each after the place its kind has in Parsed
        self._count = 0
        self._stream = Stream()
        self._content = Trimmed(lambda text: self._told.append((_TEXT, text)))
        self._thinking = Trimmed(lambda text: self._told.append((_REASONING, text)), strip=True)
        self._shape = CallMarks(format.calls) if format.calls is not None and tools is not None else None
        self._reader = (
            CallReader(self._stream, self._shape, tools or {}, self._announce, self._argue) if self._shape else None
        )
        self._machine = self._run() if format.channels is None else self._messages(format.channels)

    def feed(self, text: str) -> None:
        """Takes further text; what it brings is told by the next `push` or `finish`."""
        if text:
            self._stream.feed(text)
            next(self._machine, None)

    def push(self, text: str) -> tuple[Parsed, ...]:
        """Takes further text; returns what is sure by now, in its order."""
        self.feed(text)
        return self._news()

    def finish(self, cut: bool = False) -> tuple[Parsed, ...]:
        """Takes the end of the text, `cut` where there was no room for more; as `push`. Call once."""
        self._stream.ended, self._stream.cut = True, cut
        next(self._machine, None)
        return self._news()

    def _news(self) -> tuple[Parsed, ...]:
        news: list[tuple[list[str], list[str], list[ToolCallDelta]]] = []
        last = _CALL + 1
        for kind, piece in self._told:
            if kind < last:
                news.append(([], [], []))
            news[-1][kind].append(piece)  # type: ignore[arg-type]
            last = kind
        self._told.clear()
        return tuple(Parsed("".join(text), "".join(thoughts), tuple(_merged(calls))) for thoughts, text, calls in news)

    def _run(self) -> Reader[None]:
        thinks, shape = self._reasoning_format, self._shape
        begins = frozenset(thinks.begins if thinks else ())
        dropped = frozenset(thinks.dropped if thinks else ())
        opening = shape.opening if shape else frozenset()
        marks = finding((*begins, *dropped, *opening, *self._hidden))
        mark = ""
        if self.thinking:
            mark = yield from self._think(opening)
        elif shape and shape.format.bare:
            yield from self._bare()
        stream, say = self._stream, self._content.say
        while mark or (mark := (yield from stream.until(marks, say, begun=not self._count))):
            following = ""
            if mark in opening:
                following = yield from self._section(mark, self._content)
            elif mark in dropped:
                self._content.drop()
            elif mark in begins and not (self._content.begun or self._count):
                following = yield from self._think(opening)
            elif mark not in self._hidden:
                self._content.say(mark)
            mark = following
        self._content.finish()

    def _think(self, opening: frozenset[str]) -> Reader[str]:
        """Reads reasoning and a call that ended it; returns the mark of further ones as `_section`."""
        assert self._reasoning_format is not None
        thinks = self._reasoning_format
        stream = self._stream
        self.thinking = True
        self._content.drop()
        yield from stream.spaces()
        yield from stream.follows(finding(thinks.begins))
        marks = finding((*thinks.ends, *(opening if thinks.calls_end else ())))
        following, calls = "", self._count
        while (mark := (yield from stream.until(marks, self._thinking.say))) in opening:
            following = yield from self._section(mark, self._thinking)
            if calls != self._count:
                break
        self._thinking.drop()
        self.thinking = not mark
        return following

    def _section(self, mark: str, told: Trimmed) -> Reader[str]:
        """Reads calls; returns the mark of further ones where a broken call led to it, else "".

        What turns out to be no call is given to `told`.
        """
        assert self._reader is not None and self._shape is not None
        stream, count = self._stream, self._count
        stream.start_log(mark)
        try:
            yield from self._reader.section(mark)
        except MalformedError:
            if stream.log is not None and self._lost(bool(mark)):
                return ""
            if stream.log is not None:
                told = told if count == self._count else self._content
                told.say(stream.end_log())
                return ""
            if count == self._count or not self._shape.recovery.longest:
                return ""
            return (yield from self._recover())
        stream.end_log()
        return ""

    def _lost(self, begun: bool) -> bool:
        """Whether what was noted is the beginning of a call at the answer's end, and so is not told.

        `begun`: a mark has said that it is one.
        """
        ended = self._stream.ended and self._stream.at >= len(self._stream.text)
        if not ended or not (self._must or (begun and self._stream.cut)):
            return False
        self._stream.end_log()
        self._content.drop()
        self.untold = True
        return True

    def _recover(self) -> Reader[str]:
        assert self._shape is not None
        mark = yield from self._stream.until(self._shape.recovery, lambda text: None)
        return mark if mark in self._shape.opening else ""

    def _bare(self) -> Reader[None]:
        """Calls without a mark, if the answer begins with one."""
        char = yield from self._stream.spaces()
        if char and char in "[{":
            yield from self._section("", self._content)

    def _messages(self, channels: ChannelsFormat) -> Reader[None]:
        """An answer of messages: what each head says, its body is."""
        stream, head = self._stream, ""
        openers = finding(channels.openers)
        message = finding((channels.message,))
        ends = finding(channels.ends)
        if self.thinking:
            head = channels.reasoning
        while head or (yield from stream.spaces()):
            parts = [head]
            if not head:
                stream.start_log()
                parts = [(yield from stream.follows(openers))]
                if not parts[0] or not (yield from stream.until(message, parts.append)):
                    if not self._lost(bool(parts[0])):
                        self._content.say(stream.end_log())
                    parts = [""]
                stream.end_log()
            head = ""
            yield from self._message("".join(parts), channels, ends)
        self._content.finish()

    def _message(self, head: str, channels: ChannelsFormat, ends: Finder) -> Reader[None]:
        """The body of a message, up to its end."""
        name = _word_after(channels.recipient, head)
        if name and self._reader is not None:
            with suppress(MalformedError):
                yield from self._reader.call_to(name)
            yield from self._stream.until(ends, lambda text: None)
            return
        self.thinking = channels.reasoning in head and self._reasoning_format is not None
        told = self._thinking if self.thinking else self._content
        if told.begun:
            told.say("\n")
        if (yield from self._stream.until(ends, told.say)):
            self.thinking = False
            told.drop()

    def _announce(self, name: str) -> None:
        index = self._count
        self._count += 1
        self._content.drop()
        if not (self._single and index):
            self._told.append((_CALL, ToolCallDelta(index, self._call_id(index, name), name)))

    def _argue(self, text: str) -> None:
        if not (self._single and self._count > 1):
            self._told.append((_CALL, ToolCallDelta(self._count - 1, arguments=text)))


def _word_after(mark: str, text: str) -> str:
    """The name that stands after a mark, "" if there is none."""
    found = re.search(re.escape(mark) + r"([\w.\-]+)", text)
    return found[1] if found else ""


def _merged(calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """The pieces of each call joined."""
    merged: list[ToolCallDelta] = []
    parts: list[str] = []
    for piece in calls:
        if merged and merged[-1].index == piece.index:
            parts.append(piece.arguments)
            continue
        if merged:
            merged[-1] = _with(merged[-1], parts)
        merged.append(piece)
        parts = [piece.arguments]
    if merged:
        merged[-1] = _with(merged[-1], parts)
    return merged


def _with(piece: ToolCallDelta, parts: list[str]) -> ToolCallDelta:
    return ToolCallDelta(piece.index, piece.id, piece.name, "".join(parts))
