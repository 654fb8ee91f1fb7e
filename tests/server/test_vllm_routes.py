"""vLLM's own routes: tokens in and out, what the server is, and what is answered by name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

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
