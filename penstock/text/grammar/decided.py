"""Keywords that the matchers do not have, in terms of others where what they mean can be decided.

What is rewritten means exactly the same. Whether options exclude each other is judged by supersets of what they allow,
so that it is never taken for granted wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from penstock.config import limits
from penstock.text.grammar.pointer import Pointers

_KINDS: Final = ("array", "boolean", "null", "number", "object", "string")
_NAMES: Final = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}
_BOUNDS: Final = {
    "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"), "number": ("minimum", "maximum"),
    "object": ("minProperties", "maxProperties"),
}  # fmt: skip
_NOTES: Final = frozenset(("title", "description", "$comment", "default", "examples"))
_MOST_COMPARED: Final = 20_000
_ITEMS_A_STEP: Final = 16  # values and names that are compared as quickly as one schema
_MOST_WRITTEN: Final = 2 * limits.MAX_GRAMMAR_CHARS
_MOST_DEPENDENT: Final = 6  # each doubles what is compiled
_DEEPEST: Final = 6


@dataclass(slots=True)
class Decider:
    """Rewrites one schema at a time, which its caller may change.

    Args:
        root: where references point into; it stays as it is.

    Attributes:
        left: schemas that may still be compared.
        room: characters of values that may still be written once more.
    """

    root: Any
    left: int = _MOST_COMPARED
    room: int = _MOST_WRITTEN
    _pointers: Pointers = field(init=False)
    _listed: dict[int, tuple[dict[str, Any], dict[str, Any] | None]] = field(default_factory=dict)
    _typed: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pointers = Pointers(self.root)

    def rewrite(self, schema: dict[str, Any]) -> None:
        """Changes what can be decided, and leaves the rest."""
        if not _unique_anyway(schema):
            schema.pop("uniqueItems")
        options = schema["oneOf"] if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema else []
        if options and self._exclusive(options, self._kinds(schema)):
            schema["anyOf"] = schema.pop("oneOf")
        self._dependent(schema)
        if "not" in schema and (denied := self._denied(schema["not"], self._values(schema))) is not None:
            del schema["not"]
            _join(schema, [denied])

    def _dependent(self, schema: dict[str, Any]) -> None:
        given: dict[str, Any] = {}
        for word in ("dependentRequired", "dependentSchemas", "dependencies"):
            found = schema.get(word, {})
            if not isinstance(found, dict) or not given.keys().isdisjoint(found):
                return
            given |= found
        if len(given) > _MOST_DEPENDENT or not all(isinstance(v, (list, dict, bool)) for v in given.values()):
            return
        for word in ("dependentRequired", "dependentSchemas", "dependencies"):
            schema.pop(word, None)
        demands = [({"required": v} if isinstance(v, list) else v, name) for name, v in given.items() if v != []]
        _join(schema, [{"anyOf": [{"properties": {name: False}}, demand]} for demand, name in demands])

    def _exclusive(self, options: list[Any], kinds: set[str]) -> bool:
        """Whether no document of some types fits two of the options."""
        if all(isinstance(option, dict) and "const" in option for option in options):
            return len({_key(option["const"]) for option in options}) == len(options)
        pairs = ((a, b) for i, a in enumerate(options) for b in options[:i])
        return all(self._apart(a, b, 0, kinds) for a, b in pairs)

    def _apart(self, a: Any, b: Any, depth: int, kinds: Set[str] = frozenset(_KINDS)) -> bool:
        """Whether no document of some types fits both."""
        self.left -= 1
        if self.left < 0 or depth > _DEEPEST:
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
        if not isinstance(schema, dict) or self.left < 0 or depth > _DEEPEST:
            return
        if isinstance(schema.get("$ref"), str):
            yield from self._parts(self._pointers.target(schema["$ref"]), depth + 1)
            return
        yield schema
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from self._parts(part, depth + 1)

    def _two(self, a: dict[str, Any], b: dict[str, Any], depth: int, kinds: Set[str]) -> bool:
        values, others = self._values(a), self._values(b)
        if values is not None and others is not None:
            self.left -= min(len(values), len(others)) // _ITEMS_A_STEP
            if values.keys().isdisjoint(others.keys()):
                return True
        return all(self._apart_as(kind, a, b, depth) for kind in self._kinds(a) & self._kinds(b) & kinds)

    def _apart_as(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        for first, second in ((a, b), (b, a)) if kind in _BOUNDS else ():
            low, high = first.get(_BOUNDS[kind][0]), second.get(_BOUNDS[kind][1])
            if _is_number(low) and _is_number(high) and low > high:
                return True
        if kind != "object":
            return False
        required = [*_required(a), *_required(b)]
        self.left -= len(required) // _ITEMS_A_STEP
        names = set(required)
        return any(self._apart(_property(a, name), _property(b, name), depth + 1) for name in sorted(names))

    def _values(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """The values a schema lists, by what is the same for equal ones, None if it lists none."""
        if id(schema) not in self._listed:
            values = [schema["const"]] if "const" in schema else schema.get("enum")
            found = {_key(value): value for value in values} if isinstance(values, list) else None
            self._listed[id(schema)] = schema, found  # kept, so that no other gets its number
        return self._listed[id(schema)][1]

    def _kinds(self, schema: dict[str, Any]) -> set[str]:
        """Types that a schema may allow; integers are numbers."""
        if id(schema) not in self._typed:
            given = schema.get("type")
            kinds = [given] if isinstance(given, str) else given if isinstance(given, list) else list(_KINDS)
            found = {"number" if kind == "integer" else kind for kind in kinds if isinstance(kind, str)}
            if (values := self._values(schema)) is not None:
                found &= {_NAMES.get(type(value), "null") for value in values.values()}
            self._typed[id(schema)] = schema, found
        return self._typed[id(schema)][1]

    def _denied(self, schema: Any, own: dict[str, Any] | None) -> dict[str, Any] | bool | None:
        """A schema of what does not fit a schema, where it can be written; beside it `own` are the only values."""
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            return None
        words = schema.keys() - _NOTES
        if not words:
            return False
        if len(words) > 1:
            return None
        word = next(iter(words))
        value = schema[word]
        if word == "not" and isinstance(value, (dict, bool)):
            return value
        if word in ("anyOf", "allOf") and isinstance(value, list) and value:
            return self._none_of(word, value, own)
        if word == "required" and isinstance(value, list) and value and all(isinstance(name, str) for name in value):
            return {"anyOf": [{"type": "object", "properties": {name: False}} for name in value]}
        if word == "type":
            return _other_types(value)
        if own is not None and (denied := self._listing(schema)) is not None:
            return self._without(own, denied.keys())
        return None

    def _none_of(self, word: str, parts: list[Any], own: dict[str, Any] | None) -> dict[str, Any] | None:
        """What fits none, or not all, of some schemas. Those that only list values are taken together."""
        lists: list[Set[str]] = []
        denied: list[dict[str, Any] | bool | None] = []
        for part in parts:
            if own is not None and (values := self._listing(part)) is not None:
                lists.append(values.keys())
            else:
                denied.append(self._denied(part, own))
                if denied[-1] is None:
                    return None
        if own is not None and lists:
            whole = set().union(*lists) if word == "anyOf" else set(lists[0]).intersection(*lists[1:])
            denied.append(self._without(own, whole))
        return None if None in denied else {"allOf" if word == "anyOf" else "anyOf": denied}

    def _listing(self, schema: Any) -> dict[str, Any] | None:
        """The values of a schema that does nothing but list them."""
        alone = isinstance(schema, dict) and schema.keys() - _NOTES in ({"const"}, {"enum"})
        return self._values(schema) if alone else None

    def _without(self, own: dict[str, Any], denied: Set[str]) -> dict[str, Any] | bool | None:
        """A list of some values without others, None where no more may be written."""
        if self.room < 0:
            return None
        self.room -= sum(map(len, own))
        left = [value for key, value in own.items() if key not in denied]
        return {"enum": left} if left else False


def _unique_anyway(schema: dict[str, Any]) -> bool:
    """Whether `uniqueItems` has to stay, if it is there."""
    if "uniqueItems" not in schema:
        return True
    most = schema.get("maxItems")
    return schema["uniqueItems"] is not False and not (_is_number(most) and most <= 1)


def _other_types(value: Any) -> dict[str, Any] | bool | None:
    kinds = [value] if isinstance(value, str) else value
    if not isinstance(kinds, list) or ("integer" in kinds and "number" not in kinds):
        return None
    left = [kind for kind in _KINDS if kind not in kinds]
    return {"type": left} if left else False


def _join(schema: dict[str, Any], parts: list[Any]) -> None:
    parts = [part for part in parts if part is not True]
    if parts:
        schema["allOf"] = [*schema.get("allOf", ()), *parts]


def _key(value: Any) -> str:
    """The same for equal JSON values, numbers being equal by value."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_key(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_key, value)) + "]"
    return json.dumps(value)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _required(schema: dict[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    """What holds for a member of an object, as far as it is plain."""
    known = schema.get("properties")
    if isinstance(known, dict) and name in known:
        return known[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
