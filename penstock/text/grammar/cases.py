"""Conditions on one member's value, as a choice between its values.

Schemas tell kinds of objects apart by `allOf: [{if: {properties: {kind: {const: "a"}}}, then: …}, {if: … "b" …}, …]`.
Written out condition by condition, the choices multiply; by the member's value there are as many as conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from penstock.config import limits
from penstock.text.grammar.compared import KINDS, member, required_names, value_key
from penstock.text.grammar.decided import join
from penstock.text.grammar.denied import NOTES, weight

_MOST_CASES: Final = 256
_FACTS: Final = ("type", "enum", "const")  # by which the values that are left can be told
_CONDITIONAL: Final = frozenset(("if", "then", "else"))


@dataclass(frozen=True, slots=True)
class _Condition:
    """`if` a member has one of some values.

    Attributes:
        name: of the member.
        values: by what is the same for equal ones.
        absent: whether an object without it fits too.
        others: whether what is no object fits too.
        then, other: what is asked for if it fits, and if not.
    """

    name: str
    values: dict[str, Any]
    absent: bool
    others: bool
    then: Any
    other: Any

    def asked(self, fits: bool) -> Any:
        return self.then if fits else self.other


def split_cases(schema: dict[str, Any], take: Callable[[int], bool]) -> dict[str, Any]:
    """The same schema; conditions on one member in it and in its `allOf`, two at least, become one choice.

    `take` tells whether so many more schemas may be written: what conditions ask for is written for each case.
    """
    parts = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    own = {word: schema[word] for word in _CONDITIONAL if word in schema}
    found = [condition for part in (own, *parts) if (condition := _condition(part)) is not None]
    if len(found) < 2 or len({condition.name for condition in found}) > 1:
        return schema
    values = {key: value for condition in found for key, value in condition.values.items()}
    if max(len(values), len(found)) > _MOST_CASES:
        return schema
    groups: dict[tuple[bool, ...], list[Any]] = {}
    for key, value in values.items():
        groups.setdefault(tuple(key in condition.values for condition in found), []).append(value)
    if not take(sum(_copies(condition, groups, place) for place, condition in enumerate(found))):
        return schema
    plain = {word: value for word, value in schema.items() if word not in _CONDITIONAL}
    if _condition(own) is None:
        plain |= own
    if parts:
        plain["allOf"] = [part for part in parts if _condition(part) is None]
        if not plain["allOf"]:
            del plain["allOf"]
    cases = [_case({"enum": listed}, found, fits) for fits, listed in groups.items()]
    name = found[0].name
    known = member(schema, name)
    facts = {word: known[word] for word in _FACTS if word in known} if isinstance(known, dict) else {}
    cases.append(_case({**facts, "not": {"enum": list(values.values())}}, found, [False] * len(found)))
    if name not in required_names(schema):
        absent = [condition.asked(condition.absent) for condition in found]
        cases.append(_joined({"type": "object", "properties": {name: False}}, absent))
    if schema.get("type") != "object":
        others = [condition.asked(condition.others) for condition in found]
        cases.append(_joined({"type": [kind for kind in KINDS if kind != "object"]}, others))
    join(plain, [{"anyOf": [case for case in cases if case is not False]}])
    return plain


def _copies(condition: _Condition, groups: Iterable[tuple[bool, ...]], place: int) -> int:
    """How many schemas a condition's demands become: one case a group, and three others."""
    fitting = sum(group[place] for group in groups)
    rest = sum(not group[place] for group in groups)
    most = limits.MAX_GRAMMAR_PARTS
    return (fitting + 2) * weight(condition.then, most) + (rest + 3) * weight(condition.other, most)


def _case(value: dict[str, Any], found: list[_Condition], fits: Iterable[bool]) -> Any:
    """Objects whose member is one of some values, and what the conditions that it fits or not ask for."""
    asked = [condition.asked(fit) for condition, fit in zip(found, fits, strict=True)]
    name = found[0].name
    return _joined({"type": "object", "properties": {name: value}, "required": [name]}, asked)


def _joined(case: dict[str, Any], asked: list[Any]) -> Any:
    if False in asked:
        return False
    join(case, asked)
    return case


def _condition(part: Any) -> _Condition | None:
    """A schema that does nothing but ask something of objects by a member's value."""
    if not isinstance(part, dict) or "if" not in part or not part.keys() - NOTES <= _CONDITIONAL:
        return None
    fitting = part["if"]
    then = part.get("then", True)
    other = part.get("else", True)
    if not isinstance(fitting, dict) or not isinstance(then, (dict, bool)) or not isinstance(other, (dict, bool)):
        return None
    words = fitting.keys() - NOTES
    members, required = fitting.get("properties"), fitting.get("required", [])
    if not words <= {"type", "properties", "required"} or fitting.get("type", "object") != "object":
        return None
    if not isinstance(members, dict) or len(members) != 1:
        return None
    ((name, value),) = members.items()
    if required not in ([], [name]) or not isinstance(value, dict):
        return None
    listed = [value["const"]] if "const" in value else value.get("enum")
    if value.keys() - NOTES not in ({"const"}, {"enum"}) or not isinstance(listed, list):
        return None
    return _Condition(
        name, {value_key(value): value for value in listed}, not required, "type" not in fitting, then, other
    )
