"""Requests as strangers would send them: every route and field of the OpenAPI document, with odd values of any size."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from penstock.config import limits

_LARGE_SHARE, _MIDDLE_SHARE = 0.002, 0.03  # of all bodies: up to the limit, up to 200 kB
_NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 2, 3, 20, 21, 64, 128, 129, 2**31 - 1, 2**31, 2**63, 2**64, -(2**63), -(2**63) - 1, 10**300, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 2.5, -2.5, 1e-320, 1e-9, 1e308, 5e-324, 0.1 + 0.2),
)
_TEXTS: Sequence[str] = (
    *("", " ", "a", "\0", "\n", "\u2028", "\ufeff", "😀", "e\u0301", "\ud83d", "null", "true", "none", "auto", "any"),
    *("json", "json_object", "json_schema", "text", "user", "assistant", "system", "tool", "function", "developer"),
    *("base64", "float", "required", "resp_x", "scripted", "../../etc/passwd", "http://127.0.0.1/", "-1", "1e999"),
    *("(a|b)*a(a|b){40}", "(((((((((a+)+)+)+)+)+)+)+)+)b", "[a-z]{1,1000}", "\\p{L}+", "^$", "(?=a)", "a{999999999}"),
    *('root ::= "a" root | "b"', "root ::= root", 'root ::= ("a"?){100}', 'start: "a"', "start: /a*/", 'start: "\\'),
    *("start: start", "{{ 1 }}", "{% for i in range(10**9) %}x{% endfor %}", "<think>", "<|im_end|>", "<tool_call>{"),
    *("\\", '"', "%s%n", "'; --", "5m"),
)  # fmt: skip
_SCHEMAS: Sequence[Any] = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"allOf": [{"type": "integer"}, {"type": "string"}]},
    {"type": "string", "pattern": "(a|b)*a(a|b){30}"},
    {"type": "string", "format": "date-time", "maxLength": 3},
    {"enum": []},
    {"type": "array", "items": {"type": "array", "minItems": 10**9}},
    {"type": "number", "multipleOf": 1e-300},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    True,
    False,
)
_SHAPES: Sequence[Any] = (
    *({"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    *({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {"type": "function"}),
    *({"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": None}),
    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "file:"}}]},
    *({"role": "tool"}, {"type": "enabled", "budget_tokens": 1}, {"include_usage": True}, {"effort": "low"}),
    *({"regex": "a+"}, {"json": {}}),
)  # fmt: skip
_BASES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
    "/api/generate": {"prompt": "Hello", "options": {"num_predict": 2}},
    "/api/chat": {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 2}},
    "chat": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2},
}
# A stream that nobody can read to its end; and behind the others everybody is refused, as it should be, with a 503.
_LEFT_OUT: Sequence[str] = ("/models/sse", "/sleep", "/release_memory_occupation")
HOLDING = frozenset({"/pause", "/pause_generation"})
"""Routes behind which every other request waits, as it should, until somebody lets the engines go on."""
_USUAL: Mapping[str, Any] = {
    **dict.fromkeys(
        ("input", "prompt", "query", "text_1", "text_2", "text", "content", "inputs", "text_input"), "Hello"
    ),
    **{key: ["Hello"] for key in ("texts", "documents", "items")},
    **{key: [1, 2] for key in ("tokens", "token_ids", "label_token_ids")},
    **dict.fromkeys(("max_tokens", "max_new_tokens", "n_predict", "max_length", "num_predict"), 2),
    "sampling_params": {"max_new_tokens": 2},
    "parameters": {"max_new_tokens": 2},
    "input_prefix": "Hel",
    "input_suffix": "lo",
}
"""Values with which bodies of other routes are usually taken, where they have such fields."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    method: str
    target: str
    body: bytes
    content_type: str = "application/json"


class Stranger:
    """Makes requests, the same ones whenever it is asked for the same number.

    Args:
        document: the server's OpenAPI document.
        model: the name it serves.
        seed: of all randomness.
        most_bytes: of a body.
    """

    def __init__(
        self, document: Mapping[str, Any], model: str, seed: int = 0, most_bytes: int = limits.MAX_BODY_BYTES
    ) -> None:
        self._model, self._seed, self._most = model, seed, most_bytes
        schemas = document.get("components", {}).get("schemas", {})
        self._operations: list[tuple[str, str, Sequence[str]]] = []
        for path, item in document["paths"].items():
            if path in _LEFT_OUT:
                continue
            for method, operation in item.items():
                bodies = _bodies(operation, schemas)
                for fields in bodies:
                    self._operations += [(method.upper(), path, fields)] * (8 if fields else 1)

    def request(self, number: int) -> Asked:
        rng = random.Random(f"{self._seed}/{number}")
        method, path, fields = rng.choice(self._operations)
        target = self._target(rng, path)
        if method not in ("POST", "DELETE") or (not fields and rng.random() < 0.5):
            return Asked(method, f"{target}{self._query(rng)}", b"")
        most = self._most if rng.random() < _LARGE_SHARE else 200_000 if rng.random() < _MIDDLE_SHARE else 300
        raw = self._body(rng, path, fields, min(most, self._most))
        kind = (
            "application/json" if rng.random() < 0.97 else rng.choice(["", "text/plain", "application/json; charset=x"])
        )
        return Asked(method, target, raw[: self._most + 1], kind)

    def _target(self, rng: random.Random, path: str) -> str:
        while "{" in path:
            before, _, rest = path.partition("{")
            name = rng.choice(
                [self._model, "resp_x", "", "a/b", "%00", "x" * rng.randrange(1, 200), str(rng.choice(_TEXTS))]
            )
            path = before + quote(name, safe="/%", errors="replace") + rest.partition("}")[2]
        return path

    def _query(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return ""
        names = ["stream", "starting_after", "include", "include[]", "limit", "order", "after", "x"]
        fields = [
            f"{rng.choice(names)}={quote(str(rng.choice((*_TEXTS, *_NUMBERS))), errors='replace')}"
            for _ in range(rng.choice([1, 2, 9]))
        ]
        return "?" + "&".join(fields)

    def _body(self, rng: random.Random, path: str, fields: Sequence[str], most: int) -> bytes:
        kind = rng.random()
        if kind < 0.04:
            return _noise(rng, most)
        base = _BASES.get(path) or (_BASES["chat"] if "messages" in fields else {})
        body: dict[str, Any] = dict(base)
        if "model" in fields:
            body["model"] = self._model
        if not base and rng.random() < 0.9:
            body |= {name: value for name, value in _USUAL.items() if name in fields}
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 5])):
            name = rng.choice(fields) if fields and rng.random() < 0.97 else str(rng.choice(_TEXTS))
            body[name] = self._value(rng, most)
        raw = json.dumps(body, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
        if kind < 0.10:
            raw = _damaged(rng, raw)
        return raw

    def _value(self, rng: random.Random, most: int) -> Any:
        kind = rng.random()
        if most > 300 and kind < 0.75:
            return _large(rng, most)
        if kind < 0.15:
            return rng.choice([None, True, False, [], {}, [[]], [None], [{}], {"": None}, [[[]]]])
        if kind < 0.35:
            return rng.choice(_NUMBERS)
        if kind < 0.55:
            return rng.choice(_TEXTS)
        if kind < 0.65:
            return rng.choice(_SCHEMAS)
        if kind < 0.80:
            shape = rng.choice(_SHAPES)
            return [shape] * rng.choice([1, 1, 2, 5]) if rng.random() < 0.6 else shape
        if kind < 0.90:
            return [self._value(rng, most) for _ in range(rng.choice([1, 2, 3]))]
        return {
            rng.choice((*_TEXTS, "type", "name", "content", "role")): self._value(rng, most)
            for _ in range(rng.choice([1, 2, 3]))
        }


def _bodies(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[Sequence[str]]:
    """The fields of each body that an operation takes."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is None:
        return [()]
    told = content["schema"]
    found = [told, *told.get("anyOf", ()), *told.get("oneOf", ())]
    found = [schemas[each["$ref"].rsplit("/", 1)[1]] if "$ref" in each else each for each in found]
    return [tuple(each["properties"]) for each in found if each.get("properties")] or [()]


def _size(rng: random.Random, most: int) -> int:
    """Between 1 and `most`, no order of magnitude likelier than another."""
    return int(math.exp(rng.uniform(0.0, math.log(most))))


def _large(rng: random.Random, most: int) -> Any:
    size = _size(rng, most)
    text = rng.choice(
        ["a", " ", "word ", "!?", "é", "😀", "\\", '"', "\n", "{", "[", ",", '"\\', "(", "A", "start: ", "::=", "<"]
    )
    kind = rng.randrange(12)
    if kind < 4:
        return text * (size // len(text.encode()) + 1)
    if kind == 4:
        return [rng.choice([1, 0, -1, 123456, 1.5, None, True])] * (size // 4 + 1)
    if kind == 5:
        return [rng.choice(["a", "", {}, [], [1], {"type": "text", "text": "x"}])] * (size // 8 + 1)
    if kind == 6:
        return {f"k{number}": rng.choice([1, "x", None, {}]) for number in range(size // 12 + 1)}
    if kind == 7:
        return [
            {
                "role": rng.choice(["user", "assistant", "system"]),
                "content": rng.choice(["", "x", [{"type": "text", "text": "x"}]]),
            }
        ] * (size // 40 + 1)
    if kind == 8:
        properties = {f"p{number}": {"type": "string"} for number in range(size // 25 + 1)}
        return {"type": "object", "properties": properties, "required": list(properties)[: rng.choice([0, 10, 10**6])]}
    if kind == 9:
        return [
            {
                "type": "function",
                "function": {"name": "f", "description": text * (size // len(text)), "parameters": {"type": "object"}},
            }
        ]
    if kind == 10:
        deep: Any = 1
        for _ in range(min(size, 400)):
            deep = rng.choice([[deep], {"a": deep}, {"type": "array", "items": deep}])
        return deep
    return {"enum": [f"v{number}" for number in range(size // 8 + 1)]}


def _noise(rng: random.Random, most: int) -> bytes:
    piece = rng.choice([b"[", b"{", b'{"a":', b"\xff", b'"', b"\\", b" ", b"1,", b"[],", b"\0", b'{"a":1},', b"nul"])
    return rng.choice([b"", b"{", b"["]) + piece * (_size(rng, most) // len(piece) + 1)


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.3:
        return raw[: rng.randrange(len(raw) + 1)]
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] = rng.choice(b'{}[],:"\\0 9-eN\xff\x00')
    return bytes(data)
