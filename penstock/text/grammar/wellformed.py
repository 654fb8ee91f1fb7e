"""Whether a JSON schema is one: that its keywords have values of their kind, by draft 2020-12's own schema.

https://json-schema.org/draft/2020-12/schema. Keywords it does not know say nothing and may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

_TYPES: Final = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_SCHEMA: Final = "a JSON schema, which is an object, true or false"
_ONE: Final = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def _is_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_Rule = tuple[Callable[[Any], bool], str]
_RULES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of them"),
        "enum": (lambda value: isinstance(value, list), "a list"),
        "required": (_is_names, "a list of names"),
        **dict.fromkeys(("pattern", "format", "$ref"), (lambda value: isinstance(value, str), "a string")),
        **dict.fromkeys(("minimum", "maximum"), (_is_number, "a number")),
        **dict.fromkeys(
            ("exclusiveMinimum", "exclusiveMaximum"),
            (lambda value: isinstance(value, (int, float)), "a number, or true or false as in older drafts"),
        ),
        "multipleOf": (lambda value: _is_number(value) and value > 0, "a number more than 0"),
        **dict.fromkeys(
            (f"{side}{what}" for side in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")),
            (_is_count, "an integer of at least 0"),
        ),
    }
)


class SchemaFault(NamedTuple):
    """A keyword that is not of its kind: where it stands (".properties.a.type"), its value, and what is allowed."""

    path: str
    value: Any
    allowed: str


def first_fault(schema: Any) -> SchemaFault | None:
    """The first keyword that is not of its kind."""
    stack: list[tuple[Any, Any]] = [(schema, None)]  # and the path to each: that of what holds it, and its own step
    while stack:
        value, path = stack.pop()
        if not isinstance(value, (dict, bool)):
            return SchemaFault(_spelled(path), value, _SCHEMA)
        if not isinstance(value, dict):
            continue
        for name in [name for name in value if name in _RULES]:
            fits, allowed = _RULES[name]
            if not fits(value[name]):
                return SchemaFault(_spelled((path, f".{name}")), value[name], allowed)
        inner: list[tuple[Any, Any]] = []
        for step, schemas, allowed in _held(value):
            if schemas is None:
                return SchemaFault(_spelled((path, f".{step}")), value[step], allowed)
            inner += ((item, (path, own)) for own, item in schemas)
        stack += reversed(inner)
    return None


def _held(schema: Mapping[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any]] | None, str]]:
    """By keyword, the schemas it holds with their steps, None if it is not of its kind; and what is allowed."""
    for name in _ONE:
        if name in schema:
            yield name, [(f".{name}", schema[name])], _SCHEMA
    for name in _LISTS:
        if name in schema:
            given = schema[name]
            listed = [(f".{name}[{i}]", item) for i, item in enumerate(given)] if isinstance(given, list) else None
            yield name, listed or None, "a list of JSON schemas, not empty"
    for name in _NAMED:
        if name in schema:
            given = schema[name]
            named = [(f".{name}.{key}", item) for key, item in given.items()] if isinstance(given, dict) else None
            yield name, named, "an object of JSON schemas"


def _spelled(path: Any) -> str:
    steps: list[str] = []
    while path is not None:
        path, step = path
        steps.append(step[:80])
    return "".join(reversed(steps))
