"""Keywords that the matchers do not have, in terms of others where what they mean can be decided.

What is rewritten means exactly the same, but that numbers within a millionth of a denied one are denied too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from penstock.text.grammar.compared import Comparer, is_number
from penstock.text.grammar.denied import Denier
from penstock.text.json_tree import objects

_MOVED: Final = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentSchemas", "dependentRequired")
)
_MOST_DEPENDENT: Final = 6  # each doubles what is compiled


@dataclass(slots=True)
class Decider:
    """Rewrites one schema at a time, which its caller may change.

    Args:
        root: where references point into; it stays as it is.

    Attributes:
        movable: whether schemas may be put elsewhere: no reference goes by a place that is rewritten, and none is told
            from where it stands by an `$id`.
    """

    root: Any
    movable: bool = field(init=False)
    _compared: Comparer = field(init=False)
    _denier: Denier = field(init=False)

    def __post_init__(self) -> None:
        self.movable = not any(map(_fixes_places, objects(_unnamed(self.root))))
        self._compared = Comparer(self.root)
        self._denier = Denier(self._compared)

    def take(self, parts: int) -> bool:
        """Whether so many more schemas may be written, which then are."""
        return self._denier.take(parts)

    def rewrite(self, schema: dict[str, Any]) -> None:
        """Changes what can be decided, and leaves the rest."""
        if not _unique_anyway(schema):
            schema.pop("uniqueItems")
        options = schema["oneOf"] if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema else []
        if options and self._compared.exclusive(options, self._compared.kinds(schema)):
            schema["anyOf"] = schema.pop("oneOf")
        self._dependent(schema)
        self._conditional(schema)
        if "not" in schema and (denied := self._denier.denied(schema["not"], _without(schema, "not"))) is not None:
            del schema["not"]
            join(schema, [denied])

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
        for name, asked in given.items():
            if asked != []:  # the member comes before those that it needs
                demand = {"properties": {name: True}, "required": asked} if isinstance(asked, list) else asked
                join(schema, [{"anyOf": [{"properties": {name: False}}, demand]}])

    def _conditional(self, schema: dict[str, Any]) -> None:
        """`if`: what fits it and `then`, or does not fit it and fits `else`."""
        if "if" not in schema:
            return
        fitting = schema["if"]
        then = schema.get("then", True)
        other = schema.get("else", True)
        if not all(isinstance(part, (dict, bool)) for part in (fitting, then, other)):
            return
        if then is True:
            options = [fitting, other]
        elif (denied := self._denier.denied(fitting, _without(schema, "if", "then", "else"))) is not None:
            options = [_both(fitting, then), _both(denied, other)]
        else:
            return
        for word in ("if", "then", "else"):
            schema.pop(word, None)
        if True not in options:
            left = [option for option in options if option is not False]
            join(schema, [{"anyOf": left} if len(left) > 1 else left[0] if left else False])


def _unnamed(root: Any) -> Any:
    """A schema without its own `$id`, which says nothing of where the others stand."""
    return _without(root, "$id", "id") if isinstance(root, dict) else root


def _fixes_places(schema: dict[str, Any]) -> bool:
    pointer = schema.get("$ref")
    by_place = isinstance(pointer, str) and not _MOVED.isdisjoint(pointer.split("/"))
    return by_place or isinstance(schema.get("$id"), str) or str(schema.get("id", "")).startswith(("http", "#", "/"))


def join(schema: dict[str, Any], parts: list[Any]) -> None:
    """Has a schema ask for these parts besides."""
    parts = [part for part in parts if part is not True]
    if parts:
        schema["allOf"] = [*schema.get("allOf", ()), *parts]


def _both(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    asked = [part for part in (a, b) if part not in (True, {})]
    return {"allOf": asked} if len(asked) > 1 else asked[0] if asked else True


def _without(schema: dict[str, Any], *words: str) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if word not in words}


def _unique_anyway(schema: dict[str, Any]) -> bool:
    """Whether `uniqueItems` has to stay, if it is there."""
    if "uniqueItems" not in schema:
        return True
    most = schema.get("maxItems")
    return schema["uniqueItems"] is not False and not (is_number(most) and most <= 1)
