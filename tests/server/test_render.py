"""Routes that show what a request becomes, without running it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.support import Running

CHAT_ROUTES = ("/v1/chat/completions/render", "/apply-template", "/v1/chat/completions/input_tokens")
CHAT = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]}


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body)


def test_a_rendered_chat_is_the_one_that_runs(server: Running) -> None:
    found = post(server, "/v1/chat/completions/render", {**CHAT, "temperature": 0.5, "seed": 3, "max_tokens": 7}).json()
    assert not server.runner.seen
    assert post(server, "/v1/chat/completions", {**CHAT, "max_tokens": 1}).status_code == 200
    assert found["token_ids"] == list(server.runner.seen[0].prompt_ids)
    assert found["prompt"].startswith("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert found["request_id"].startswith("chatcmpl-") and found["model"] == "scripted"
    sampling = found["sampling_params"]
    assert (sampling["temperature"], sampling["seed"], sampling["max_tokens"]) == (0.5, 3, 7)


def test_rendered_texts(server: Running) -> None:
    one = post(server, "/v1/completions/render", {"prompt": "Hello"}).json()
    assert [item["prompt"] for item in one] == ["Hello"]
    two = post(server, "/v1/completions/render", {"prompt": [one[0]["token_ids"], [5, 6]]}).json()
    assert [item["token_ids"] for item in two] == [one[0]["token_ids"], [5, 6]]
    assert two[0]["prompt"] == "Hello"


def test_templates_and_counts(server: Running) -> None:
    found = post(server, "/v1/chat/completions/render", CHAT).json()
    assert post(server, "/apply-template", CHAT).json() == {"prompt": found["prompt"]}
    counted = post(server, "/v1/chat/completions/input_tokens", CHAT).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(found["token_ids"])}
    assert not server.runner.seen


@pytest.mark.parametrize("path", CHAT_ROUTES)
@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"messages": []}, "messages", 400),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", 400),
        ({**CHAT, "model": "another"}, "model", 404),
        ({**CHAT, "chat_template": "{{ x }}"}, "chat_template", 400),
    ],
)
def test_refusals(server: Running, path: str, body: dict[str, Any], param: str, status: int) -> None:
    answer = post(server, path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_a_prompt_is_needed(server: Running) -> None:
    answer = post(server, "/v1/completions/render", {"prompt": ""})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


TURNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/responses": ({"instructions": "Be kind.", "input": "Hello"}, {"max_output_tokens": 7}),
    "/v1/messages": ({"system": "Be kind.", "messages": [{"role": "user", "content": "Hello"}]}, {"max_tokens": 7}),
}


@pytest.mark.parametrize("path", TURNS)
def test_rendered_turns_are_those_that_run(server: Running, path: str) -> None:
    body, more = TURNS[path]
    body = {"model": "scripted", **body, **more, "temperature": 0.5}
    found = post(server, f"{path}/render", body).json()
    assert not server.runner.seen
    assert post(server, path, body).status_code == 200
    assert found["token_ids"] == list(server.runner.seen[0].prompt_ids)
    assert found["sampling_params"]["max_tokens"] == 7
    prompt, offsets = found["prompt"], found["token_offsets"]
    assert "".join(prompt[start:end] for start, end in offsets) == prompt
    assert len(offsets) == len(found["token_ids"])


def test_refusals_of_turns_have_their_dialects_shape(server: Running) -> None:
    answer = post(server, "/v1/messages/render", {"model": "scripted", "messages": [], "max_tokens": 1})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    answer = post(server, "/v1/responses/render", {"model": "scripted", "input": []})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
