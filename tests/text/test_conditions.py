"""Conditions and negations of JSON schemas, compared with what jsonschema finds over documents of many shapes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from penstock.config.errors import RequestError
from penstock.text.grammar.denied import other_texts
from penstock.text.grammar.translate import translate
from tests.text.test_grammars import BYTES

VALUES: list[Any] = [None, True, False, 0, 1, 2, 3, 1.5, -1, "", "a", "ab", "b", "abc", [], [1], {}, {"x": 1}]
MEMBERS: list[Any] = ["a", "b", "ab", 1, 2, None]


def documents() -> Iterator[Any]:
    yield from VALUES
    for kind, x, y in itertools.product([..., *MEMBERS], [..., 1, "s"], [..., 2, True]):
        yield {key: value for key, value in (("kind", kind), ("x", x), ("y", y)) if value is not ...}


def leaf(chance: random.Random) -> Any:
    return chance.choice(
        [
            *({"const": chance.choice(VALUES[:14])}, {"enum": chance.sample(VALUES[:14], 2)}, {"minimum": 1}),
            *(True, False),
            *({"maximum": 1.5}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 2}, {"minLength": 2}, {"maxLength": 1}),
            *({"type": "string"}, {"type": ["number", "null"]}, {"minItems": 1}, {"maxProperties": 0}),
            {"type": "object"},
            *({"type": "string", "minLength": 2}, {"type": "number", "minimum": 1, "maximum": 2}, {"const": "a"}),
        ]
    )  # fmt: skip


def condition(chance: random.Random, depth: int) -> Any:
    pick = chance.randrange(7 if depth else 4)
    if pick < 2:
        member = {"properties": {"kind": leaf(chance) if pick else {"const": chance.choice(MEMBERS)}}}
        return {**member, **({"required": ["kind"]} if chance.random() < 0.5 else {})}
    if pick == 2:
        return leaf(chance)
    if pick == 3:
        return {"required": chance.sample(["kind", "x", "y"], chance.choice([1, 2]))}
    if pick == 4:
        return {"not": condition(chance, depth - 1)}
    return {chance.choice(["anyOf", "allOf"]): [condition(chance, depth - 1) for _ in range(2)]}


def demand(chance: random.Random) -> Any:
    return chance.choice(
        [{"required": ["x"]}, {"properties": {"x": {"type": "integer"}}}, {"properties": {"y": False}},
         {"maxLength": 1},
         {"type": "object"}, {"required": ["x", "y"]}, True, False, {"properties": {"kind": {"type": "string"}}}]
    )  # fmt: skip


def one(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"not": condition(chance, 2)}
    made = {"if": condition(chance, 1)}
    for word in ("then", "else"):
        if chance.random() < 0.8:
            made[word] = demand(chance)
    return made


def draw(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    schema: dict[str, Any] = {"properties": {"kind": True, "x": True, "y": True}}
    if chance.random() < 0.4:
        schema["type"] = "object"
    if chance.random() < 0.3:
        schema["properties"]["kind"] = chance.choice([{"type": "string"}, {"enum": ["a", "b", "ab"]}])
    parts = [one(chance) for _ in range(chance.choice([1, 1, 2, 3]))]
    if chance.random() < 0.4:  # on one member's value
        parts = [
            {"if": {"properties": {"kind": {"const": value}}, "required": ["kind"]}, "then": demand(chance)}
            for value in chance.sample(MEMBERS[:4], 3)
        ]
    return {**schema, **parts[0]} if len(parts) == 1 else {**schema, "allOf": parts}


def accepts(matcher: LLMatcher, document: Any) -> bool:
    ids = list(json.dumps(document, separators=(",", ":")).encode())
    own = matcher.deep_copy()
    return own.try_consume_tokens(ids) == len(ids) and own.is_accepting()


def test_what_is_decided_means_what_jsonschema_says() -> None:
    decided = 0
    for seed in range(300):
        schema = draw(seed)
        valid = [jsonschema.Draft202012Validator(schema).is_valid(document) for document in documents()]
        try:
            matcher = LLMatcher(BYTES, translate("json_schema", json.dumps(schema)), log_level=0)
        except RequestError:
            continue
        if matcher.is_error():
            assert "Unsatisfiable" not in matcher.get_error() or not any(valid), (schema, matcher.get_error())
            continue
        decided += 1
        for document, right in zip(documents(), valid, strict=True):
            assert accepts(matcher, document) == right, (seed, schema, document)
    assert decided > 200


@pytest.mark.parametrize("count", [2, 12, 100])
def test_conditions_on_one_members_value_cost_as_much_as_there_are(count: int) -> None:
    branches = [
        {"if": {"properties": {"kind": {"const": f"k{i}"}}}, "then": {"required": [f"p{i}"]}} for i in range(count)
    ]
    members = {f"p{i}": {"type": "integer"} for i in range(count)}
    schema = {"type": "object", "properties": {"kind": {"type": "string"}, **members}, "required": ["kind"]}
    source = translate("json_schema", json.dumps({**schema, "allOf": branches}))
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    assert accepts(matcher, {"kind": "k1", "p0": 1, "p1": 1})
    assert not accepts(matcher, {"kind": "k1", "p0": 1})
    assert accepts(matcher, {"kind": "k", "p0": 1})
    assert accepts(matcher, {"kind": "other"})


@pytest.mark.parametrize("text", ["\n", 'a"', "\\", "x" * 65])
def test_texts_that_json_escapes_and_long_ones_are_not_denied(text: str) -> None:
    assert other_texts(["a", text]) is None


@pytest.mark.parametrize("texts", [[""], ["a"], ["ab", "a", "b"], ["", "a.b", "a|"], ["[]^-", "x"], ["é🎈"]])
def test_all_texts_but_some(texts: list[str]) -> None:
    pattern = other_texts(texts)
    assert pattern is not None
    source = translate("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    matcher = LLMatcher(BYTES, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    near = {text + tail for text in texts for tail in ("", "a", "\n", "🎈")} | {text[:-1] for text in texts}
    for text in sorted(near):
        document = json.dumps(text, ensure_ascii=False)
        ids = list(document.encode())
        own = matcher.deep_copy()
        assert (own.try_consume_tokens(ids) == len(ids) and own.is_accepting()) == (text not in texts), text


CHILD = {"type": "object", "required": ["x"]}
KINDS_OF = [
    {"if": {"properties": {"kind": {"const": value}}, "required": ["kind"]}, "then": {"required": [name]}}
    for value, name in (("a", "x"), ("b", "y"))
]


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (
            {"$defs": {"p": {"$anchor": "p", "type": "string"}}, "properties": {"k": {"not": {"$ref": "#p"}}}},
            {"k": "x"},
        ),
        (
            {"$defs": {"x": {"type": "string"}}, "properties": {"a": {
                "$id": "http://e.x/sub", "$defs": {"x": {"type": "number"}}, "not": {"$ref": "#/$defs/x"}}}},
            {"a": 1},
        ),
        ({"properties": {"child": {"$ref": "#/allOf/0"}}, "allOf": [*KINDS_OF, CHILD]}, {"child": {"kind": "a"}}),
        ({"not": {"not": {"maximum": 0.999999}}}, 1),
        ({"not": {"exclusiveMinimum": 4.999999}}, 5),
        ({"not": {"exclusiveMaximum": 5.000001}}, 5),
        (
            {"$defs": {"a": {"not": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}}},
             "not": {"$ref": "#/$defs/a"}},
            1,
        ),
    ],
)  # fmt: skip
def test_what_is_referred_to_or_near_a_bound_is_not_let_through(schema: dict[str, Any], document: Any) -> None:
    assert not jsonschema.Draft202012Validator(schema).is_valid(document)
    matcher = LLMatcher(BYTES, translate("json_schema", json.dumps(schema)), log_level=0)
    assert matcher.is_error() or not accepts(matcher, document)


@pytest.mark.parametrize(
    "schema",
    [
        *({"not": {word: 10**400}} for word in ("minimum", "const", "maxLength")),
        *({"allOf": wrong, "not": {"type": "string"}} for wrong in (5, None, {"a": 1}, "ab")),
        {"allOf": 1, "pattern": "a", "format": "idn-email"},
    ],
)
def test_what_cannot_be_rewritten_is_left(schema: dict[str, Any]) -> None:
    assert json.loads(translate("json_schema", json.dumps(schema)))


def nested(depth: int) -> Any:
    schema: dict[str, Any] = {"items": {"type": "string", "description": "x" * 5000}}
    for _ in range(depth):
        schema = {"if": {"not": schema}, "then": {"type": "string"}}
    return schema


def chained(depth: int) -> Any:
    schema: dict[str, Any] = {"minLength": 1}
    for _ in range(depth):
        first = {"if": {"properties": {"k": {"const": "a"}}}, "then": {"type": "object"}, "else": schema}
        schema = {"allOf": [first, {"if": {"properties": {"k": {"const": "b"}}}, "then": {"type": "object"}}]}
    return schema


def referring(denied: Any, count: int) -> Any:
    return {"$defs": {"r": denied}, "allOf": [{"enum": [1], "not": {"$ref": "#/$defs/r"}}] * count}


@pytest.mark.parametrize(
    "schema",
    [
        *(nested(20), chained(18), referring({"required": ["x" * 5000]}, 2000)),
        *(referring({"enum": list(range(1000))}, 4000), referring({"anyOf": [{"enum": list(range(9000))}]}, 2000)),
        referring({"properties": {f"p{i}": {"const": i} for i in range(100)}}, 400),
    ],
)
def test_what_is_written_more_than_once_is_bounded(schema: Any) -> None:
    source = json.dumps(schema)
    try:
        written = translate("json_schema", source)
    except RequestError:
        written = ""
    assert len(written) < 2 * len(source) + 2_000_000
