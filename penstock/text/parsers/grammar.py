"""Grammars (llguidance's Lark) of the calls a format writes: an answer that must call, or whose calls must fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config.errors import RequestError
from penstock.text.grammar import lark
from penstock.text.grammar.closed import requires_unnamed
from penstock.text.grammar.schema import OPTIONS, compact_schema
from penstock.text.parsers.format import AnswerFormat, CallsFormat, Syntax, places
from penstock.text.parsers.schema import may_be_string, properties, types

_FREE: Final = r"/(.|\n)*/"
_LAYOUT: Final = {"item_separator": ", ", "key_separator": ": "}  # as templates' tojson writes
_ANYTHING: Final[Mapping[str, Any]] = {"type": "object"}
_NOTHING: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN: Final = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    )
)
_ANY_ORDER: Final = 6  # parameters that may come in any order; more come as they are declared
_MAX_RULES: Final = 2_000
_MAX_DEPTH: Final = 8


@dataclass(frozen=True, slots=True)
class Function:
    """A function an answer may call; its arguments follow the schema if `held`, else they are any object.

    `field` is where the request has the schema, for refusals.
    """

    name: str
    schema: Any
    held: bool = True
    field: str = "tools"


def calls_grammar(
    format: AnswerFormat,
    functions: Sequence[Function],
    special: Mapping[str, int],
    *,
    must: bool,
    parallel: bool,
    document: Any = None,
) -> str:
    """What an answer may be, once it has reasoned.

    Args:
        format: how the model writes; it has calls.
        functions: at least one.
        special: control tokens as they are written, and their ids.
        must: the answer is calls and nothing else; otherwise it is text in which calls may come up.
        parallel: several calls are allowed.
        document: schema of the JSON document that the answer is if it does not call; None for any text.

    Raises:
        RequestError: a schema is too large.
    """
    assert format.calls is not None
    writer = _Writer(format, format.calls, special)
    if document is None:
        return writer.grammar(functions, must, parallel)
    return writer.grammar(functions, True, parallel, f" | {_json(document)}")


@dataclass(frozen=True, slots=True)
class _Term:
    """A term of a rule, unlike a text that is to be written as it is."""

    text: str


_Parts = list[str | _Term]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of several parts: how it is written as the first of them, and behind others."""

    first: tuple[str | _Term, ...]
    later: tuple[str | _Term, ...]


@dataclass(slots=True)
class _Writer:
    """Collects rules.

    Texts that follow each other become one literal: the lexer takes the longest match and does not go back, so that
    literals of which one begins another must not compete.
    """

    format: AnswerFormat
    calls: CallsFormat
    special: Mapping[str, int]
    _rules: list[str] = field(default_factory=list)
    _calls: list[_Parts] = field(default_factory=list)

    def grammar(self, functions: Sequence[Function], must: bool, parallel: bool, instead: str = "") -> str:
        form, turn = self.calls, self.format.channels.turn if self.format.channels else ""
        self._calls = [self._call(function) for function in functions]
        self._rules.append("// calls")
        opening = form.begin + ("[" if form.list else "")
        if turn:
            start = f"{self._choice('')} | {self._choice(turn)}"
            if not must:
                start += f" | {self._text(self.format.channels.openers[0])} {_FREE} ({self._choice(turn)})?"  # type: ignore[union-attr]
        elif must:
            start = f"{self._choice(opening)} {self._more(parallel)}"
        else:
            start = self._in_text(opening, self._more(parallel))
        return "\n".join(["%llguidance {}", f"start: {start}{instead}", *self._rules])

    def _more(self, parallel: bool) -> str:
        """What comes after the first call."""
        form = self.calls
        end = self._text(("]" if form.list else "") + ("" if form.each else form.end))
        separator = form.separator + (form.begin if form.each else "")
        return f"{self._choice(separator)}* {end}" if parallel else end

    def _choice(self, before: str, cut: int = 0) -> str:
        """A rule for any one call after a text, of which so many characters are left out."""
        after = self.calls.end if self.calls.each else ""
        options = []
        for call in self._calls:
            first = f"{before}{call[0]}"[cut:] if isinstance(call[0], str) else before[cut:]
            rest = call[1:] if isinstance(call[0], str) else call
            options.append(self._joined([first, *rest, after]) or '""')
        return self._rule(" | ".join(options))

    def _in_text(self, opening: str, more: str) -> str:
        """Text, in which what begins calls has to lead to calls."""
        lead = opening if self.calls.begin else opening + places(self.calls.call)[0]
        mark = lead.strip()
        if self.calls.bare:  # nothing marks calls but that an answer begins with them
            return rf"{self._choice(opening)} {more} | /[^\[{{](.|\n)*/ | " + '""'
        return f"{self._until(mark)} {self._choice(opening, lead.index(mark) + len(mark))} {more} | {_FREE}"

    def _until(self, mark: str) -> str:
        """Free text up to a mark, and the mark."""
        if any(token in mark for token in self.special):
            return f"{_FREE} {self._text(mark.lstrip())}"
        return self._rule(f"{_FREE} {lark.literal(mark)}", "[lazy]")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _text(self, text: str) -> str:
        return lark.sequence(text, self.special)

    def _joined(self, parts: _Parts) -> str:
        """Terms, texts that follow each other taken together."""
        terms, text = [], ""
        for part in parts:
            if isinstance(part, str):
                text += part
            elif part.text:
                terms += [self._text(text), part.text]
                text = ""
        return " ".join(filter(None, (*terms, self._text(text))))

    def _call(self, function: Function) -> _Parts:
        """One call of a function."""
        self._rules.append(f"// {function.field}")  # an error of the matcher that shows this line is about the function
        with _about(function):
            return self._written(function)

    def _written(self, function: Function) -> _Parts:
        schema = function.schema if function.held else _ANYTHING
        schema = _closed(schema) if isinstance(schema, Mapping) else _NOTHING
        if "{object}" in self.calls.call:
            arguments = _Term(self._rule(self._arguments(schema)))
            written = self._filled(
                self.calls.object, name=json.dumps(function.name, ensure_ascii=False), arguments=arguments
            )
            before, after = self.calls.call.split("{object}")
            return [before, *written, after]
        text = self.calls.call
        if self.format.channels is not None:  # a message's end may be the end of the answer
            text = text.removesuffix(self.format.channels.ends[1])
        return self._filled(text, name=function.name, arguments=_Term(self._rule(self._arguments(schema))))

    def _filled(self, text: str, **written: str | _Term) -> _Parts:
        """A text with its places filled, its first part a text."""
        number = _Term("/[0-9]{1,3}/")
        values = {"index": number, "number": number, "id": _Term("/[A-Za-z0-9]{9}/"), **written}
        parts: _Parts = [""]
        for odd, piece in enumerate(places(text)):
            part = values[piece] if odd % 2 else piece
            if isinstance(part, str) and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        kind, known = self.calls.arguments, properties(schema)
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        if kind is Syntax.GEMMA:
            return self._gemma(schema, 0)
        if kind is Syntax.JSON:
            if not known or set(schema) - _PLAIN or schema.get("additionalProperties") or needed - known.keys():
                return _json(schema)
            values = [_Term(self._rule(_json(kept))) for kept in known.values()]
            keys = [json.dumps(name, ensure_ascii=False) + ": " for name in known]
            parts = [_Part(("{" + key, value), (", " + key, value)) for key, value in zip(keys, values, strict=True)]
            return self._in_order(parts, [name in needed for name in known], "}", "{}") or _json(schema)
        if kind is Syntax.PYTHON:
            pairs = [(f"{name}=", _Term(self._rule(_python(kept)))) for name, kept in known.items()]
            parts = [_Part(pair, (", " + pair[0], pair[1])) for pair in pairs]
        elif not known and schema.get("additionalProperties") is not False:
            return f"{self._rule(self._parameter(None, {}))}*"
        else:
            terms = [_Term(self._rule(self._parameter(name, kept))) for name, kept in known.items()]
            parts = [_Part((term,), (term,)) for term in terms]
        must = [name in needed for name in known]
        return self._in_order(parts, must, "", "") or self._as_declared(parts, must)

    def _in_order(self, parts: Sequence[_Part], must: Sequence[bool], end: str, empty: str) -> str | None:
        """Parts in any order, each at most once: a rule for every set of parts that may have come; None if too many."""
        if len(parts) > _ANY_ORDER or len(self._rules) > _MAX_RULES:
            return None
        rules: dict[int, str] = {}
        needed = sum(1 << index for index, must_come in enumerate(must) if must_come)
        for seen in range(2 ** len(parts) - 1, -1, -1):
            options = [
                self._joined([*(part.later if seen else part.first), _Term(rules[seen | 1 << index])])
                for index, part in enumerate(parts)
                if not seen >> index & 1
            ]
            if not needed & ~seen:
                options.append(lark.literal(end if seen else empty))
            rules[seen] = self._rule(" | ".join(options))
        return rules[0]

    def _as_declared(self, parts: Sequence[_Part], must: Sequence[bool]) -> str:
        """Parts in their order, those that need not come left out or not."""
        first = rest = '""'
        for part, needed in zip(reversed(parts), reversed(must), strict=True):
            later = _Term(self._rule(rest))
            start, follow = self._joined([*part.first, later]), self._joined([*part.later, later])
            first = start if needed else f"{start} | {self._rule(first)}"
            rest = follow if needed else f"{follow} | {later.text}"
        return self._rule(first)

    def _parameter(self, name: str | None, schema: Any) -> str:
        """One tagged parameter; without a name, any."""
        at = self.calls.parameter.index("{value}")
        end = self.calls.parameter[at + len("{value}") :]
        string = name is None or may_be_string(schema)
        kind = "string" if string else min(types(schema), default="null")
        before = self._filled(
            self.calls.parameter[:at],
            key=_Term(r"/[\w.\-]+/") if name is None else name,
            string="true" if string else "false",
            type="number" if kind == "integer" else kind,
        )
        values = _strings(schema)
        if not string:
            return self._joined([*before, _Term(_json(schema)), end])
        if values is not None:
            return " | ".join(self._joined([*before, value + end]) for value in values)
        return self._joined([*before, _Term(self._until(end))])

    def _gemma(self, schema: Any, depth: int) -> str:
        """A value in Gemma's syntax."""
        quote = self.calls.quotes[0]
        kinds = types(schema)
        if depth < _MAX_DEPTH and isinstance(schema, Mapping):
            if kinds == {"object"} and (known := properties(schema)):
                needed = schema.get("required") or ()
                pairs = [(f"{name}:", _Term(self._rule(self._gemma(kept, depth + 1)))) for name, kept in known.items()]
                parts = [_Part(pair, ("," + pair[0], pair[1])) for pair in pairs]
                must = [name in needed for name in known]
                return f'"{{" {self._in_order(parts, must, "", "") or self._as_declared(parts, must)} "}}"'
            if kinds == {"array"}:
                item = self._rule(self._gemma(schema.get("items", True), depth + 1))
                return f'"[" ({item} ("," {item})*)? "]"'
            if kinds == {"string"}:
                values = _strings(schema)
                if values is not None:
                    texts = [f"{self._text(quote)} {self._text(value)} {self._text(quote)}" for value in values]
                    return f"({' | '.join(texts)})"
                return f"{self._text(quote)} {self._until(quote)}"
            if not kinds & {"string", "array", "object"}:
                return _json(schema)
        return self._any_gemma()

    def _any_gemma(self) -> str:
        quote = self.calls.quotes[0]
        scalar = r'"true" | "false" | "null" | /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/'
        text = f"{self._text(quote)} {self._until(quote)}"
        if "any_gemma" not in {rule.split(":")[0] for rule in self._rules}:
            pair = r"/[\w.\-]+/ " + '":" any_gemma'
            lists = f'"[" (any_gemma ("," any_gemma)*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            self._rules.append(f"any_gemma: {scalar} | {text} | {lists}")
        return "any_gemma"


@contextmanager
def _about(function: Function) -> Iterator[None]:
    """Refusals within are of this function's schema."""
    try:
        yield
    except RequestError as error:
        message = f"{function.field}: {error}"
        raise RequestError(message, param=function.field, code="invalid_function_parameters") from error


def _json(schema: Any) -> str:
    """A term for JSON documents of a schema."""
    found = compact_schema(schema)
    return "%json " + json.dumps({**found, OPTIONS: {**_LAYOUT, **found[OPTIONS]}})


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of arguments that takes no others than it names, unless it says so or requires another."""
    says = "additionalProperties" in schema or "patternProperties" in schema
    if "properties" in schema and not says and not requires_unnamed(schema):
        return {"type": "object", **schema, "additionalProperties": False}
    return {"type": "object", **schema}


def _strings(schema: Any) -> list[str] | None:
    """The strings a schema lists, None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum") if isinstance(schema, Mapping) else None
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


def _python(schema: Any) -> str:
    """A value in Python's syntax."""
    kinds = types(schema)
    words = [word for kind, word in (("boolean", '"True" | "False"'), ("null", '"None"')) if kind in kinds]
    if not kinds <= {"boolean", "null"}:
        words.append(_json(schema))
    if kinds == {"string"} and _strings(schema) is None:
        words.append(r"/'([^'\\\n]|\\.)*'/")
    return f"({' | '.join(words)})"
