"""JSON schemas drawn at random, growing with a number."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_PATTERNS = ("^[A-Z]{2}-[0-9]{3}$", "^(red|green|blue)+$", "^[a-z]+@[a-z]+$", "^[0-9a-f]{8}$", "^\\S.{0,10}$")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "email", "hostname", "ipv6", "uri", "duration")
_WORDS = ("name", "Grüße", "quantity of things", 'naïve "quoted" text', "a\nb", "", "x" * 40, "日本語", "🎈")
Maker = Callable[[int], dict[str, Any]]


def draw_schema(number: int) -> dict[str, Any]:
    """Schema number `number`: the larger the number, the deeper and wider."""
    chance = random.Random(number)
    depth = 1 + min(4, number.bit_length() // 2)
    maker = _Maker(chance, 2 + min(8, number // 250))
    schema = maker.any(depth)
    if maker.shared:
        schema["$defs"] = maker.shared
    return schema


class _Maker:
    def __init__(self, chance: random.Random, width: int) -> None:
        self._chance = chance
        self._width = width
        self.shared: dict[str, Any] = {}

    def any(self, depth: int) -> dict[str, Any]:
        makers: list[Maker] = [self._string, self._number, self._integer, self._boolean, self._enum, self._const]
        if depth > 0:
            makers += [self._object] * 6 + [self._array] * 3 + [self._choice, self._joined, self._reference]
        make = self._chance.choice(makers)
        return make(depth - 1)

    def _string(self, _: int) -> dict[str, Any]:
        kind = self._chance.randrange(5)
        if kind == 0:
            return {"type": "string", "pattern": self._chance.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._chance.choice(_FORMATS)}
        if kind == 2:
            fewest = self._chance.randrange(5)
            return {"type": "string", "minLength": fewest, "maxLength": fewest + self._chance.randrange(20)}
        return {"type": ["string", "null"] if kind == 3 else "string"}

    def _number(self, _: int) -> dict[str, Any]:
        low = self._chance.choice([-1000.5, -1, 0, 0.25, 17])
        bounds = {"minimum": low, "exclusiveMaximum": low + self._chance.choice([0.5, 3, 10_000])}
        return {"type": "number", **(bounds if self._chance.random() < 0.6 else {})}

    def _integer(self, _: int) -> dict[str, Any]:
        low = self._chance.randrange(-50, 50)
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + self._chance.randrange(12, 5000)}
        if self._chance.random() < 0.2:
            schema["multipleOf"] = self._chance.choice([2, 3, 7])
        return schema

    def _boolean(self, _: int) -> dict[str, Any]:
        return {"type": self._chance.choice(["boolean", "null"])}

    def _enum(self, _: int) -> dict[str, Any]:
        values = [*_WORDS, 1, -2.5, None, True, [1, "two"], {"three": 3}]
        return {"enum": self._chance.sample(values, self._chance.randrange(1, 6))}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._chance.choice([*_WORDS, 42, False, {"a": [1, {"b": None}]}])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = [f"{self._chance.choice(('id', 'a long name', 'ключ', 'x'))}_{i}" for i in range(self._width)]
        names = self._chance.sample(names, self._chance.randrange(self._width + 1))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        schema["required"] = [name for name in names if self._chance.random() < 0.5]
        rest = self._chance.randrange(4)
        if rest < 2:
            schema["additionalProperties"] = False
        elif rest == 2:
            schema["additionalProperties"] = self.any(0)
        if self._chance.random() < 0.1:
            schema["patternProperties"] = {"^p[0-9]+$": self.any(0)}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.any(depth)}
        if self._chance.random() < 0.5:
            schema["minItems"] = self._chance.randrange(3)
            schema["maxItems"] = schema["minItems"] + self._chance.randrange(4)
        if self._chance.random() < 0.2:
            schema["prefixItems"] = [self.any(0)]
        return schema

    def _choice(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.any(depth) for _ in range(self._chance.randrange(1, 4))]}

    def _joined(self, depth: int) -> dict[str, Any]:
        parts = [self._object(depth) for _ in range(2)]
        for number, part in enumerate(parts):
            part.pop("additionalProperties", None)
            part.pop("patternProperties", None)
            part["properties"] = {f"{number}{name}": value for name, value in part["properties"].items()}
            part["required"] = [f"{number}{name}" for name in part["required"]]
        return {"allOf": parts}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"shared{self._chance.randrange(3)}"
        if name not in self.shared:
            self.shared[name] = {}  # it may refer to itself, under a property that may be left out
            inner = self.any(min(depth, 1))
            self.shared[name] = {"type": "object", "properties": {"value": inner, "next": {"$ref": f"#/$defs/{name}"}}}
        return {"$ref": f"#/$defs/{name}"}
