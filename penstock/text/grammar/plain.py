"""A JSON schema in plainer keywords of the same meaning, so that more schemas can be met.

The meaning is that of draft 2020-12: https://json-schema.org/draft/2020-12/json-schema-validation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

_ONE: Final = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
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
_DAY: Final = (
    r"(?:(?:\d{4})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_CLOCK: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d+)?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_ALNUM: Final = "[A-Za-z0-9]"


def _label(most: int) -> str:
    """A label of at most so many characters, of which the third and fourth are not both hyphens."""
    rest = "(?:[A-Za-z0-9-]{0,%d}[A-Za-z0-9])?"
    third = f"{_ALNUM}{rest % (most - 4)}|-{_ALNUM}{rest % (most - 5)}"
    return f"{_ALNUM}(?:{_ALNUM}|[A-Za-z0-9-](?:{third}))?"


# RFC 3339 with the days a month has and no leap seconds, and RFC 1123 without labels in Punycode, as exact patterns.
_PATTERNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "date": f"^{_DAY}$",
        "time": f"^{_CLOCK}$",
        "date-time": f"^{_DAY}T{_CLOCK}$",
        "hostname": rf"^(?:{_label(63)}(?:\.{_label(63)}){{0,2}}|{_label(31)}(?:\.{_label(31)}){{0,6}})$",
    }
)


# ECMA-262's white space has one character more than that of the matchers' expressions (section 12.2).
_BLANK: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_BLANKS: Final = MappingProxyType({r"\s": r"[\s\x{feff}]", r"\S": r"[^\s\x{feff}]"})


def plain_schema(schema: Any) -> Any:
    """The same schema without keywords that say nothing, and some others in terms of simpler ones.

    Its depth is bounded by who calls.
    """
    if not isinstance(schema, dict):
        return schema
    plain = dict(schema)
    for name in _ONE:
        if name in plain:
            plain[name] = plain_schema(plain[name])
    for name in _LISTS:
        if isinstance(plain.get(name), list):
            plain[name] = [plain_schema(item) for item in plain[name]]
    for name in _NAMED:
        if isinstance(plain.get(name), dict):
            plain[name] = {key: plain_schema(item) for key, item in plain[name].items()}
    _drop_idle(plain)
    for name in _COUNTS:
        value = plain.get(name)
        if isinstance(value, float) and value.is_integer():
            plain[name] = int(value)
    if _IN_PLACE.isdisjoint(plain):
        _close(plain, "unevaluatedProperties", "additionalProperties")
        _close(plain, "unevaluatedItems", "items")
    _move_bounds(plain)
    _spell_format(plain)
    if isinstance(plain.get("pattern"), str):
        plain["pattern"] = _BLANK.sub(lambda found: _BLANKS.get(found.group(), found.group()), plain["pattern"])
    return plain


def _drop_idle(schema: dict[str, Any]) -> None:
    """Takes out what has no effect without its companion."""
    seen = "unevaluatedItems" in schema or "unevaluatedProperties" in schema  # by which `if` alone has an effect
    if "if" not in schema or not (seen or "then" in schema or "else" in schema):
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)


def _close(schema: dict[str, Any], name: str, plain: str) -> None:
    """Without schemas applied in place, what is unevaluated is what the plain keyword means, if that is not there."""
    value = schema.pop(name, True)
    if value is not True and plain not in schema:
        schema[plain] = plain_schema(value)


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
    elif kind in _PATTERNS:
        del schema["format"]
        if "pattern" in schema:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": _PATTERNS[kind]}]
        else:
            schema["pattern"] = _PATTERNS[kind]
