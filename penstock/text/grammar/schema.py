"""JSON schemas: bounded, made compact, and with what only looks like a demand taken out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import format_value
from penstock.text.grammar.plain import plain_schema
from penstock.text.grammar.pointer import Pointers
from penstock.text.grammar.scan import refused

OPTIONS: Final = "x-guidance"
"""Where a schema says how its documents are laid out (llguidance's name)."""
_IN_PLACE: Final = frozenset(("allOf", "anyOf", "oneOf"))
_ASIDE: Final = frozenset(("$defs", "definitions", "$schema", "$id", "$comment", "title", "description", "default"))
_JOINING: Final = frozenset(("$ref", "anyOf", "oneOf"))
_STEPS_A_VALUE: Final = 4
_MOST_PLAIN: Final = 4 * limits.MAX_GRAMMAR_PARTS
_LAYOUT: Final = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern", "coerce_one_of")


def compact_schema(schema: Any) -> dict[str, Any]:
    """A schema whose documents have no whitespace between their parts, unless it asks for it under "x-guidance".

    Raises:
        RequestError: it is no schema, or larger than allowed.
    """
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refused(f"grammar is {format_value(schema)}; allowed: a JSON schema, which is an object.")
    _check_size(schema)
    _check_intersections(schema)
    asked = schema.get(OPTIONS)
    asked = asked if isinstance(asked, Mapping) else {}
    layout = {name: asked[name] for name in _LAYOUT if isinstance(asked.get(name), (str, bool))}
    plain = plain_schema(schema)
    if (count := _values_in(plain)) > _MOST_PLAIN:
        raise refused(
            f"the JSON schema has {count} values once written without keywords such as not and dependentRequired; "
            f"allowed: at most {_MOST_PLAIN}. Write one enum in place of each not."
        )
    return {**plain, OPTIONS: {"whitespace_flexible": False, **layout}}


def check_schema(schema: Any) -> None:
    """Refuses what `compact_schema` refuses."""
    compact_schema(schema)


def _values_in(schema: Any) -> int:
    """How many values a schema has, itself included."""
    count, level = 0, [schema]
    while level:
        count += len(level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, (dict, list)):
                inner += value.values() if isinstance(value, dict) else value
        level = inner
    return count


def _check_size(schema: dict[str, Any]) -> None:
    stack: list[tuple[Any, int]] = [(schema, 1)]
    seen = 0
    while stack:
        value, depth = stack.pop()
        seen += 1
        if seen > limits.MAX_GRAMMAR_PARTS:
            raise refused(f"the JSON schema has more than the {limits.MAX_GRAMMAR_PARTS} values allowed.")
        if depth > limits.MAX_GRAMMAR_DEPTH:
            raise refused(f"the JSON schema is nested deeper than {limits.MAX_GRAMMAR_DEPTH} levels.")
        if isinstance(value, list):
            stack += ((item, depth + 1) for item in value)
        if not isinstance(value, dict):
            continue
        _check_values(value)
        stack += ((item, depth + 1) for item in value.values())


def _check_values(schema: dict[str, Any]) -> None:
    values, pattern = schema.get("enum"), schema.get("pattern")
    _check_properties(schema)
    if isinstance(values, list) and len(values) > limits.MAX_CHOICES:
        raise refused(f"enum lists {len(values)} values; allowed: at most {limits.MAX_CHOICES}.")
    if isinstance(pattern, str) and len(pattern) > limits.MAX_REGEX_CHARS:
        raise refused(f"pattern has {len(pattern)} characters; allowed: at most {limits.MAX_REGEX_CHARS}.")


def _check_properties(schema: dict[str, Any]) -> None:
    """A name may be said twice where it is not listed, so that properties cannot be counted beyond those required."""
    fewest, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(fewest, (int, float)) and fewest > max(1, known):
        raise refused(f"minProperties is {fewest}; allowed: at most 1, or as many as are required.")


def _check_intersections(schema: dict[str, Any]) -> None:
    """Bounds how many patterns schemas that are joined (`allOf`, `$ref` beside others) put on strings at one place."""
    stack: list[Any] = [schema]
    walk = _Walk(schema)
    if not walk.most:
        return
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            joined = "allOf" in value or (not _JOINING.isdisjoint(value) and len(value.keys() - _ASIDE) > 1)
            if joined and (most := walk.patterns(value)) > limits.MAX_INTERSECTED:
                raise refused(f"allOf joins {most} patterns; allowed: at most {limits.MAX_INTERSECTED}.")
            if not joined:
                stack += value.values()


class _Walk:
    """Counts patterns where schemas join, within a number of steps that grows with the schema.

    Attributes:
        most: steps that are left, 0 from the beginning where there is no pattern.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._pointers = Pointers(root)
        size = 0
        found = False
        stack = list[Any]([root])
        while stack:
            value = stack.pop()
            size += 1
            if isinstance(value, dict):
                found = found or "pattern" in value or "format" in value
                stack += value.values()
            elif isinstance(value, list):
                stack += value
        self.most = limits.MAX_GRAMMAR_STEPS + _STEPS_A_VALUE * size if found else 0

    def patterns(self, start: dict[str, Any]) -> int:
        """The most patterns and formats that are reachable from a schema for one value."""
        found: Counter[str] = Counter()
        stack: list[tuple[Any, str]] = [(start, "")]
        seen: Counter[int] = Counter()
        while stack:
            value, name = stack.pop()
            self.most -= 1
            if self.most <= 0:
                raise refused("the JSON schema joins too many schemas (allOf, $ref beside others); write fewer.")
            if isinstance(value, list):
                stack += ((item, name) for item in value)
            if not isinstance(value, dict):
                continue
            seen[id(value)] += 1
            if seen[id(value)] > limits.MAX_INTERSECTED + 1:
                continue  # joined with itself, once for each time it is referred to
            found[name] += ("pattern" in value) + ("format" in value)
            if found[name] > limits.MAX_INTERSECTED:
                break
            for key, item in value.items():
                if key == "$ref" and isinstance(item, str) and len(found) < limits.MAX_CHOICES:
                    stack.append((self._pointers.target(item), name))
                elif key in ("properties", "patternProperties") and isinstance(item, dict):
                    stack += ((inner, f"{name}/{inner_name}") for inner_name, inner in item.items())
                elif key not in ("$defs", "definitions"):
                    stack.append((item, name if key in _IN_PLACE else f"{name}/{key}"))
        return max(found.values(), default=0)
