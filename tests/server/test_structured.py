"""Structured output as clients ask for it: every field's translation, and documents that come back over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from penstock.config import limits
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.errors import RequestError
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.build import grammar_vocabulary
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server.structured import FIELDS, asked
from penstock.structured.manager import StructuredOutputManager
from tests.engine.support import VOCAB, null_engine
from tests.server.support import Serving, serving, until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "guests": {"type": "integer", "minimum": 1, "maximum": 20}},
    "required": ["city", "guests"],
    "additionalProperties": False,
}
TAG = {
    "triggers": ["<call="],
    "structures": [{"begin": "<call=book>", "schema": SCHEMA, "end": "</call>"}],
}
CLOSED = {"disable_additional_properties": True}
OPEN = {"x-guidance": {"whitespace_flexible": True}}


def schema_of(grammar: Grammar) -> Any:
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    return json.loads(grammar.source)


@pytest.mark.parametrize(
    ("fields", "kind", "source", "field"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "json_object",
            "",
            "response_format.json_schema",
        ),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]', "structured_outputs.choice"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a", "b"]', "guided_choice"),
        ({"guided_grammar": "root ::= 'a'"}, "gbnf", "root ::= 'a'", "guided_grammar"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"', "structured_outputs.grammar"),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"', "grammar"),
        (
            {"response_format": {"type": "structural_tag", **TAG}},
            "structural_tag",
            json.dumps({"type": "structural_tag", **TAG}),
            "response_format",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag", "{}", "structured_outputs.structural_tag"),
    ],
)
def test_every_field_becomes_a_grammar(fields: dict[str, Any], kind: str, source: str, field: str) -> None:
    found = asked(fields)
    assert found is not None
    assert (found.grammar, found.field) == (Grammar(GrammarKind(kind), source), field)


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, SCHEMA),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": True}, {}),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, SCHEMA),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, SCHEMA | OPEN),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}},
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            SCHEMA | {"x-guidance": {"whitespace_pattern": " ?"}},
        ),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
            {"type": "object", "x-guidance": {"whitespace_pattern": " ?"}},
        ),
        (
            {"structured_outputs": {"json": {"properties": {"a": {"properties": {}}}}, **CLOSED}},
            {"properties": {"a": {"properties": {}, "additionalProperties": False}}, "additionalProperties": False},
        ),
    ],
)  # fmt: skip
def test_schemas_arrive_as_they_are(fields: dict[str, Any], schema: Any) -> None:
    found = asked(fields)
    assert found is not None
    assert schema_of(found.grammar) == schema


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(FIELDS),
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"grammar": ""},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert asked(fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "regex"),
        ({"grammar": "a", "response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", '"json_schema"'),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
        ({"structured_outputs": ["json"]}, "structured_outputs", "an object"),
        ({"structured_outputs": {"yaml": 1}}, "structured_outputs", '"yaml"'),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "an object"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "a string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"structural_tag": 1}}, "structured_outputs.structural_tag", "structural tag"),
        (
            {"structured_outputs": {"disable_fallback": "yes"}},
            "structured_outputs.disable_fallback",
            "true or false",
        ),
        ({"guided_choice": ["a", 1]}, "guided_choice", "at least one string"),
        ({"guided_whitespace_pattern": 1, "guided_json": {}}, "guided_whitespace_pattern", "a string"),
        ({"json_schema": "no"}, "json_schema", "an object"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_sent(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as refused:
        asked(fields)
    assert refused.value.param == param
    assert refused.value.status == 400


_MANY = limits.MAX_GRAMMAR_PARTS + 1
_LONG = "x" * (limits.MAX_GRAMMAR_CHARS + 1)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (_LONG, f"{len(_LONG)} characters; allowed: at most {limits.MAX_GRAMMAR_CHARS}"),
        ({"description": _LONG}, f"allowed: at most {limits.MAX_GRAMMAR_CHARS}"),
        ({_LONG: {}}, f"allowed: at most {limits.MAX_GRAMMAR_CHARS}"),
        ({"enum": [0] * _MANY}, f"{limits.MAX_GRAMMAR_PARTS} values allowed"),
        (json.dumps({"enum": [0] * _MANY}), f"{limits.MAX_GRAMMAR_PARTS} values allowed"),
        (json.dumps({"enum": [0] * 2 * _MANY}), f"{limits.MAX_GRAMMAR_PARTS} values allowed"),
    ],
    ids=["string", "text", "name", "values", "values as a string", "many values as a string"],
)
@pytest.mark.parametrize("more", [{}, CLOSED])
def test_schemas_are_bounded_before_they_are_read_and_written(
    schema: Any, says: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[int] = []
    monkeypatch.setattr(json, "dumps", lambda *_, **__: worked.append(1))
    read = json.loads
    monkeypatch.setattr(json, "loads", lambda text: worked.append(len(text) > 4 * _MANY) or read(text))
    with pytest.raises(RequestError, match=says) as refused:
        asked({"structured_outputs": {"json": schema, **more}})
    assert refused.value.param == "structured_outputs.json" and refused.value.status == 400
    assert not any(worked)  # nothing was written, and only what is bounded was read


@pytest.fixture(scope="module")
def grammars(text: TextPipeline) -> Iterator[Serving]:
    """A server whose model draws at random from what the masks allow."""

    def build() -> tuple[Engine, EngineInfo]:
        engine, info = null_engine(structured=StructuredOutputManager(VOCAB, partial(grammar_vocabulary, text, VOCAB)))
        return engine, replace(info, vocab_size=text.vocab_size)

    client = ThreadClient(build)
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


def post(server: Serving, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    given = {"prompt": "A table."} if path.endswith("/completions") and "chat" not in path else {}
    body = given or {"messages": [{"role": "user", "content": "A table."}]}
    return httpx.post(f"{server.url}{path}", json={"max_tokens": 400, **body, **fields}, timeout=60)


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_documents_fit_their_schema(grammars: Serving, fields: dict[str, Any], path: str) -> None:
    for seed in range(3):
        got = content(post(grammars, path, temperature=1, seed=seed, **fields))
        jsonschema.validate(json.loads(got), SCHEMA)
        assert got == json.dumps(json.loads(got), separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'root ::= ("ab" | "c")* "d" num{2}\nnum ::= [1-3]'}, "(ab|c)*d[1-3]{2}"),
        ({"structured_outputs": {"grammar": 'start: "x" /[a-z]{2}/'}}, "x[a-z]{2}"),
    ],
)
def test_texts_fit_their_grammar(grammars: Serving, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, content(post(grammars, temperature=1, **fields)))


def test_streams_and_log_probabilities_bring_the_same_document(grammars: Serving) -> None:
    client = openai.OpenAI(base_url=f"{grammars.url}/v1", api_key="none")
    how: dict[str, Any] = {
        "model": "scripted", "messages": [{"role": "user", "content": "A table."}], "temperature": 1, "seed": 5,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"name": "table", "schema": SCHEMA}},
    }  # fmt: skip
    whole = client.chat.completions.create(**how).choices[0].message.content
    pieces = [event.choices[0].delta.content or "" for event in client.chat.completions.create(**how, stream=True)]
    scored = client.chat.completions.create(**how, logprobs=True).choices[0]
    assert "".join(pieces) == whole == scored.message.content
    assert scored.logprobs is not None and scored.logprobs.content
    assert "".join(entry.token for entry in scored.logprobs.content).startswith(whole or "")


def test_several_answers_and_the_best_of_several_fit(grammars: Serving) -> None:
    several = post(grammars, n=12, temperature=1, guided_json=SCHEMA).json()["choices"]
    texts = {choice["message"]["content"] for choice in several}
    best = content(post(grammars, "/v1/completions", best_of=3, temperature=1, guided_json=SCHEMA))
    for document in (*texts, best):
        jsonschema.validate(json.loads(document), SCHEMA)
    assert len(texts) > 1


def test_max_tokens_and_stop_strings_cut_a_document(grammars: Serving) -> None:
    cut = post(grammars, guided_json=SCHEMA, max_tokens=3).json()["choices"][0]
    assert cut["finish_reason"] == "length"
    stopped = post(grammars, guided_json=SCHEMA, stop=['"guests"']).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert re.fullmatch(r'\{"city":"(Paris|Rome)",', stopped["message"]["content"])


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
         "response_format.json_schema.schema", "not"),
        ({"guided_json": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"type": "string", "pattern": "(?=a)"}}, "guided_json", "pattern"),
        ({"guided_json": {"$ref": "http://elsewhere/schema"}}, "guided_json", "$ref"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json", "minimum"),
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar", "cannot be met"),
        ({"guided_json": {"enum": list(range(10_001))}}, "guided_json", "10000"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "4096"),
        ({"guided_json": SCHEMA, "use_beam_search": True, "n": 2}, "use_beam_search", "guided_json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_met_is_refused_before_the_first_token(
    grammars: Serving, fields: dict[str, Any], param: str, says: str, stream: bool
) -> None:
    refused = post(grammars, stream=stream, **fields)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_the_engine_lives_on_after_thousands_of_broken_schemas(grammars: Serving) -> None:
    with httpx.Client(base_url=grammars.url) as client:
        for number in range(300):
            broken = {"type": "string", "pattern": "(" * (number % 40 + 1), "minLength": number}
            body = {"messages": [{"role": "user", "content": "x"}], "guided_json": broken}
            assert client.post("/v1/chat/completions", json=body).status_code == 400
    assert content(post(grammars, guided_choice=["yes"])) == "yes"
