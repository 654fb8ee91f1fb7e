"""A JSON schema whose objects have no properties but those that it names.

A schema that names properties and says nothing of others lets a model go on with members of its own invention. Where
several schemas speak of one object (`allOf`, `if`, a reference beside properties …), none of them names all of its
properties, so they stay as they are. So does one that requires a property which it does not name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.config import limits

_MAPS: Final = ("properties", "$defs", "definitions")
_LISTS: Final = ("anyOf", "oneOf", "prefixItems")
_ONES: Final = ("items", "additionalProperties", "contains")
_OF_ONE_OBJECT: Final = (
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef", "dependentSchemas"),
    *("dependencies", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("extends", "$recursiveRef"),
)
_SHARED: Final = ("$defs", "definitions")


def closed_schema(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever an object's properties are named in one place alone."""
    if not isinstance(schema, Mapping):
        return schema
    joined = _joins(schema)
    return _closed(schema, 0, _LISTS if not joined else ("prefixItems",), _MAPS if not joined else ("properties",))


def _closed(value: Any, depth: int, lists: tuple[str, ...], maps: tuple[str, ...]) -> Any:
    if not isinstance(value, Mapping) or depth > 2 * limits.MAX_GRAMMAR_DEPTH:  # too deep: refused later
        return value
    named = isinstance(value.get("properties"), Mapping)
    result = dict(value)
    for word in maps:
        if isinstance(inner := value.get(word), Mapping):
            result[word] = {name: _closed(item, depth + 1, lists, maps) for name, item in inner.items()}
    for word in lists:
        if isinstance(inner := value.get(word), list) and not (named and word != "prefixItems"):
            result[word] = [_closed(item, depth + 1, lists, maps) for item in inner]
    for word in _ONES:
        if isinstance(inner := value.get(word), Mapping):
            result[word] = _closed(inner, depth + 1, lists, maps)
    if named and not any(word in value for word in _OF_ONE_OBJECT) and not requires_unnamed(value):
        result["additionalProperties"] = False
    return result


def requires_unnamed(schema: Mapping[str, Any]) -> bool:
    """Whether an object's schema requires a property that it does not name, so that nothing would fit it if closed."""
    named, required = schema.get("properties"), schema.get("required")
    known = named if isinstance(named, Mapping) else {}
    return isinstance(required, list) and any(name not in known for name in required if isinstance(name, str))


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether schemas are joined anywhere, so that a definition or an alternative may be a part of another object's."""
    stack: list[Any] = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            if "allOf" in value or ("$ref" in value and "properties" in value):
                return True
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return False
