"""Every scanner and parser of foreign text, with the inputs that could make it slow, by size."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.config.errors import PenstockError
from penstock.text.grammar import lark
from penstock.text.grammar.gbnf import gbnf_to_lark
from penstock.text.grammar.lark_regex import LarkError, as_expression
from penstock.text.grammar.plain import plain_schema
from penstock.text.grammar.scan import check_json, read_json
from penstock.text.grammar.schema import check_schema
from penstock.text.grammar.tags import tags_to_lark
from penstock.text.grammar.translate import translate
from penstock.text.grammar.wellformed import first_fault
from penstock.text.json_tree import objects
from penstock.text.parsers.format import AnswerFormat, formats
from penstock.text.parsers.parser import AnswerParser
from penstock.text.parsers.schema import types
from penstock.text.parsers.values import as_json

Make = Callable[[int], Any]
_SPECIAL = {f"<|special_{i}|>": i for i in range(2000)}
_TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "object"}}}}


@dataclass(frozen=True, slots=True)
class Scanner:
    """What reads foreign text.

    Attributes:
        name: by module.
        run: reads an input; a refusal is an answer.
        inputs: by name, an input of about n characters, values or entries.
    """

    name: str
    run: Callable[[Any], Any]
    inputs: Mapping[str, Make]


def refusing(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function whose refusals are answers."""

    def call(given: Any) -> Any:
        try:
            return run(given)
        except (PenstockError, ValueError, RecursionError) as error:
            return error

    return call


def repeated(*parts: str) -> dict[str, Make]:
    """Each part again and again, alone and behind what begins a rule."""
    return {repr(part)[:24]: partial(_repeat, part) for part in parts}


def _repeat(part: str, size: int) -> str:
    before, _, pump = part.rpartition("…")
    return before + pump * max(1, size // max(1, len(pump)))


_LARK = repeated(
    "A", "start: …\"\\", 'start: …"', "start: …/a\\/", "start: …/", "a[", "a\n", "a:\n", "start: …(", "start: …<a",
    "start: …#", "start: …//", "start: …// \n", "%json {}", '%json {"a":…"%json ', "%json …[", "start: …a b ",
    "a: b c\n", 'start: …"a" ', "start: …/a/ ", "start: …&", "start: …::", "start: …<a> ", "start: …% ", "!?",
    "start: …\\\n",
)  # fmt: skip
_GBNF = repeated(
    "a", "root ::= …a ", 'root ::= …"\\"', "root ::= …'", "root ::= …[", "root ::= …[\\]", "root ::= [a]…[a]", "a \n",
    "root ::= a {1,… ", "root ::= a {…1", "root ::= a{1,…1", "root ::= …<a", "root ::= …!<", "#", "//",
    "root ::= …#\n", "root ::= a…*", 'root ::= …"a" | ', "root ::= …(", "root ::= …()", "a… ", "root ::= …\\",
    "root ::= [^…a-z", "…\n", "root ::= …'\\x41' ", "root ::= [… \\x41",
)  # fmt: skip


def _schemas() -> dict[str, Make]:
    pattern = {"type": "string", "pattern": "a"}

    def many(one: Any) -> Make:
        return lambda n: {"properties": {f"p{i}": one for i in range(n // 8)}}

    def joined(n: int) -> Any:
        big = {"properties": {f"q{i}": pattern for i in range(n // 16)}}
        return {
            "$defs": {"big": big},
            "properties": {f"p{i}": {"allOf": [{"$ref": "#/$defs/big"}]} for i in range(n // 16)},
        }

    def levels(n: int) -> Any:
        chain = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 8} for i in range(n // 32)}
        return {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{n // 32}": pattern}}

    return {
        "properties": many({"type": "string"}),
        "patterns": many(pattern),
        "pattern of [": lambda n: {"pattern": "[" * n},
        "pattern of backslashes": lambda n: {"pattern": "\\" * n},
        "enum": lambda n: {"enum": [str(i) for i in range(n)]},
        "allOf": lambda n: {"allOf": [{"type": "string"}] * n},
        "anyOf": lambda n: {"anyOf": [pattern] * (n // 4)},
        "oneOf": lambda n: {"oneOf": [{"const": i} for i in range(n // 4)]},
        "oneOf of objects": lambda n: {"oneOf": [{"properties": {"a": {"const": str(i)}}} for i in range(n // 8)]},
        "joined to one": joined,
        "levels": levels,
        "references": lambda n: {"properties": {f"p{i}": {"$ref": "#/" + "a/" * (n // 64)} for i in range(32)}},
        "required": lambda n: {"required": [f"p{i}" for i in range(n)], "minProperties": n},
        "lists": lambda n: {"prefixItems": [True] * n},
    }


def _decided() -> dict[str, Make]:
    """Schemas whose keywords are rewritten by comparing what others allow."""

    def shared(one: Any) -> Any:
        options = [{"allOf": [{"$ref": "#/$defs/a"}, {"enum": [f"v{i}"]}]} for i in range(45)]
        return {"$defs": {"a": one}, "oneOf": options}

    def denied(part: Callable[[int], Any]) -> Make:
        return lambda n: {"enum": [*range(n // 2)], "not": {"anyOf": [part(i) for i in range(n // 4)]}}

    def condition(number: int, name: str = "a") -> Any:
        fits = {"properties": {name: {"const": str(number)}}}
        return {"if": fits, "then": {"required": ["b"]}, "else": {"required": ["c"]}}

    def conditions(count: Callable[[int], int], *, names: bool = False) -> Make:
        return lambda n: {"allOf": [condition(i, f"a{i}" if names else "a") for i in range(count(n))]}

    def nested(n: int) -> Any:
        texts = [{"const": f"v{i}"} for i in range(min(n // 8, 60))]
        return {"prefixItems": [{"not": {"anyOf": [*texts, {"minLength": i}]}} for i in range(n // 64)]}

    def referring(one: Callable[[int], Any]) -> Make:
        return lambda n: {
            "$defs": {"r": one(n // 16)},
            "allOf": [{"enum": [1], "not": {"$ref": "#/$defs/r"}} for _ in range(n // 16)],
        }

    return {
        "denied names by reference": referring(lambda n: {"required": [f"p{i}" for i in range(n)]}),
        "denied values by reference": referring(lambda n: {"enum": list(range(n))}),
        "denied lists by reference": referring(lambda n: {"anyOf": [{"enum": list(range(n))}]}),
        "denied members by reference": referring(lambda n: {"properties": {f"p{i}": {"const": i} for i in range(n)}}),
        "compared options of one list": lambda n: shared({"enum": [f"v{i}" for i in range(n)]}),
        "compared options of one object": lambda n: shared({"required": [f"v{i}" for i in range(n)], "type": "object"}),
        "decided conditions on many members": conditions(lambda n: n // 16, names=True),
        "cases of a member": conditions(lambda n: n // 16),
        "cases of a few": lambda n: {"prefixItems": [conditions(lambda _: 8)(n)] * (n // 128)},
        "denied values": denied(lambda i: {"const": i}),
        "denied lists": denied(lambda i: {"enum": [i, -i]}),
        "denied values of a kind": denied(lambda i: {"allOf": [{"type": "string"}, {"const": i}]}),
        "denied texts": nested,
        "denied members": lambda n: {"not": {"properties": {f"p{i}": {"const": i} for i in range(n // 8)}}},
    }


def _referring(size: int) -> Any:
    """A long reference that is met again and again."""
    properties = {f"p{i}": {"allOf": [{"$ref": "#/$defs/a"}]} for i in range(size // 64)}
    return {"$defs": {"a": {"$ref": "#/" + "a/" * size, "pattern": "a"}}, "properties": properties}


def _tags() -> dict[str, Make]:
    def older(n: int, triggers: int = 1) -> Any:
        tags = [{"begin": f"<f{i}>", "schema": {}, "end": "</f>"} for i in range(n // 16)]
        return {"structures": tags, "triggers": ["<f"] * triggers}

    return {
        "structures": older,
        "const": lambda n: {"format": {"type": "const_string", "value": "<" * n}},
        "tokens": lambda n: {"format": {"type": "const_string", "value": "<|special_7|>" * (n // 13)}},
        "nearly tokens": lambda n: {"format": {"type": "const_string", "value": "<|special_" * (n // 10)}},
        "sequence": lambda n: {"format": {"type": "sequence", "elements": [{"type": "any_text"}] * (n // 8)}},
        "triggers": lambda n: older(64, n),
    }


_ANSWERS = (
    "a", " ", "{", "[", '"', "'", "\\", '{"a":', "<", "</", "[[", '{"name": "f", "arguments": {', "f(", "f(a=", "a:",
    ":0", "<parameter=a>", "\n", "<think>", "</think>", ",", '"\\u', "0", "a=", "(", "{{", "}", ")]", "`",
)  # fmt: skip


def _answers(format: AnswerFormat) -> dict[str, Make]:
    """Marks of a format, and what might stand between them."""
    marks = [mark.strip() for mark in format.marks if mark.strip()]
    whole = "".join(marks)
    begin = format.calls.begin if format.calls else ""
    call = format.calls.call.split("{")[0] if format.calls else ""
    texts = [*marks, *(f"{begin}{call}…{text}" for text in _ANSWERS), *_ANSWERS, whole, f"{whole[: len(whole) // 2]}"]
    return repeated(*dict.fromkeys(texts))


def _parse(format: AnswerFormat, step: int, text: str) -> None:
    parser = AnswerParser(format, tools=_TOOLS)
    for begin in range(0, len(text), step):
        parser.push(text[begin : begin + step])
    parser.finish()


def answer_parsers() -> Iterator[Scanner]:
    """A parser for each format, fed as tokens come and all at once."""
    for name, entry in formats().items():
        format = AnswerFormat(entry.calls, entry.reasoning, entry.channels)
        for step in (4, 2**30):
            how = "piecewise" if step == 4 else "whole"
            yield Scanner(f"text.parsers.parser {name} {how}", partial(_parse, format, step), _answers(format))


def _dumped(make: Make, size: int) -> str:
    return json.dumps(make(size))


def _expression_of(text: str) -> str:
    with contextlib.suppress(LarkError):
        return as_expression(text)
    return ""


def grammar_readers() -> Iterator[Scanner]:
    """What reads a client's grammars."""
    schemas = _schemas()
    texts = {name: partial(_dumped, make) for name, make in schemas.items()}
    yield Scanner("text.grammar.lark check", refusing(lark.check), _LARK)
    sequences = repeated("<", "<|special_", "<|special_7|>", "a")
    yield Scanner("text.grammar.lark sequence", lambda text: lark.sequence(text, _SPECIAL), sequences)
    yield Scanner("text.grammar.lark regex", lark.regex, repeated("/", "\\", "\n", "\\/"))
    yield Scanner("text.grammar.gbnf", refusing(gbnf_to_lark), _GBNF)
    yield Scanner("text.grammar.lark_regex", _expression_of, _LARK)
    yield Scanner(
        "text.grammar.scan check_json", refusing(check_json), repeated("[", "[]", '["', '["\\', '[…"a",', "[…,")
    )
    yield Scanner(
        "text.grammar.scan read_json", refusing(lambda t: read_json(t, "JSON")), repeated("[", '["', "[… ", '["\\')
    )
    yield Scanner("text.json_tree", lambda value: list(objects(value)), schemas)
    yield Scanner("text.grammar.schema", refusing(check_schema), schemas)
    yield Scanner("text.grammar.plain", refusing(plain_schema), schemas)
    for name, make in _decided().items():
        yield Scanner(f"text.grammar.{name}", refusing(check_schema), {name: make})
    yield Scanner("text.grammar.pointer", refusing(check_schema), {"long": _referring})
    yield Scanner("text.grammar.wellformed", first_fault, schemas)
    yield Scanner("text.grammar.tags", refusing(lambda tag: tags_to_lark(tag, _SPECIAL)), _tags())
    yield Scanner("text.grammar.translate schema", refusing(lambda text: translate("json_schema", text)), texts)
    choices = {"strings": lambda n: json.dumps([str(i) for i in range(n)]), "one": lambda n: json.dumps(["a" * n])}
    yield Scanner("text.grammar.translate choice", refusing(lambda text: translate("choice", text)), choices)
    yield Scanner("text.parsers.schema types", types, schemas)
    yield Scanner("text.parsers.values as_json", as_json, repeated(*_ANSWERS))
