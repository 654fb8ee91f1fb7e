"""Token healing over HTTP: what is told of answers whose first token is partly the prompt's."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from penstock import LLM
from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Serving

PROMPT = "What time do you op"


@pytest.fixture(scope="module")
def truth() -> str:
    with LLM(threads=1) as llm:
        return llm.generate(PROMPT, max_tokens=8, temperature=0, token_healing=True)[0].outputs[0].text


def asked(server: Serving, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(
        server.url + path, json={"prompt": PROMPT, "temperature": 0, "token_healing": True, **fields}, timeout=60
    )


@pytest.mark.parametrize(
    ("path", "most", "told"),
    [
        ("/v1/completions", "max_tokens", lambda body: body["choices"][0]["text"]),
        ("/completion", "n_predict", lambda body: body["content"]),
        ("/api/v1/generate", "max_length", lambda body: body["results"][0]["text"]),
    ],
)
def test_the_beginning_is_not_told_again(concierge: Serving, truth: str, path: str, most: str, told: Any) -> None:
    answer = asked(concierge, path, **{most: 8})
    assert answer.status_code == 200, answer.text
    assert told(answer.json()) == truth
    assert told(asked(concierge, path, token_healing=False, **{most: 8}).json()) != truth


def test_streams_usage_and_tokens(concierge: Serving, truth: str, text: TextPipeline) -> None:
    lines = asked(concierge, "/v1/completions", max_tokens=8, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == truth
    body = asked(concierge, "/v1/completions", max_tokens=8, logprobs=1, return_token_ids=True).json()
    ids = text.tokenizer.encode(PROMPT)
    assert body["usage"]["prompt_tokens"] == len(ids) - 1
    first = body["choices"][0]["token_ids"][0]
    assert text.tokenizer.token_bytes(first).startswith(text.tokenizer.token_bytes(ids[-1]))
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["completion_tokens"]


def test_chats_are_healed_where_they_go_on(concierge: Serving) -> None:
    opened = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "We are op"}]
    for messages, continued in ((opened[:1], False), (opened, True)):
        found = []
        for healing in (False, True):
            body = {"messages": messages, "temperature": 0, "max_tokens": 8, "token_healing": healing}
            if continued:
                body |= {"continue_final_message": True, "add_generation_prompt": False}
            answer = httpx.post(f"{concierge.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["usage"]["prompt_tokens"])
        assert found[0] - found[1] == continued


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"structured_outputs": {"regex": "a+"}}, "token_healing"),
        ({"use_beam_search": True, "n": 2}, "token_healing"),
        ({"token_healing": "yes"}, "token_healing"),
    ],
)
def test_what_does_not_go_with_it_is_refused(concierge: Serving, fields: dict[str, Any], param: str) -> None:
    answer = asked(concierge, "/v1/completions", max_tokens=4, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
