"""vLLM's own routes: tokens in and out, what the server is, and what is answered by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.not_here import NOT_HERE
from tests.server.support import ANSWER, Running


def generate(server: Running, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/inference/v1/generate", json={"token_ids": [5, 6, 7], "sampling_params": {}, **body}
    )


def test_tokens_in_and_out(server: Running) -> None:
    asked = {"n": 2, "logprobs": 1, "prompt_logprobs": 0, "detokenize": False, "output_kind": 2}
    told = generate(server, sampling_params=asked, request_id="mine", return_token_ids=True).json()
    script = list(server.runner.script)
    assert (told["request_id"], told["output_mode"], told["prompt_token_ids"]) == ("mine", "tokens", [5, 6, 7])
    assert [choice["token_ids"] for choice in told["choices"]] == [script, script]
    assert "text" not in told["choices"][0]
    first = told["choices"][0]["logprobs"]["content"][0]
    assert (first["token_id"], first["rank"], len(first["top_logprobs"])) == (script[0], 1, 1)
    assert {choice["finish_reason"] for choice in told["choices"]} == {"stop"}
    assert told["usage"]["completion_tokens"] == 2 * len(script)
    assert [None if entry is None else list(entry) for entry in told["prompt_logprobs"]] == [None, ["6"], ["7"]]
    assert list(server.runner.seen[-1].prompt_ids) == [5, 6, 7]


def test_a_stream_of_tokens_with_their_text(server: Running) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "output_mode": "text", "return_token_ids": True}
    lines = generate(server, **body).text.split()
    assert lines[-1] == "[DONE]"
    raw = generate(server, **body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in raw if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == list(server.runner.script)
    assert "".join(choice["text"] for choice in choices) == ANSWER
    assert choices[-1]["finish_reason"] == "stop"
    assert [("prompt_token_ids" in chunk) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert chunks[-1]["usage"]["completion_tokens"] == len(server.runner.script)


def test_what_render_gives_is_taken(server: Running) -> None:
    """A request is rendered in one place and computed in another."""
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, "temperature": 0.5}
    rendered = httpx.post(f"{server.url}/v1/chat/completions/render", json=chat).json()
    sent = {"token_ids": rendered["token_ids"], "sampling_params": rendered["sampling_params"]}
    told = generate(server, **sent).json()
    assert told["choices"][0]["token_ids"] == list(server.runner.script[:3])
    assert server.runner.seen[-1].sampling.temperature == 0.5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"n": 10**6}}, "n"),
        ({"sampling_params": {"tempreature": 1}}, "sampling_params"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "sampling_params"),
        ({"sampling_params": {"stop": [[]]}}, "stop"),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ],
)
def test_refusals(server: Running, body: dict[str, Any], param: str) -> None:
    answer = generate(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param)


def test_what_the_server_is(server: Running, text: TextPipeline) -> None:
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    assert httpx.get(f"{server.url}/is_paused").json() == {"is_paused": False}
    assert httpx.get(f"{server.url}/is_sleeping").json() == {"is_sleeping": False}
    told = httpx.get(f"{server.url}/tokenizer_info").json()
    assert text.template is not None
    assert told["chat_template"] == text.template.sources["default"]
    assert told["vocab_size"] == text.vocab_size
    assert "<|im_start|>" in told["additional_special_tokens"]


@pytest.mark.parametrize("path", NOT_HERE)
def test_what_is_not_here_says_what_to_do(server: Running, path: str) -> None:
    answer = httpx.post(f"{server.url}{path}", json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (501, "not_available")
    assert error["message"].startswith(f"{path} is not available here. ")


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
@pytest.mark.parametrize("value", [5, "x", 1.5, []])
def test_switches_are_true_or_false(server: Running, name: str, value: Any) -> None:
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2, name: value}}
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert "true or false" in answer.json()["error"]["message"]


def chat(server: Running, **body: Any) -> httpx.Response:
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "logprobs": True, **body}
    return httpx.post(f"{server.url}/v1/chat/completions", json=asked)


@pytest.fixture
def telling_all(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """The server as if it had been started with --max-logprobs -1."""
    monkeypatch.setattr(server.client, "_info", replace(server.client.info, max_logprobs=-1), raising=True)
    return server


def test_more_alternatives_than_the_server_tells_are_refused(server: Running) -> None:
    for asked in ({"top_logprobs": 21}, {"top_logprobs": -1}):
        error = chat(server, **asked).json()["error"]
        assert error["param"] == "top_logprobs" and "at most 20 here" in error["message"], error
        assert "--max-logprobs" in error["message"]
    error = chat(server, logprob_token_ids=list(range(21))).json()["error"]
    assert error["param"] == "logprob_token_ids" and "at most 20 here" in error["message"]
    error = chat(server, logprobs=None, logprob_token_ids=[5]).json()["error"]
    assert "only together with logprobs" in error["message"]
    error = chat(server, logprob_token_ids=[10**6]).json()["error"]
    assert error["param"] == "logprob_token_ids" and "token ids from 0" in error["message"]


def test_the_whole_vocabulary(telling_all: Running, text: TextPipeline) -> None:
    """It is counted for the engine, told in full, and as the events of a stream."""
    for sampling in ({"sampling_params": {"logprobs": -1, "max_tokens": 2}}, None):
        if sampling is not None:
            told = generate(telling_all, **sampling).json()["choices"][0]["logprobs"]["content"]
        else:
            told = chat(telling_all, top_logprobs=-1).json()["choices"][0]["logprobs"]["content"]
        assert telling_all.runner.seen[-1].sampling.logprobs == text.vocab_size
        assert [len(entry["top_logprobs"]) for entry in told] == [text.vocab_size] * 2
    raw = chat(telling_all, top_logprobs=-1, stream=True).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in raw if line.startswith("data: {")]
    told = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert [len(entry["top_logprobs"]) for entry in told] == [text.vocab_size] * 2
    telling_all.until_idle()
    assert telling_all.lifecycle.told.in_flight == 0


def test_what_is_told_is_bounded(telling_all: Running, text: TextPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TOLD_LOGPROBS", 3 * (text.vocab_size + 1))
    monkeypatch.setattr(limits, "MAX_TOLD_LOGPROBS_IN_FLIGHT", 4 * (text.vocab_size + 1))
    assert chat(telling_all, top_logprobs=-1, max_tokens=3).status_code == 200
    answer = chat(telling_all, top_logprobs=-1, max_tokens=4)
    assert answer.status_code == 400 and "lower max_tokens" in answer.json()["error"]["message"]
    assert chat(telling_all, top_logprobs=-1, max_tokens=None).status_code == 400
    prompts = {"prompt": [[5, 6]] * 5, "logprobs": -1, "max_tokens": 1}
    answer = httpx.post(f"{telling_all.url}/v1/completions", json=prompts)
    assert answer.status_code == 400 and "send fewer prompts at once" in answer.json()["error"]["message"]
    told = telling_all.lifecycle.told
    assert told.in_flight == 0
    told.in_flight = 2 * text.vocab_size
    try:
        answer = chat(telling_all, top_logprobs=-1, max_tokens=3)
    finally:
        told.in_flight = 0
    assert answer.status_code == 429 and "retry-after" in answer.headers


def scored(server: Running, **body: Any) -> httpx.Response:
    asked = {"query": "Is it good? ", "items": ["Yes", "No"], "label_token_ids": [9, 5, 9], **body}
    return httpx.post(f"{server.url}/generative_scoring", json=asked)


def test_named_tokens_are_told(server: Running) -> None:
    told = chat(server, logprob_token_ids=[9, 5], return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    for entry in told["content"]:
        assert [one["token"] for one in entry["top_logprobs"]] == ["token_id:9", "token_id:5"]
    body = {"prompt": "Hello", "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [9, 5]}
    told = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(told["top_logprobs"][0]) == 3  # the token that was taken is told too


def test_the_first_label_is_scored(server: Running, text: TextPipeline) -> None:
    """Labels are told with log-probabilities -1 and -2 here."""
    told = scored(server, request_id="mine").json()
    assert (told["id"], told["object"]) == ("generative-scoring-mine", "list")
    among_both = 1 / (1 + math.exp(-1))
    assert [(entry["index"], entry["object"]) for entry in told["data"]] == [(0, "score"), (1, "score")]
    assert [entry["score"] for entry in told["data"]] == pytest.approx([among_both] * 2)
    told = scored(server, apply_softmax=False).json()
    assert [entry["score"] for entry in told["data"]] == pytest.approx([math.exp(-1)] * 2)
    query, items = text.tokenizer.encode("Is it good? "), [text.tokenizer.encode(word) for word in ("Yes", "No")]
    seen = server.runner.seen
    assert [list(new.prompt_ids) for new in seen[-2:]] == [[*query, *item] for item in items]
    assert told["usage"]["prompt_tokens"] == 2 * len(query) + sum(map(len, items))
    assert scored(server, query=[5, 6], items=[[7], [8]], item_first=True).status_code == 200
    assert [list(new.prompt_ids) for new in seen[-2:]] == [[7, 5, 6], [8, 5, 6]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": []}, "items"),
        ({"items": ["a", [5]]}, "items"),
        ({"items": [""]}, "items"),
        ({"query": ""}, "query"),
        ({"query": [10**6]}, "query"),
        ({"items": [[10**6]]}, "items"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": list(range(21))}, "label_token_ids"),
        ({"items": ["a"] * 2000}, "items"),
        ({"apply_softmax": 1}, "apply_softmax"),
    ],
)
def test_scores_that_are_refused(server: Running, body: dict[str, Any], param: str) -> None:
    answer = scored(server, **body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(param), answer.text
