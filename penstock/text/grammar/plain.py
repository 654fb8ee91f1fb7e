"""A JSON schema in plainer keywords of the same meaning, so that more schemas can be met.

The meaning is that of draft 2020-12: https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Final

from penstock.text.grammar.cases import split_cases
from penstock.text.grammar.decided import Decider
from penstock.text.grammar.formats import PATTERNS, SAME

_ONE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_IN_PLACE: Final = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas", "contains")
)
# Formats the specification defines; any other says nothing (section 7.2.3), so it is left out.
_FORMATS: Final = frozenset(
    ("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
     "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex")
)  # fmt: skip
_VALUES: Final = frozenset(("const", "enum", "default", "examples"))  # which hold documents, not schemas
_KNOWN: Final = frozenset(
    (*_ONE, *_LISTS, *_NAMED, *_VALUES, "unevaluatedItems", "unevaluatedProperties", "x-guidance")
)

# ECMA-262's white space has one character more than that of the matchers' expressions (section 12.2).
_PART: Final = re.compile(r"\\.|[\[\]]", re.DOTALL)
_BLANKS: Final = MappingProxyType({r"\s": r"[\s\x{feff}]", r"\S": r"[^\s\x{feff}]"})


def plain_schema(schema: Any) -> Any:
    """The same schema without keywords that say nothing, and some others in terms of simpler ones.

    Its depth is bounded by who calls.
    """
    return _plain(schema, Decider(schema))


def _plain(schema: Any, decider: Decider) -> Any:
    if not isinstance(schema, dict):
        return schema
    plain = dict(split_cases(schema, decider.take) if decider.movable else schema)
    for name in _ONE:
        if name in plain:
            plain[name] = _plain(plain[name], decider)
    for name in _LISTS:
        if isinstance(plain.get(name), list):
            plain[name] = [_plain(item, decider) for item in plain[name]]
    for name in _NAMED:
        if isinstance(plain.get(name), dict):
            plain[name] = {key: _plain(item, decider) for key, item in plain[name].items()}
    for name, value in schema.items():
        if isinstance(value, dict) and name not in _KNOWN:  # schemas may lie anywhere, for a $ref to point at
            plain[name] = _plain(value, decider)
    _drop_idle(plain)
    for name in _COUNTS:
        value = plain.get(name)
        if isinstance(value, float) and value.is_integer():
            plain[name] = int(value)
    if _IN_PLACE.isdisjoint(plain):
        _close(plain, "unevaluatedProperties", "additionalProperties", decider)
        _close(plain, "unevaluatedItems", "items", decider)
    if decider.movable and isinstance(plain.get("allOf", []), list):
        decider.rewrite(plain)
    _move_bounds(plain)
    _spell_format(plain)
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = _with_blanks(plain["pattern"])
    return plain


def _with_blanks(pattern: str) -> str:
    """A pattern with ECMA-262's white space, but in classes, where the matchers would not take it."""
    within = False

    def one(found: re.Match[str]) -> str:
        nonlocal within
        part = found.group()
        within = part == "[" or (within and part != "]")
        return part if within else _BLANKS.get(part, part)

    return _PART.sub(one, pattern)


def _drop_idle(schema: dict[str, Any]) -> None:
    """Takes out what has no effect without its companion."""
    seen = "unevaluatedItems" in schema or "unevaluatedProperties" in schema  # by which `if` alone has an effect
    if "if" not in schema or not (seen or "then" in schema or "else" in schema):
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _close(schema: dict[str, Any], name: str, plain: str, decider: Decider) -> None:
    """Without schemas applied in place, what is unevaluated is what the plain keyword means, if that is not there."""
    value = schema.pop(name, True)
    if value is not True and plain not in schema:
        schema[plain] = _plain(value, decider)


def _move_bounds(schema: dict[str, Any]) -> None:
    """Moves exclusive bounds that are whole numbers inwards by next to nothing.

    The matchers take such a bound for a member where the other bound lies within one of it.
    """
    for name, inwards in (("exclusiveMinimum", 1e-6), ("exclusiveMaximum", -1e-6)):
        value = schema.get(name)
        if schema.get("type") == "integer" or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if abs(value) < 1e6 and value == value // 1:
            schema[name] = value + inwards


def _spell_format(schema: dict[str, Any]) -> None:
    kind = schema.get("format")
    if not isinstance(kind, str):
        return
    if kind not in _FORMATS:
        del schema["format"]
    elif kind in SAME:
        schema["format"] = SAME[kind]
    elif kind in PATTERNS:
        del schema["format"]
        if "pattern" in schema and isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": PATTERNS[kind]}]
        else:
            schema["pattern"] = PATTERNS[kind]
