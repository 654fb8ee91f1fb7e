"""What is known of the documents that schemas allow: their types, listed values, and whether two schemas share any.

Everything is judged by supersets of what a schema allows, so that nothing is taken for granted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from penstock.text.grammar.pointer import Pointers

KINDS: Final = ("array", "boolean", "null", "number", "object", "string")
BOUNDS: Final = {
    "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "number": ("minimum", "maximum"),
    "object": ("minProperties", "maxProperties"),
}  # fmt: skip
DEEPEST: Final = 6
_NAMES: Final = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
_MOST_COMPARED: Final = 20_000
_ITEMS_A_STEP: Final = 16  # values and names that are compared as quickly as one schema


@dataclass(slots=True)
class Comparer:
    """Compares schemas, which stay as they are, in a number of steps.

    Args:
        root: where references point into.

    Attributes:
        left: schemas that may still be looked at.
    """

    root: Any
    left: int = _MOST_COMPARED
    _pointers: Pointers = field(init=False)
    _listed: dict[int, tuple[dict[str, Any], dict[str, Any] | None]] = field(default_factory=dict)
    _typed: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pointers = Pointers(self.root)

    def exclusive(self, options: list[Any], kinds: set[str]) -> bool:
        """Whether no document of some types fits two of the options."""
        if all(isinstance(option, dict) and "const" in option for option in options):
            return len({value_key(option["const"]) for option in options}) == len(options)
        pairs = ((a, b) for i, a in enumerate(options) for b in options[:i])
        return all(self._apart(a, b, 0, kinds) for a, b in pairs)

    def values(self, schema: Any) -> dict[str, Any] | None:
        """The values a schema lists, by what is the same for equal ones, None if it lists none."""
        if not isinstance(schema, dict):
            return None
        if id(schema) not in self._listed:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            found = {value_key(value): value for value in values} if isinstance(values, list) else None
            self._listed[id(schema)] = schema, found  # kept, so that no other gets its number
        return self._listed[id(schema)][1]

    def kinds(self, schema: Any) -> set[str]:
        """Types that a schema may allow; integers are numbers."""
        if not isinstance(schema, dict):
            return set() if schema is False else set(KINDS)
        if id(schema) not in self._typed:
            given = schema.get("type")
            kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else list(KINDS)
            found = {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}
            if (values := self.values(schema)) is not None:
                found &= {kind_of(value) for value in values.values()}
            self._typed[id(schema)] = schema, found
        return self._typed[id(schema)][1]

    def target(self, pointer: str) -> Any:
        """What a `$ref` points at, None if that is not within the schema."""
        return self._pointers.target(pointer)

    def _apart(self, a: Any, b: Any, depth: int, kinds: Set[str] = frozenset(KINDS)) -> bool:
        """Whether no document of some types fits both."""
        self.left -= 1
        if self.left < 0 or depth > DEEPEST:
            return False
        if a is False or b is False:
            return True
        for first, second in ((a, b), (b, a)):
            for part in self._parts(first, 0):
                for word in ("anyOf", "oneOf"):
                    options = part.get(word)
                    if isinstance(options, list) and all(
                        self._apart(option, second, depth + 1, kinds) for option in options
                    ):
                        return True
        return any(self._two(x, y, depth, kinds) for x in self._parts(a, 0) for y in self._parts(b, 0))

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Schemas that all have to fit. What stands beside a reference is not counted, as older drafts ignore it."""
        self.left -= 1
        if not isinstance(schema, dict) or self.left < 0 or depth > DEEPEST:
            return
        if isinstance(schema.get("$ref"), str):
            yield from self._parts(self.target(schema["$ref"]), depth + 1)
            return
        yield schema
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from self._parts(part, depth + 1)

    def _two(self, a: dict[str, Any], b: dict[str, Any], depth: int, kinds: Set[str]) -> bool:
        values, others = self.values(a), self.values(b)
        if values is not None and others is not None:
            self.left -= min(len(values), len(others)) // _ITEMS_A_STEP
            if values.keys().isdisjoint(others.keys()):
                return True
        return all(self._apart_as(kind, a, b, depth) for kind in self.kinds(a) & self.kinds(b) & kinds)

    def _apart_as(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        for first, second in ((a, b), (b, a)) if kind in BOUNDS else ():
            low, high = first.get(BOUNDS[kind][0]), second.get(BOUNDS[kind][1])
            if is_number(low) and is_number(high) and low > high:
                return True
        if kind != "object":
            return False
        required = [*required_names(a), *required_names(b)]
        self.left -= len(required) // _ITEMS_A_STEP
        names = set(required)
        return any(self._apart(member(a, name), member(b, name), depth + 1) for name in sorted(names))


def value_key(value: Any) -> str:
    """The same for equal JSON values, numbers being equal by value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{value_key(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(value_key, value)) + "]"
    return json.dumps(value)


def kind_of(value: Any) -> str:
    """A JSON value's type; integers are numbers."""
    return _NAMES.get(type(value), "null")


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether this is a JSON number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def required_names(schema: dict[str, Any]) -> list[str]:
    """The members a schema asks for."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def member(schema: dict[str, Any], name: str) -> Any:
    """What holds for a member of an object, as far as it is plain."""
    known = schema.get("properties")
    if isinstance(known, dict) and name in known:
        return known[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
