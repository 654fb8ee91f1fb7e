"""Grammars of calls: what every format writes is in them, what comes out of them is read back and fits its schema."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.structured.grammar_compiler import Vocabulary, _Tokens, parser_limits
from penstock.text.parsers.format import formats
from penstock.text.parsers.grammar import Function, calls_grammar
from penstock.text.parsers.render import WrittenCall, render
from penstock.text.tokenizer import Tokenizer
from tests.text.answers import read, whole

CALLING = [name for name, entry in formats().items() if entry.calls]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "ok": {"type": "boolean"},
        },
        "required": ["city", "ok"],
    },
    "book": {"type": "object", "properties": {"seats": {"type": "integer"}}},
}
FUNCTIONS = [Function(name, schema) for name, schema in SCHEMAS.items()]
CALLS = [
    WrittenCall("get_weather", {"city": "Rome", "days": 3, "unit": "C", "tags": ["a", "b"], "ok": True}),
    WrittenCall("book", {}),
    WrittenCall("get_weather", {"ok": False, "city": 'A "q" {'}),
]
WALKS, STEPS = 2, 250


class Grammars:
    """Matchers over the bundled model's vocabulary."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = tokenizer = Tokenizer.from_folder(folder)
        self.special = {tokenizer.piece(token) or "": token for token in tokenizer.special_ids}
        self.eos = self.special["<|im_end|>"]
        vocabulary = Vocabulary(
            tokenizer.vocab_size,
            tokenizer.token_bytes,
            lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
            frozenset(tokenizer.special_ids),
            (self.eos,),
        )
        self.backend = LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))

    def matcher(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self.backend, source, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, source: str, text: str) -> bool:
        matcher, ids = self.matcher(source), self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def walk(self, source: str, chances: random.Random) -> str | None:
        """A random text of the grammar, None if it does not end soon."""
        matcher, ids = self.matcher(source), list[int]()
        for step in range(STEPS):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
            assert allowed, self.tokenizer.decode(ids, skip_special_tokens=False)
            if self.eos in allowed:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            closing = [token for token in allowed if set(b'"<') & set(self.tokenizer.token_bytes(token))]
            ids.append(chances.choice(closing if closing and step > 40 else allowed))
            assert matcher.consume_token(ids[-1])
        return None


@pytest.fixture(scope="module")
def grammars(shared_data: Path) -> Grammars:
    return Grammars(shared_data / "models" / "penstock-concierge")


def written(name: str, calls: list[WrittenCall]) -> str:
    format = whole(name)
    answer = render(format, calls=calls)
    return answer.removesuffix(format.channels.ends[1]) if format.channels else answer


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("must", [True, False])
@pytest.mark.parametrize("parallel", [True, False])
def test_what_a_format_writes_is_in_its_grammar(grammars: Grammars, name: str, must: bool, parallel: bool) -> None:
    format = whole(name)
    source = calls_grammar(format, FUNCTIONS, grammars.special, must=must, parallel=parallel)
    many = format.channels is None and parallel
    for count in range(1, 4 if many else 2):
        assert grammars.takes(source, written(name, CALLS[:count]))
    if must:
        assert not grammars.takes(source, "Hello.")
        assert not grammars.takes(source, written(name, CALLS[:2])) or many
        assert not grammars.takes(source, "")
    elif format.channels is None:
        assert grammars.takes(source, "Hello { there.")
        assert grammars.takes(source, "")
    for wrong in (
        WrittenCall("nothing", {}),
        WrittenCall("book", {"chairs": 1}),
        WrittenCall("get_weather", {"city": "Rome"}),
    ):
        assert not grammars.takes(source, written(name, [wrong]))


@pytest.mark.parametrize("name", CALLING)
def test_what_is_in_a_grammar_is_read_and_fits(grammars: Grammars, name: str) -> None:
    source = calls_grammar(whole(name), FUNCTIONS, grammars.special, must=True, parallel=False)
    chances = random.Random(name)
    for _ in range(WALKS):
        answer = grammars.walk(source, chances)
        if answer is None:
            continue
        found = read(whole(name), [answer], SCHEMAS, opened=None)
        assert len(found.calls) == 1, answer
        for function, arguments in zip(found.names, found.arguments, strict=True):
            jsonschema.validate(arguments, {**SCHEMAS[function], "additionalProperties": False})


def test_only_functions_that_are_held_have_to_fit(grammars: Grammars) -> None:
    functions = [Function("get_weather", SCHEMAS["get_weather"], False), Function("book", SCHEMAS["book"])]
    source = calls_grammar(whole("hermes"), functions, grammars.special, must=False, parallel=True)
    assert grammars.takes(source, "Well. " + written("hermes", [WrittenCall("get_weather", {"x": [1]})]))
    assert not grammars.takes(source, written("hermes", [WrittenCall("book", {"x": 1})]))


def test_a_document_may_stand_for_a_call(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]}
    source = calls_grammar(whole("hermes"), FUNCTIONS, grammars.special, must=False, parallel=True, document=schema)
    assert grammars.takes(source, json.dumps({"yes": True}))
    assert grammars.takes(source, written("hermes", CALLS[:1]))
    assert not grammars.takes(source, "Yes.")


def test_arguments_that_are_required_but_not_named_may_come(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}
    source = calls_grammar(whole("hermes"), [Function("f", schema)], grammars.special, must=True, parallel=True)
    assert grammars.takes(source, written("hermes", [WrittenCall("f", {"a": 1, "b": "x"})]))
    assert not grammars.takes(source, written("hermes", [WrittenCall("f", {"a": 1})]))


def test_many_parameters_come_as_they_are_declared(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(12)}, "required": ["p3"]}
    for name in ("hermes", "qwen3_coder", "llama4_pythonic", "gemma4"):
        source = calls_grammar(whole(name), [Function("f", schema)], grammars.special, must=True, parallel=True)
        assert grammars.takes(source, written(name, [WrittenCall("f", {"p1": 1, "p3": 2, "p11": 3})]))
        assert not grammars.takes(source, written(name, [WrittenCall("f", {"p1": 1})]))
