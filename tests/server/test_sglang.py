"""SGLang's API, by exchanges that its documents and frontend language show: bodies, answers, streams and errors."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.config.constraint import GrammarKind
from penstock.config.generation import GenerationRequest
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.dialects.sglang.schema import SglangBody, SglangParams
from penstock.server.dialects.sglang.translate import sglang_call
from tests.server.support import ANSWER, Running, running, script_of

META = {
    *("id", "finish_reason", "prompt_tokens", "weight_version", "reasoning_tokens", "completion_tokens"),
    *("cached_tokens", "e2e_latency"),
}


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def generated(server: Running, **body: Any) -> Any:
    answer = post(server, "/generate", {**({} if "input_ids" in body else {"text": "Hello there"}), **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, "/generate", {"text": "Hello there", "stream": True, **body})
    *parts, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(part) for part in parts]


def request_of(**params: Any) -> GenerationRequest:
    return sglang_call(SglangBody(text="Hello", sampling_params=SglangParams(**params)), {}).requests[0]


def test_a_whole_answer(server: Running, text: TextPipeline) -> None:
    told = generated(server)
    assert (told["text"], tuple(told["output_ids"])) == (ANSWER, script_of(text))
    assert set(told["meta_info"]) == META
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": text.eos_ids[0]}
    told = generated(server, sampling_params={"max_new_tokens": 3}, rid="mine")
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert (told["meta_info"]["id"], told["meta_info"]["completion_tokens"]) == ("mine", 3)


def test_patterns_end_answers_as_strings_do(server: Running) -> None:
    pattern = r"tab[a-z]+ for"
    for trim in (False, True):
        told = generated(server, sampling_params={"stop_regex": pattern, "no_stop_trim": trim})
        same = generated(server, sampling_params={"stop": "table for", "no_stop_trim": trim})
        assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": pattern}
        assert (told["text"], told["output_ids"]) == (same["text"], same["output_ids"])
    chat = {"messages": [{"role": "user", "content": "Hello"}], "stop_regex": [r"\bx", pattern]}
    refused = post(server, "/v1/chat/completions", chat)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop_regex")
    for path, body in (
        ("/v1/chat/completions", {**chat, "stop_regex": ["x{3}", pattern]}),
        ("/v1/completions", {"prompt": "Hello", "stop_regex": pattern, "max_tokens": 50}),
    ):
        (choice,) = post(server, path, body).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", pattern)
    (result,) = post(server, "/api/v1/generate", {"prompt": "Hello", "stop_regex": pattern}).json()["results"]
    assert result["text"] == generated(server, sampling_params={"stop_regex": pattern})["text"]


def test_stop_strings_are_cut_off_unless_they_are_to_stay(server: Running) -> None:
    told = generated(server, sampling_params={"stop": "table"})
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": "table"}
    assert not told["text"].endswith("table")
    assert generated(server, sampling_params={"stop": ["table"], "no_stop_trim": True})["text"].endswith("table")


def test_many_prompts_and_many_answers(server: Running) -> None:
    told = generated(server, text=["Hello", "Good evening"], rid="both", sampling_params={"max_new_tokens": 2})
    assert [one["meta_info"]["id"] for one in told] == ["both_0", "both_1"]
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 4}]
    told = generated(server, input_ids=[[5, 6, 7], [8, 9]], sampling_params=params)
    assert [one["meta_info"]["completion_tokens"] for one in told] == [2, 4]
    assert [one["meta_info"]["prompt_tokens"] for one in told] == [3, 2]
    assert len(generated(server, text=["Hello"])) == 1
    assert len(generated(server, sampling_params={"n": 3, "max_new_tokens": 1})) == 3


def test_log_probabilities(server: Running, text: TextPipeline) -> None:
    """Entries are [log-probability, token, text]; nothing comes before the first position that is wanted."""
    ids = list(text.tokenizer.encode("Hello there, I need a table."))
    asked = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    about = generated(server, **asked)["meta_info"]
    assert about["input_token_logprobs"] == []
    assert about["output_token_logprobs"] == [[-0.5, token, None] for token in script_of(text)[:2]]
    assert about["output_token_logprobs_length"] == 2
    about = generated(server, **asked, logprob_start_len=2, top_logprobs_num=2, return_text_in_logprobs=True)[
        "meta_info"
    ]
    first, *rest = about["input_token_logprobs"]
    assert first[:2] == [None, ids[2]]
    assert [(score, token) for score, token, _ in rest] == [(-0.5, token) for token in ids[3:]]
    assert about["input_top_logprobs"][0] is None
    assert [len(top) for top in about["input_top_logprobs"][1:]] == [2] * (len(ids) - 3)
    assert about["output_token_logprobs"][0][2] == "Hello"
    assert [len(top) for top in about["output_top_logprobs"]] == [2, 2]


def test_a_prompt_alone(server: Running) -> None:
    """As the frontend language caches a prefix, and scores choices."""
    asked = {"max_new_tokens": 0, "temperature": 0}
    told = generated(
        server, text=["A table", "A chair"], sampling_params=asked, return_logprob=True, logprob_start_len=0
    )
    for one in told:
        assert (one["text"], one["output_ids"], one["meta_info"]["completion_tokens"]) == ("", [], 0)
        assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert one["meta_info"]["output_token_logprobs"] == []
        assert len(one["meta_info"]["input_token_logprobs"]) == one["meta_info"]["prompt_tokens"]


def test_a_stream_tells_all_that_came_so_far(server: Running) -> None:
    parts = events(server, sampling_params={"max_new_tokens": 5})
    texts = [part["text"] for part in parts]
    assert [len(part["output_ids"]) for part in parts] == [1, 2, 3, 4, 5]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [part["meta_info"]["finish_reason"] is None for part in parts] == [True] * 4 + [False]
    assert texts[-1] == generated(server, sampling_params={"max_new_tokens": 5})["text"]
    numbers = {part["index"] for part in events(server, text=["a", "b"], sampling_params={"max_new_tokens": 2})}
    assert numbers == {0, 1}


def test_a_long_stream_is_no_square_of_its_answer(server: Running) -> None:
    parts = events(server, sampling_params={"max_new_tokens": 1500, "ignore_eos": True})
    assert len(parts[-1]["output_ids"]) == 1500
    assert len(parts) < 600


def test_sampling() -> None:
    sampling = request_of().sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (1.0, 0, 128)
    assert request_of(top_k=1 << 30).sampling.top_k == request_of(top_k=-1).sampling.top_k == 0
    params = {"min_new_tokens": 2, "min_p": 0.1, "stop_token_ids": [5], "logit_bias": {"7": 1.5}, "sampling_seed": 9}
    sampling = request_of(**params, repetition_penalty=1.1, ignore_eos=True, top_k=4).sampling
    assert (sampling.min_tokens, sampling.min_p, sampling.stop_token_ids) == (2, 0.1, (5,))
    assert (sampling.logit_bias, sampling.seed, sampling.top_k) == (((7, 1.5),), 9, 4)
    assert (sampling.repetition_penalty, sampling.ignore_eos) == (1.1, True)
    for sent, patterns in ((r"\d+", (r"\d+",)), (["a", "b+"], ("a", "b+")), ("", ()), ([], ()), (None, ())):
        assert request_of(stop_regex=sent).sampling.stop_regex == patterns
    request = sglang_call(SglangBody(text="a", priority=3, extra_key="mine"), {}).requests[0]
    assert (request.priority, request.cache_salt) == (-3, "mine")


def test_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    kinds = {
        GrammarKind.JSON_SCHEMA: {"json_schema": json.dumps(schema)},
        GrammarKind.JSON_OBJECT: {"json_schema": "$$ANY$$"},
        GrammarKind.REGEX: {"regex": "[0-9]+"},
        GrammarKind.GBNF: {"ebnf": 'root ::= "a" | "b"'},
    }
    for kind, params in kinds.items():
        grammar = request_of(**params).grammar
        assert grammar is not None and grammar.kind is kind


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": "a", "input_ids": [5]}, "exactly one of text and input_ids"),
        ({"sampling_params": {}}, "exactly one of text and input_ids"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "temprature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "a*"}}, 'sampling_params.stop_regex is "a*"'),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf both say"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "as many as there are prompts (2)"),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, "differ from each other"),
        ({"text": "a", "session_params": {"id": "x"}}, "There is no session"),
        ({"text": "a", "image_data": "x"}, "Media are not available"),
        ({"text": "a", "token_ids_logprob": [5]}, "top_logprobs_num"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 10**6}}, "max_new_tokens"),
    ],
    ids=str,
)
def test_refusals(server: Running, body: dict[str, Any], said: str) -> None:
    answer = post(server, "/generate", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (set(error), error["code"]) == ({"message", "type", "code", "retryable"}, 400)
    assert said in error["message"]


def test_a_request_is_ended_by_its_name(server: Running) -> None:
    server.runner.delay = 0.05
    told: list[Any] = []
    asked = {"text": "Hello", "rid": "long", "stream": True}
    params = {"max_new_tokens": 1000, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/generate", json={**asked, "sampling_params": params}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told.append(json.loads(line.removeprefix("data: ")))
            if len(told) == 1:
                assert post(server, "/abort_request", {"rid": "long"}).status_code == 200
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(told[-1]["output_ids"]) < 1000
    server.until_idle()
    assert post(server, "/abort_request", {"rid": "nobody"}).status_code == 200
    assert post(server, "/abort_request", {"rid": "x", "abort_all": True}).status_code == 400


def test_the_server_and_its_model(server: Running) -> None:
    for path in ("/get_model_info", "/model_info"):
        told = httpx.get(f"{server.url}{path}").json()
        assert (told["model_path"], told["is_generation"]) == ("scripted", True)
    for path in ("/get_server_info", "/server_info"):
        told = httpx.get(f"{server.url}{path}").json()
        assert told["internal_states"] == [{"num_running_reqs": 0, "num_waiting_reqs": 0}]
        assert "/secret" not in json.dumps(told)
    assert httpx.get(f"{server.url}/health_generate").status_code == 200
    assert len(server.runner.seen) == 1


def test_vectors_and_labels(server: Running, text: TextPipeline) -> None:
    one = post(server, "/encode", {"text": "Hello"}).json()
    assert set(one) == {"embedding", "meta_info"} and one["meta_info"]["prompt_tokens"] == 1
    two = post(server, "/encode", {"input_ids": [[5], [6, 7]]}).json()
    assert [entry["meta_info"]["prompt_tokens"] for entry in two] == [1, 2]
    labelled = replace(text, pooling=replace(text.pooling, labels=("dull", "great")))
    with running(labelled) as server:
        assert set(post(server, "/classify", {"text": "Hello"}).json()) == {"embedding", "meta_info"}
        assert post(server, "/classify", {"input": "Hello"}).json()["object"] == "list"
        assert "code" in post(server, "/classify", {"text": 5}).json()["error"]


def test_the_prompt_is_told_in_the_first_and_the_last_event(server: Running) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_prompt_token_ids": True}
    parts = events(server, sampling_params={"max_new_tokens": 5}, **asked)
    assert ["prompt_token_ids" in part for part in parts] == [True, False, False, False, True]
    for name in ("input_token_logprobs", "input_top_logprobs"):
        assert [name in part["meta_info"] for part in parts] == [True, False, False, False, True]
    assert [len(part["meta_info"]["output_top_logprobs"]) for part in parts] == [1, 2, 3, 4, 5]
    whole = generated(server, sampling_params={"max_new_tokens": 5}, **asked)
    assert parts[-1]["meta_info"]["input_top_logprobs"] == whole["meta_info"]["input_top_logprobs"]


@pytest.mark.parametrize(("rid", "ended"), [("both_0", [True, False]), ("both", [True, True])])
def test_prompts_of_a_batch_are_ended_alone_or_together(server: Running, rid: str, ended: list[bool]) -> None:
    server.runner.hold(2)
    params = {"max_new_tokens": 50, "ignore_eos": True}
    body = {"text": ["Hello", "Good evening"], "rid": "both", "stream": True, "sampling_params": params}
    last: dict[int, Any] = {}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            part = json.loads(line.removeprefix("data: "))
            last[part["index"]] = part
            if len(last) == 1 and len(part["output_ids"]) == 1:
                assert server.runner.held.wait(60)
                assert post(server, "/abort_request", {"rid": rid}).status_code == 200
                server.runner.go()
    kinds = [last[number]["meta_info"]["finish_reason"]["type"] for number in (0, 1)]
    assert kinds == ["abort" if one else "length" for one in ended]
    server.until_idle()


def test_each_text_has_its_vector_whatever_its_name(server: Running) -> None:
    two = post(server, "/encode", {"text": ["a", "b"], "rid": "both"}).json()
    assert [entry["meta_info"]["id"] for entry in two] == ["both_0", "both_1"]
    answer = post(server, "/encode", {"text": ["a", "b"], "rid": ["x"]})
    assert answer.status_code == 400 and "as many as there are prompts (2)" in answer.json()["error"]["message"]


def test_a_refusal_names_the_field_that_was_sent(server: Running) -> None:
    answer = post(server, "/generate", {"input_ids": [10**9]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("input_ids")


def test_vertex_ais_route(server: Running) -> None:
    """Instances in, predictions out; refusals are SGLang's."""
    asked = {"sampling_params": {"max_new_tokens": 100}}
    instances = [{"text": "Hello"}, {"text": "Hi"}]
    told = httpx.post(f"{server.url}/vertex_generate", json={"instances": instances, "parameters": asked}, timeout=60)
    assert [one["text"] for one in told.json()["predictions"]] == [ANSWER, ANSWER]
    assert int(told.headers["content-length"]) == len(told.content)
    ids = httpx.post(f"{server.url}/vertex_generate", json={"instances": [{"input_ids": [5, 6]}]}, timeout=60)
    assert len(ids.json()["predictions"]) == 1
    refusals: list[dict[str, Any]] = [
        {},
        {"instances": []},
        {"instances": [{}]},
        {"instances": [{"text": "a"}, {"input_ids": [1]}]},
        {"instances": [{"text": "a", "image_data": "x"}]},
        {"instances": [{"text": "a"}], "parameters": {"stream": True}},
        {"instances": [{"text": "a"}], "parameters": {"text": "b"}},
        {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"max_new_tokens": -1}}},
    ]
    for body in refusals:
        refused = httpx.post(f"{server.url}/vertex_generate", json=body, timeout=60)
        assert refused.status_code == 400 and "retryable" in refused.json()["error"], body


@pytest.mark.parametrize(("path", "field", "value"), [("/generate", "input_ids", "AAA"), ("/generate", "text", [1, 2])])
def test_texts_and_token_ids_have_fields_of_their_own(server: Running, path: str, field: str, value: Any) -> None:
    answer = httpx.post(server.url + path, json={field: value}, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(f"{field} is"), answer.text
