"""What a JSON Schema says about the type of a value, as far as reading its text depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALL: Final = frozenset((*_KINDS.values(), "null"))
_MAX_DEPTH: Final = 8


def properties(schema: Any) -> Mapping[str, Any]:
    """Schemas of an object's members by name, with the definitions they may refer to."""
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(found, Mapping):
        return {}
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {
        name: {**shared, **member} if shared and isinstance(member, Mapping) else member
        for name, member in found.items()
    }


def types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types a schema allows, as far as it says so plainly; all of them where it does not."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return _ALL
    allowed = _ALL
    kind = schema.get("type")
    if isinstance(kind, str):
        allowed &= {kind}
    elif isinstance(kind, list):
        allowed &= frozenset(entry for entry in kind if isinstance(entry, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        allowed &= frozenset(_KINDS.get(type(value), "null") for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(word), list) and options:
            allowed &= frozenset().union(*(types(_joined(schema, option), depth + 1) for option in options))
    for option in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        allowed &= types(_joined(schema, option), depth + 1)
    target = _target(schema)
    return allowed if target is None else allowed & types(target, depth + 1)


def may_be_string(schema: Any) -> bool:
    return "string" in types(schema)


def may_be_other(schema: Any) -> bool:
    """Whether a value may be anything but a string."""
    return types(schema) != {"string"}


def _joined(schema: Mapping[str, Any], part: Any) -> Any:
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**shared, **part} if isinstance(part, Mapping) else part


def _target(schema: Mapping[str, Any]) -> Any:
    """What a schema refers to among its own definitions, None where it refers to nothing."""
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return None
    for word in ("$defs", "definitions"):
        prefix, found = f"#/{word}/", schema.get(word)
        if reference.startswith(prefix) and isinstance(found, Mapping):
            return _joined(schema, found.get(reference.removeprefix(prefix)))
    return None
