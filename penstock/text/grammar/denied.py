"""The schema of what does not fit a schema, where it can be written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from penstock.config import limits
from penstock.text.grammar.compared import BOUNDS, DEEPEST, KINDS, Comparer, is_number, kind_of, member, value_key

NOTES: Final = frozenset(
    ("title", "description", "$comment", "default", "examples", "$schema", "$id", "$anchor", "$defs", "definitions")
)
"""Keywords that no document is held to."""
_MOST_WRITTEN: Final = 2 * limits.MAX_GRAMMAR_CHARS
_MOST_PARTS: Final = limits.MAX_GRAMMAR_PARTS
_ITEMS_A_PART: Final = 16
_CHARACTERS_A_PART: Final = 16
_MOST_LISTED: Final = 256  # values that are denied one by one
_LONGEST: Final = 64  # characters of each of them that is a text
_NEXT_TO_NOTHING: Final = 1e-6  # what plain schemas move exclusive bounds inwards by
_RANGES: Final = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
_ESCAPED: Final = re.compile(r'["\\\x00-\x1f\x7f]')
_EVERYTHING: Final = "(?s:.)"
Denied = dict[str, Any] | bool


@dataclass(slots=True)
class Denier:
    """Writes what does not fit, as long as there is room.

    Attributes:
        room: characters of values that may still be written once more.
        parts: schemas that may still be written, copies of the client's included.
    """

    _compared: Comparer
    room: int = _MOST_WRITTEN
    parts: int = _MOST_PARTS

    def take(self, parts: int) -> bool:
        """Whether so many more schemas may be written, which then are. Once they may not, no others may."""
        self.parts = max(0, self.parts - parts)
        return self.parts > 0

    def denied(self, schema: Any, beside: Any = True, depth: int = 0, *, raw: bool = False) -> Denied | None:
        """What does not fit `schema`, where `beside` is asked for anyway; None if that cannot be written.

        `raw`: `schema` is as the client wrote it.
        """
        self._compared.left -= 1
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or self._compared.left < 0 or depth > DEEPEST or not self.take(4 * len(schema)):
            return None
        if isinstance(schema.get("$ref"), str):
            target = self._compared.target(schema["$ref"])
            alone = schema.keys() - NOTES == {"$ref"}
            return self.denied(target, beside, depth + 1, raw=True) if alone else None
        kinds = self._compared.kinds(beside)
        options: list[Denied] = []
        for word in schema:
            if word in NOTES:
                continue
            option = self._denied_by(word, schema, beside, depth, raw)
            if option is None:
                return None
            if option is True or (isinstance(option, dict) and _possible(option, kinds)):
                options.append(option)
        return _any_of(options)

    def _denied_by(self, word: str, schema: dict[str, Any], beside: Any, depth: int, raw: bool) -> Denied | None:
        value = schema[word]
        if isinstance(value, (dict, list)) and not self.take(1 + len(value) // _ITEMS_A_PART):
            return None
        if word == "not" and isinstance(value, (dict, bool)):
            return value if not raw and self.take(weight(value, self.parts)) else None
        if word in ("anyOf", "allOf") and isinstance(value, list) and value:
            return self._none_of(word, value, beside, depth, raw)
        if word == "required" and isinstance(value, list) and value and all(isinstance(name, str) for name in value):
            if not self.take(weight(value, self.parts)):
                return None
            return _any_of([{"type": "object", "properties": {name: False}} for name in value])
        if word == "type":
            return _other_types(value, beside)
        if word == "const" or (word == "enum" and isinstance(value, list)):
            return self._unlisted([value] if word == "const" else value, beside)
        if word == "properties" and isinstance(value, dict):
            return self._denied_members(value, beside, depth, raw)
        return _out_of_bounds(word, value)

    def _denied_members(self, members: dict[str, Any], beside: Any, depth: int, raw: bool) -> Denied | None:
        options: list[Denied] = []
        for name, schema in members.items():
            around = member(beside, name) if isinstance(beside, dict) else True
            found = self.denied(schema, around, depth + 1, raw=raw)
            if found is None:
                return None
            if found is not False:
                options.append({"type": "object", "properties": {name: found}, "required": [name]})
        return _any_of(options)

    def _none_of(self, word: str, parts: list[Any], beside: Any, depth: int, raw: bool) -> Denied | None:
        """What fits none, or not all, of some schemas. Those that only list values are taken together."""
        own = self._compared.values(beside)
        lists: list[Set[str]] = []
        denied: list[Denied] = []
        for part in parts:
            if own is not None and (values := self._listing(part)) is not None:
                lists.append(values.keys())
                self.room -= 8 * len(values)
                if self.room < 0:
                    return None
                continue
            found = self.denied(part, beside, depth + 1, raw=raw)
            if found is None:
                return None
            denied.append(found)
        if own is not None and lists:
            whole = set().union(*lists) if word == "anyOf" else set(lists[0]).intersection(*lists[1:])
            rest = self._without(own, whole)
            if rest is None:
                return None
            denied.append(rest)
        return denied[0] if len(denied) == 1 else {"allOf" if word == "anyOf" else "anyOf": denied}

    def _listing(self, schema: Any) -> dict[str, Any] | None:
        """The values of a schema that does nothing but list them."""
        alone = isinstance(schema, dict) and schema.keys() - NOTES in ({"const"}, {"enum"})
        return self._compared.values(schema) if alone else None

    def _without(self, own: dict[str, Any], denied: Set[str]) -> Denied | None:
        """A list of some values without others, None where no more may be written."""
        if self.room < 0:
            return None
        self.room -= sum(map(len, own))
        left = [value for key, value in own.items() if key not in denied]
        return {"enum": left} if left else False

    def _unlisted(self, values: list[Any], beside: Any) -> Denied | None:
        """All values but some: by type, as far as those beside it may have it."""
        if (own := self._compared.values(beside)) is not None:
            self.room -= 8 * len(values)
            return self._without(own, {value_key(value) for value in values}) if self.room >= 0 else None
        if len(values) > _MOST_LISTED or self.room < 0:
            return None
        kinds = self._compared.kinds(beside)
        found = {kind: [value for value in values if kind_of(value) == kind] for kind in kinds}
        options: list[Denied] = []
        if untouched := [kind for kind in KINDS if kind in kinds and not found[kind]]:
            options.append({"type": untouched} if len(untouched) < len(KINDS) else True)
        for kind, listed in found.items():
            option = _others(kind, listed) if listed else False
            if option is None:
                return None
            self.room -= len(str(option))
            options += [option] if option is not False else []
        return _any_of(options)


def _any_of(options: list[Denied]) -> Denied:
    if True in options:
        return True
    if len(options) < 2:
        return options[0] if options else False
    return {"anyOf": options}


def _possible(option: dict[str, Any], kinds: Collection[str]) -> bool:
    """Whether an option's own type, if it is one, is among those there are."""
    kind = option.get("type")
    return not isinstance(kind, str) or kind in kinds


def _other_types(value: Any, beside: Any) -> Denied | None:
    kinds = [value] if isinstance(value, str) else value
    if not isinstance(kinds, list):
        return None
    whole = isinstance(beside, dict) and beside.get("type") == "integer"
    if "integer" in kinds and "number" not in kinds and not whole:
        return None
    left = [kind for kind in KINDS if kind not in kinds and not (kind == "number" and "integer" in kinds)]
    return {"type": left} if left else False


def _out_of_bounds(word: str, value: Any) -> Denied | None:
    if not _is_common(value):
        return None
    if word in _RANGES:
        return {"type": "number", **_beyond(word, value)}
    for kind, (low, high) in BOUNDS.items():
        if word in (low, high) and value == value // 1:
            bound = int(value) + (1 if word == high else -1)
            if kind == "object" and bound > 1:
                return None
            return {"type": kind, low if word == high else high: bound} if bound >= 0 else False
    return None


def _beyond(word: str, value: float) -> dict[str, float]:
    if word == "minimum":
        return {"exclusiveMaximum": _moved(value, -1)}
    if word == "maximum":
        return {"exclusiveMinimum": _moved(value, 1)}
    near = round(value)
    side = 1 if word == "exclusiveMinimum" else -1
    moved = word in ("exclusiveMinimum", "exclusiveMaximum") and _moved(near, side) == value
    return {"maximum" if side > 0 else "minimum": near if moved else value}


def _is_common(value: Any) -> TypeGuard[int | float]:
    """Whether this is a number that arithmetic takes, and that others can be told from."""
    return is_number(value) and abs(value) < 2**53


def weight(value: Any, most: int) -> int:
    """How many schemas a value is as large as, counted up to `most`."""
    count = 0
    stack = [value]
    while stack and count <= most:
        found = stack.pop()
        count += 1
        if isinstance(found, str):
            count += len(found) // _CHARACTERS_A_PART
        elif isinstance(found, dict):
            stack += found.keys()
            stack += found.values()
        elif isinstance(found, list):
            stack += found
    return count


def _moved(value: float, side: int) -> float:
    """An exclusive bound as plain schemas have it."""
    return value + side * _NEXT_TO_NOTHING if abs(value) < 1e6 and value == value // 1 else value


def _others(kind: str, values: list[Any]) -> Denied | None:
    """All values of a type but some of it."""
    if kind == "null":
        return False
    if kind == "boolean":
        left = [value for value in (False, True) if value not in values]
        return {"enum": left} if left else False
    if kind == "number":
        ends = sorted(values)
        if not all(map(_is_common, ends)):
            return None
        lows: list[dict[str, float]] = [{}, *({"exclusiveMinimum": _moved(end, 1)} for end in ends)]
        highs: list[dict[str, float]] = [*({"exclusiveMaximum": _moved(end, -1)} for end in ends), {}]
        return _any_of([{"type": "number", **low, **high} for low, high in zip(lows, highs, strict=True)])
    if kind == "string":
        pattern = other_texts(values)
        return None if pattern is None else {"type": "string", "pattern": pattern}
    word = "minItems" if kind == "array" else "minProperties"
    return {"type": kind, word: 1} if not any(values) else None


def other_texts(texts: Iterable[str]) -> str | None:
    """A regular expression of all texts but some; None if it were too long, or JSON writes some with an escape.

    The matchers take what JSON escapes for a member of every class of others.
    """
    root: dict[str, Any] = {}
    for text in texts:
        if len(text) > _LONGEST or _ESCAPED.search(text):
            return None
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    pattern = f"^{_rest(root)}$"
    return pattern if len(pattern) <= limits.MAX_REGEX_CHARS else None


def _rest(node: dict[str, Any]) -> str:
    """What may follow where the texts have come to a node of their tree: at most `_LONGEST` levels."""
    letters = [character for character in node if character]
    others = "".join(f"\\x{{{ord(character):x}}}" for character in letters)
    options = [] if "" in node else [""]
    options.append(f"[^{others}]{_EVERYTHING}*" if letters else f"{_EVERYTHING}{'+' if '' in node else '*'}")
    options += (re.escape(character) + _rest(node[character]) for character in letters)
    return f"(?:{'|'.join(options)})"
