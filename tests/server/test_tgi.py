"""TGI's API, by exchanges that its documents and clients show: bodies, whole answers, streams and errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock.config.constraint import GrammarKind
from penstock.config.generation import GenerationRequest
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.tgi.schema import TgiBody, TgiParameters
from penstock.server.dialects.tgi.translate import tgi_call
from tests.server.support import ANSWER, Running, script_of


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def generated(server: Running, path: str = "/generate", **parameters: Any) -> Any:
    answer = post(server, path, {"inputs": "Hello there", "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, path: str = "/generate_stream", **parameters: Any) -> list[dict[str, Any]]:
    answer = post(server, path, {"inputs": "Hello there", "parameters": parameters, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def request_of(**parameters: Any) -> GenerationRequest:
    body = TgiBody(inputs="Hello", parameters=TgiParameters(**parameters))
    return tgi_call(body, {}, stream=False).request


def test_a_whole_answer(server: Running, text: TextPipeline) -> None:
    assert generated(server) == {"generated_text": ANSWER}
    assert generated(server, "/") == [{"generated_text": ANSWER}]
    told = generated(server, details=True, max_new_tokens=3)
    details = told["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 3, None)
    assert [token["id"] for token in details["tokens"]] == list(script_of(text)[:3])
    assert set(details["tokens"][0]) == {"id", "text", "logprob", "special"}
    assert "".join(token["text"] for token in details["tokens"]) == told["generated_text"]
    assert details["prefill"] == [] and "top_tokens" not in details


def test_an_answer_to_its_end_has_the_token_of_the_end(server: Running, text: TextPipeline) -> None:
    details = generated(server, details=True)["details"]
    last = details["tokens"][-1]
    assert (details["finish_reason"], last["id"], last["special"]) == ("eos_token", text.eos_ids[0], True)
    assert all(not token["special"] for token in details["tokens"][:-1])


def test_a_stop_string_stays_in_the_text(server: Running) -> None:
    told = generated(server, details=True, stop=["table"])
    assert told["generated_text"].endswith("table")
    assert told["details"]["finish_reason"] == "stop_sequence"
    assert server.runner.seen[-1].sampling.include_stop_str_in_output


def test_what_is_told_of_tokens(server: Running) -> None:
    details = generated(server, details=True, decoder_input_details=True, top_n_tokens=2, max_new_tokens=2)["details"]
    first, *rest = details["prefill"]
    assert first["logprob"] is None and all(entry["logprob"] < 0 for entry in rest)
    assert "".join(entry["text"] for entry in details["prefill"]) == "Hello there"
    assert [len(top) for top in details["top_tokens"]] == [2, 2]
    assert set(details["top_tokens"][0][0]) == {"id", "text", "logprob", "special"}


def test_the_prompt_before_the_answer_and_cut(server: Running) -> None:
    assert generated(server, return_full_text=True)["generated_text"] == "Hello there" + ANSWER
    assert generated(server, return_full_text=True, truncate=1)["generated_text"] == "Hello there" + ANSWER
    assert len(server.runner.seen[-1].prompt_ids) == 1


def test_the_prompt_before_the_answer_is_the_one_that_was_sent(server: Running) -> None:
    sent = "  a\u0301 <|endoftext|>\r\n "
    told = post(server, "/generate", {"inputs": sent, "parameters": {"return_full_text": True}}).json()
    assert told["generated_text"].startswith(sent)


def test_details_of_the_prompt_are_details(server: Running) -> None:
    assert generated(server, decoder_input_details=True, max_new_tokens=1)["details"]["prefill"]
    for path in ("/generate_stream", "/"):
        body = {"inputs": "Hello", "parameters": {"decoder_input_details": True}, "stream": True}
        answer = post(server, path, body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert "false with stream: true" in answer.json()["error"]


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
def test_a_stream(server: Running, path: str) -> None:
    *parts, last = events(server, path, max_new_tokens=4)
    assert [part["index"] for part in (*parts, last)] == [1, 2, 3, 4]
    assert all(part["generated_text"] is None and part["details"] is None for part in parts)
    assert last["generated_text"] == "".join(part["token"]["text"] for part in (*parts, last))
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 4, "seed": None, "input_length": 2}


def test_the_best_of_several(server: Running) -> None:
    details = generated(server, details=True, best_of=3, do_sample=True, max_new_tokens=2)["details"]
    assert len(details["best_of_sequences"]) == 2
    assert details["best_of_sequences"][0]["generated_tokens"] == 2


def test_sampling(server: Running, text: TextPipeline) -> None:
    """Greedy unless something of it is sent; the seed that was drawn is told and gives the same answer again."""
    assert request_of().sampling.temperature == 0 == request_of(temperature=1.0).sampling.temperature
    assert tgi_call(TgiBody(inputs="Hello"), {}, stream=False).request.sampling.temperature == 1
    for chosen in ({"do_sample": True}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"typical_p": 0.9}):
        sampling = request_of(**chosen).sampling
        assert sampling.temperature == chosen.get("temperature", 1.0)
        assert sampling.seed is not None
    told = generated(server, details=True, do_sample=True, max_new_tokens=1)
    assert told["details"]["seed"] == server.runner.seen[-1].sampling.seed
    assert generated(server, details=True, do_sample=True, seed=7, max_new_tokens=1)["details"]["seed"] == 7
    sampling = request_of(repetition_penalty=1.2, frequency_penalty=0.5, watermark=True).sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.watermark) == (1.2, 0.5, True)


def test_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for value in (schema, json.dumps(schema)):
        grammar = request_of(grammar={"type": "json", "value": value}).grammar
        assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    grammar = request_of(grammar={"type": "json_schema", "value": {"name": "x", "schema": schema}}).grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
    grammar = request_of(grammar={"type": "regex", "value": "[0-9]+"}).grammar
    assert grammar is not None and (grammar.kind, grammar.source) == (GrammarKind.REGEX, "[0-9]+")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "inputs is required."),
        ({"inputs": ""}, "inputs"),
        ({"inputs": "a", "parameters": {"temperature": 0}}, "parameters.temperature is 0; allowed: more than 0"),
        ({"inputs": "a", "parameters": {"best_of": 2}}, "send do_sample: true"),
        ({"inputs": "a", "parameters": {"best_of": 2, "do_sample": True, "seed": 1}}, "1 with a seed"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "x", "value": "y"}}}, "parameters.grammar.type"),
        ({"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}}, "grammar"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 10**6}}, "max_new_tokens"),
    ],
    ids=str,
)
def test_refusals(server: Running, body: dict[str, Any], said: str) -> None:
    for path in ("/generate", "/generate_stream", "/") if "inputs" in body else ("/generate_stream", "/"):
        answer = post(server, path, body)
        assert answer.status_code == 422, answer.text
        told = answer.json()
        assert set(told) == {"error", "error_type"} and told["error_type"] == "validation"
        assert said in told["error"]


def test_failures_of_the_engine(server: Running) -> None:
    server.runner.die_after = 1
    answer = post(server, "/generate", {"inputs": "Hello"})
    assert (answer.status_code, answer.json()["error_type"]) == (424, "generation")
    *_, last = events(server)
    assert last["error_type"] == "generation"


def test_tokens_and_their_places(server: Running, text: TextPipeline) -> None:
    said = "Grüße, ein Tisch für zwei! 你好"
    tokens = post(server, "/tokenize", {"inputs": said}).json()
    assert [token["id"] for token in tokens] == list(text.tokenizer.encode(said))
    plain = [token for token in tokens if token["stop"] > token["start"]]
    assert plain[-1]["stop"] == len(said)
    assert "".join(said[token["start"] : token["stop"]] for token in plain) == said
    assert all(set(token) == {"id", "text", "start", "stop"} for token in tokens)
    refused = post(server, "/tokenize", {"inputs": 5})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


def test_a_chat_in_tokens(server: Running) -> None:
    messages = [{"role": "user", "content": "A table for two."}]
    told = post(server, "/chat_tokenize", {"messages": messages}).json()
    asked = post(server, "/tokenize", {"messages": messages}).json()
    assert [token["id"] for token in told["tokenize_response"]] == asked["tokens"]
    assert "A table for two." in told["templated_text"]


def test_the_server_and_its_model(server: Running) -> None:
    told = httpx.get(f"{server.url}/info").json()
    assert told["model_id"] == "scripted"
    assert told["max_total_tokens"] == told["max_input_tokens"] + 1
    assert "/secret" not in json.dumps(told)
