"""How a request's answers are read: what its prompt opened, which functions it names, and one parser a sequence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, Self

from penstock.config.errors import RequestError
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.parsers.calls import CallMarks
from penstock.text.parsers.events import Parsed, ToolCallDelta, call_id
from penstock.text.parsers.format import AnswerFormat, CallIds, formats
from penstock.text.parsers.grammar import Function, calls_grammar
from penstock.text.parsers.parser import AnswerParser
from penstock.text.stop_patterns import stop_patterns
from penstock.text.tokenizer import Tokenizer

_TAIL: Final = 64  # tokens at the end of a prompt in which an opened or closed reasoning shows


@dataclass(frozen=True, slots=True)
class Part:
    """What tokens have brought.

    Attributes:
        told: of an answer that is told apart, in its order.
        text: of any other.
        stopped: the stop string that ended the output, else None.
        tokens_used: how many of the tokens were consumed; all of them unless a stop string was found.
        reasoning_tokens: of those, how many belong to the reasoning.
    """

    text: str
    told: tuple[Parsed, ...] = ()
    stopped: str | None = None
    tokens_used: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """How one request's answers are read.

    Attributes:
        format: how the model writes.
        tools: parameter schemas by the function's name, None if no calls are read.
        opened: whether the prompt has opened the reasoning; None if it has closed it.
        key: of the answer, unique among all; ids of calls come from it.
        earlier: calls in the conversation so far.
        functions: that may be called, and whether their arguments have to fit.
        must: the answer has to call.
        parallel: several calls may be made; else those after the first are left out.
    """

    format: AnswerFormat
    tools: Mapping[str, Any] | None
    opened: bool | None
    key: str
    earlier: int = 0
    functions: tuple[Function, ...] = ()
    must: bool = False
    parallel: bool = True

    @classmethod
    def of(
        cls,
        format: AnswerFormat,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        choice: Choice,
        continues: bool,
        key: str,
    ) -> Self | None:
        """How to read answers to a chat, None where they can only be text.

        `tools` and `choice` as sent; `continues`: the last message is gone on with.
        """
        must = choice.mode in ("required", "named")
        if tools and must and format.calls is None:  # a model of no known format is held to plain JSON
            format = replace(format, calls=formats()["xlam"].calls)
        if choice.mode == "none" or format.calls is None:
            tools = None
        if format.reasoning is None and not tools:
            return None
        earlier = sum(len(message.get("tool_calls") or ()) for message in messages)
        tail = tokenizer.decode(prompt_ids[-_TAIL:], skip_special_tokens=False)
        last = messages[-1].get("content") if continues and messages else None
        opened = opened_by(format, last if isinstance(last, str) else "", tail)
        kept = None if tools is None else schemas(tools)
        functions = () if tools is None else _functions(tools, must, choice.name)
        return cls(format, kept, opened, key, earlier, functions, must, choice.parallel)

    def grammar(self, special: Mapping[str, int], kind: str = "", source: str = "") -> str | None:
        """What the answer is held to (Lark) because of the functions it may or must call, None for nothing.

        Args:
            special: control tokens as they are written, and their ids.
            kind, source: the grammar of an answer without calls; "" for any text. Of JSON documents, calls are let
                beside them; other grammars are let alone.

        Raises:
            RequestError: a schema is too large, or the answer has to call and has to be something else.
        """
        if self.must and kind not in ("", "json_object", "json_schema"):
            raise RequestError(
                f"the answer has to call a function, and to fit a {kind} that holds no calls; leave one of them out.",
                param="tool_choice",
                code="contradicting_fields",
            )
        if not self.functions or kind not in ("", "json_object", "json_schema"):
            return None
        document = _document(kind, source)
        if document is None and not any(function.held for function in self.functions):
            return None
        must, parallel = self.must, self.parallel
        return calls_grammar(
            self.format, self.functions, special, must=must, parallel=parallel, document=None if must else document
        )

    def thinking_ids(self, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Tokens that end the reasoning, and those that begin it unless it has begun; None without reasoning."""
        thinks = self.format.reasoning
        if thinks is None or not self.reasons:
            return None
        begun = self.opened or thinks.assumed
        texts = (thinks.end.strip(), "" if begun else thinks.begin.strip())
        end, begin = (tuple(tokenizer.encode(text, add_special_tokens=False)) if text else () for text in texts)
        return end, begin

    @property
    def reasons(self) -> bool:
        """Whether an answer may begin with reasoning."""
        return self.format.reasoning is not None and self.opened is not None

    def reader(self, detokenizer: IncrementalDetokenizer, sequence: int, hidden: frozenset[str]) -> AnswerReader:
        """Reads one sequence of the answer; `hidden` control tokens are left out where they mark nothing."""
        key, calls = f"{self.key}/{sequence}", self.format.calls
        parser = AnswerParser(
            self.format,
            tools=self.tools,
            opened=self.opened,
            call_id=partial(_call_id, calls.ids if calls else CallIds.CALL, key, self.earlier),
            single=not self.parallel,
            must=self.must,
            hidden=hidden,
        )
        names = [function.name for function in self.functions]
        cut = None
        if self.must and calls is not None:
            only = names[0] if len(names) == 1 else ""
            cut = CutCall(parser, CallMarks(calls).opening, only, _call_id(calls.ids, key, self.earlier, 0, only))
        return AnswerReader(detokenizer, parser, cut)


@dataclass(slots=True)
class CutCall:
    """What is told of an answer that has to call and ends before a call can be read: never the marks of one.

    Attributes:
        parser: of the answer.
        marks: what a call may begin with.
        name, id: of the call, where only one function can be meant; else "".
        called: whether a call has been told.
    """

    parser: AnswerParser
    marks: Collection[str]
    name: str
    id: str
    called: bool = False

    def told(self, news: Sequence[Parsed], cut: bool) -> tuple[Parsed, ...]:
        """The last news, with a call without arguments in place of the beginning of one; `cut` for lack of room."""
        last = news[-1] if news else Parsed()
        text = last.text.strip()
        begun = bool(text) and any(mark.startswith(text) for mark in self.marks)
        if self.called or not (begun or self.parser.untold):
            return tuple(news)
        calls = (ToolCallDelta(0, self.id, self.name, "" if cut else "{}"),) if self.name else ()
        return (*news[:-1], replace(last, text="" if begun else last.text, tool_calls=calls))


@dataclass(slots=True)
class AnswerReader:
    """Tokens of one sequence to its text, told apart by a parser, or as it is without one."""

    detokenizer: IncrementalDetokenizer
    parser: AnswerParser | None = None
    cut: CutCall | None = None

    def push(self, tokens: Sequence[int], ended: bool = False, cut: bool = False) -> Part:
        """Takes further tokens; with `ended`, the last ones, which `cut` says were so for lack of room.

        After a stop string nothing more is consumed.
        """
        if self.parser is None:
            piece = self.detokenizer.push(tokens)
            rest = self.detokenizer.finish() if ended and piece.stopped is None else None
            stopped = piece.stopped if rest is None else rest.stopped
            return Part(piece.text + (rest.text if rest else ""), stopped=stopped, tokens_used=piece.tokens_used)
        return self._parsed(self.parser, tokens, ended, cut)

    def _parsed(self, parser: AnswerParser, tokens: Sequence[int], ended: bool, cut: bool) -> Part:
        used = 0
        reasoning = 0
        stopped = None
        for token in tokens:
            before = parser.thinking
            piece = self.detokenizer.push((token,))
            used, stopped = used + piece.tokens_used, piece.stopped
            parser.feed(piece.text)
            reasoning += before or parser.thinking
            if stopped is not None:
                break
        if ended and stopped is None:
            rest = self.detokenizer.finish()
            parser.feed(rest.text)
            stopped = rest.stopped
        over = ended or stopped is not None
        cut = cut and stopped is None
        news = parser.finish(cut) if over else parser.push("")
        if self.cut is not None:
            self.cut.called = self.cut.called or any(part.tool_calls for part in news)
            news = self.cut.told(news, cut) if over else news
        return Part("", news, stopped, used, reasoning)


def _document(kind: str, source: str) -> Any:
    """The schema of the documents a grammar allows, None without one."""
    if kind != "json_schema":
        return {"type": "object"} if kind else None
    try:
        return json.loads(source)
    except ValueError:  # reported where the grammar is translated
        return None


def _functions(tools: Sequence[Mapping[str, Any]], must: bool, name: str) -> tuple[Function, ...]:
    declared = [
        (tool.get("function", tool), f"tools[{index}].{'function.' if 'function' in tool else ''}parameters")
        for index, tool in enumerate(tools)
    ]
    return tuple(
        Function(function["name"], function.get("parameters"), must or function.get("strict") is True, field)
        for function, field in declared
        if not name or function["name"] == name
    )


class Choice(Protocol):
    """Whether and which functions an answer calls."""

    @property
    def mode(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def parallel(self) -> bool: ...


class Shown(Protocol):
    """What of an answer is shown: sampling parameters, in part."""

    @property
    def n(self) -> int: ...
    @property
    def stop(self) -> Sequence[str]: ...
    @property
    def begins_with(self) -> bytes: ...
    @property
    def stop_regex(self) -> tuple[str, ...]: ...
    @property
    def include_stop_str_in_output(self) -> bool: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def min_tokens(self) -> int: ...


def answer_readers(
    tokenizer: Tokenizer, shown: Shown, continues: bool, reading: Reading | None, mark_ids: frozenset[int]
) -> dict[int, AnswerReader]:
    """One reader a sequence.

    Args:
        tokenizer: whose tokens will come.
        shown: how many sequences, and what of them is shown.
        continues: the answer goes on with the prompt's text, so that a leading space belongs to it.
        reading: tells reasoning and calls apart, None for plain text.
        mark_ids: control tokens that mark these.
    """
    readers = {}
    patterns = stop_patterns(shown.stop_regex) if shown.stop_regex else None
    shown_marks = mark_ids if shown.skip_special_tokens else ()
    hidden = frozenset(filter(None, (tokenizer.token_bytes(token).decode("utf-8", "replace") for token in shown_marks)))
    for sequence in range(shown.n):
        detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop=shown.stop,
            include_stop=shown.include_stop_str_in_output,
            skip_special_tokens=shown.skip_special_tokens,
            min_tokens=shown.min_tokens,
            after_prompt=continues,
            visible=mark_ids if reading else frozenset(),
            patterns=patterns,
        )
        detokenizer.leave_out(shown.begins_with)
        readers[sequence] = reading.reader(detokenizer, sequence, hidden) if reading else AnswerReader(detokenizer)
    return readers


def schemas(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Parameter schemas by the function's name, of declarations as OpenAI's."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") for function in functions}


def visible_ids(format: AnswerFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that a format's marks are made of: their text is needed to read an answer."""
    pieces = {token: tokenizer.piece(token) for token in tokenizer.special_ids}
    return frozenset(token for token, piece in pieces.items() if piece and any(piece in mark for mark in format.marks))


def _call_id(kind: CallIds, key: str, earlier: int, index: int, name: str) -> str:
    return call_id(kind, key, index, name, earlier)


def opened_by(format: AnswerFormat, continued: str, tail: str) -> bool | None:
    """Whether a prompt has opened the reasoning, None if it has closed it or there is none.

    Args:
        format: how the model writes.
        continued: text of a message that the answer goes on with.
        tail: the prompt's last part.
    """
    thinks = format.reasoning
    if thinks is None:
        return None
    begins, ends = thinks.begins, thinks.ends
    begun = max((continued.rfind(text) for text in begins), default=-1)
    if begun >= 0:
        return True if begun > max(continued.rfind(text) for text in ends) else None
    tail = tail.rstrip()
    if tail.endswith(tuple(text.rstrip() for text in ends)):
        return None
    if tail.endswith(tuple(text.rstrip() for text in begins)):
        return True
    return None if continued.strip() else False
