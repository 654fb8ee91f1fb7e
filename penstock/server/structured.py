"""What clients write to hold an answer to a form, in any dialect, as the one internal Grammar. Pure.

Their fields: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`, llama-server's `grammar` and
`json_schema`, and what other dialects hand over under a name of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any, Final

from penstock.config import limits
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import RequestError, format_value
from penstock.server.errors import bad_value
from penstock.text.grammar.closed import closed_schema
from penstock.text.grammar.scan import read_json

FIELDS: Final = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "grammar", "json_schema",
)  # fmt: skip
"""The fields of a body that `asked` reads."""
_LAYOUT: Final = "x-guidance"  # where a schema says how documents are laid out
_SCHEMAS: Final = "a JSON schema (an object, or one written as a string)"
_FORMATS: Final = '"text", "json_object", "json_schema" or "structural_tag"'


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar, and the field that asked for it."""

    grammar: Grammar
    field: str


def asked(fields: Mapping[str, Any]) -> Asked | None:
    """The grammar a body asks for, None if it asks for none.

    Args:
        fields: the body's, of which FIELDS are looked at; None means that a field was left out.

    Raises:
        RequestError: a field is not of its form, or several ask for different things.
    """
    wishes = list(_wishes({name: value for name in FIELDS if (value := fields.get(name)) is not None}))
    if len(wishes) > 1:
        first, second = wishes[0].field, wishes[1].field
        raise RequestError(
            f"{first} and {second} both say what form the answer has; send one of them.",
            param=second,
            code="contradicting_fields",
        )
    return wishes[0] if wishes else None


def schema_grammar(
    schema: Any, field: str, layout: Mapping[str, Any] = MappingProxyType({}), *, closed: bool = False
) -> Asked:
    """A grammar of the documents that fit a JSON schema.

    Args:
        schema: an object, or the same as a string.
        field: where it was sent.
        layout: llguidance's options for whitespace; without any, documents are compact.
        closed: objects have the properties that the schema names alone, where it does not say of others.

    Raises:
        RequestError: it is neither, or too large.
    """
    schema = _schema(schema, field)
    if closed:
        schema = closed_schema(schema)
    if layout:
        schema = {**schema, _LAYOUT: {**_mapping(schema.get(_LAYOUT)), **layout}}
    return Asked(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":"))), field)


def object_grammar(field: str, layout: Mapping[str, Any] = MappingProxyType({})) -> Asked:
    """A grammar of all JSON objects."""
    if layout:
        return schema_grammar({"type": "object"}, field, layout)
    return Asked(Grammar(GrammarKind.JSON_OBJECT), field)


def _wishes(fields: Mapping[str, Any]) -> Iterator[Asked]:
    if (wish := _response_format(fields.get("response_format"))) is not None:
        yield wish
    layout = _guided_layout(fields)
    prefixes = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
    for name, kind in prefixes.items():
        if name in fields:
            yield _CONSTRAINTS[kind](fields[name], name, layout)
    if "structured_outputs" in fields:
        yield from _structured_outputs(fields["structured_outputs"])
    if fields.get("grammar") not in (None, ""):  # llama-server's web client sends an empty one
        yield _grammar(fields["grammar"], "grammar", {})
    if "json_schema" in fields:
        yield schema_grammar(fields["json_schema"], "json_schema")


def _response_format(value: Any) -> Asked | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise bad_value("response_format", value, f"an object whose type is {_FORMATS}")
    kind = value.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama-server's
        return object_grammar("response_format") if schema is None else schema_grammar(schema, "response_format.schema")
    if kind == "json_schema":
        return _json_schema_format(value)
    if kind == "structural_tag":
        return _structural_tag(value, "response_format", {})
    raise bad_value("response_format.type", kind, _FORMATS)


def _json_schema_format(value: Mapping[str, Any]) -> Asked:
    inner = value.get("json_schema")
    if inner is None and "schema" in value:  # llama-server's, and that of OpenAI's Responses
        return schema_grammar(value["schema"], "response_format.schema")
    if not isinstance(inner, Mapping):
        raise bad_value("response_format.json_schema", inner, "an object with name and schema")
    if inner.get("schema") is None:
        return object_grammar("response_format.json_schema")
    strict = inner.get("strict") is True
    return schema_grammar(inner["schema"], "response_format.json_schema.schema", closed=strict)


def _structured_outputs(value: Any) -> Iterator[Asked]:
    name = "structured_outputs"
    if not isinstance(value, Mapping):
        raise bad_value(name, value, f"an object with one of {', '.join(_CONSTRAINTS)}")
    unknown = sorted(set(value) - set(_CONSTRAINTS) - set(_OPTIONS))
    if unknown:
        allowed = ", ".join((*_CONSTRAINTS, *_OPTIONS))
        raise RequestError(
            f"{name} has the field {format_value(unknown[0])}; allowed: {allowed}.", param=name, code="unknown_field"
        )
    layout: dict[str, Any] = {}
    if (pattern := value.get("whitespace_pattern")) is not None:
        layout["whitespace_pattern"] = _string(pattern, f"{name}.whitespace_pattern")
    for option in _OPTIONS[1:]:
        if not isinstance(value.get(option), (bool, NoneType)):
            raise bad_value(f"{name}.{option}", value[option], "true or false")
    if value.get("disable_any_whitespace") is False:
        layout["whitespace_flexible"] = True
    for kind, make in _CONSTRAINTS.items():
        given = value.get(kind)
        if given is None or (kind == "json_object" and given is False):
            continue
        if kind == "json" and value.get("disable_additional_properties"):
            given = closed_schema(_schema(given, f"{name}.{kind}"))
        yield make(given, f"{name}.{kind}", layout)


def _guided_layout(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    pattern = fields.get("guided_whitespace_pattern")
    return {} if pattern is None else {"whitespace_pattern": _string(pattern, "guided_whitespace_pattern")}


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise bad_value(field, value, "a string")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _schema(schema: Any, field: str) -> dict[str, Any]:
    """A schema that is small enough to be read and written where others wait."""
    if isinstance(schema, str):
        _check_chars(len(schema), field)
        try:
            schema = read_json(schema, "JSON schema")
        except RequestError as error:
            if error.__cause__ is None:  # it is JSON, of too many values or levels
                raise RequestError(f"{field}: {error}", param=field, code=error.code) from error
            raise bad_value(field, schema, _SCHEMAS) from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise bad_value(field, schema, _SCHEMAS)
    _bounded(schema, field)
    return schema


def _check_chars(count: int, field: str) -> None:
    if count > (most := limits.MAX_GRAMMAR_CHARS):
        message = f"{field} has at least {count} characters; allowed: at most {most}. Send a smaller one."
        raise RequestError(message, param=field, code="invalid_grammar")


def _bounded(value: Any, field: str) -> Any:
    """A value of few enough values and characters to be written as text, of which no more are looked at."""
    stack: list[Any] = [value]
    count, chars = 1, 0
    while stack:
        item = stack.pop()
        inner = item if isinstance(item, (list, dict)) else ()
        count += len(inner)
        if count > limits.MAX_GRAMMAR_PARTS:
            message = f"{field} has more than the {limits.MAX_GRAMMAR_PARTS} values allowed; send a smaller one."
            raise RequestError(message, param=field, code="invalid_grammar")
        chars += len(item) if isinstance(item, str) else sum(map(len, inner)) if isinstance(inner, dict) else 0
        _check_chars(chars, field)
        stack += inner.values() if isinstance(inner, dict) else inner
    return value


def _regex(value: Any, field: str, _: Mapping[str, Any]) -> Asked:
    return Asked(Grammar(GrammarKind.REGEX, _string(value, field)), field)


def _choice(value: Any, field: str, _: Mapping[str, Any]) -> Asked:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise bad_value(field, value, "a list of at least one string")
    return Asked(Grammar(GrammarKind.CHOICE, json.dumps(_bounded(value, field))), field)


def _grammar(value: Any, field: str, _: Mapping[str, Any]) -> Asked:
    """GBNF or EBNF where rules are defined with `::=`, else Lark."""
    text = _string(value, field)
    return Asked(Grammar(GrammarKind.GBNF if "::=" in text else GrammarKind.LARK, text), field)


def _json_object(value: Any, field: str, layout: Mapping[str, Any]) -> Asked:
    if value is not True:
        raise bad_value(field, value, "true or false")
    return object_grammar(field, layout)


def _structural_tag(value: Any, field: str, _: Mapping[str, Any]) -> Asked:
    if not isinstance(value, (str, Mapping)):
        raise bad_value(field, value, "a structural tag (an object, or one written as a string)")
    source = value if isinstance(value, str) else json.dumps(_bounded(value, field))
    return Asked(Grammar(GrammarKind.STRUCTURAL_TAG, source), field)


_CONSTRAINTS: Final[Mapping[str, Callable[[Any, str, Mapping[str, Any]], Asked]]] = MappingProxyType(
    {
        "json": schema_grammar,
        "regex": _regex,
        "choice": _choice,
        "grammar": _grammar,
        "json_object": _json_object,
        "structural_tag": _structural_tag,
    }
)
_OPTIONS: Final = (
    "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback",
)  # fmt: skip
