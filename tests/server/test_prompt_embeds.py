"""Prompts as rows of the embedding over HTTP: answered as their tokens are, beside texts and in chats; refusals."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from tests.server.support import Running, Serving, serving, until

PROMPT = "The hotel is open from"
GREEDY = {"temperature": 0, "max_tokens": 8, "logprobs": 2}
ODD: dict[str, Callable[[], Any]] = {
    "infinite": lambda: torch.full((2, 256), float("inf")),
    "width": lambda: torch.ones(2, 255),
    "flat": lambda: torch.ones(256),
    "none": lambda: torch.ones(0, 256),
    "double": lambda: torch.ones(2, 256).double(),
    "sparse": lambda: torch.eye(256).to_sparse(),
    "long": lambda: torch.ones(2048, 256),
}


def encoded(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server(text: TextPipeline) -> Iterator[Serving]:
    options = EngineOptions(model="penstock-concierge", threads=1, enable_prompt_embeds=True)
    client = ThreadClient(lambda: build_engine(options))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


@pytest.fixture(scope="module")
def rows(shared_data: Path, text: TextPipeline) -> torch.Tensor:
    table = load_file(shared_data / "models" / "penstock-concierge" / "model.safetensors")["model.embed_tokens.weight"]
    return table[list(text.tokenizer.encode(PROMPT))]


def post(server: Serving, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def test_rows_are_answered_as_their_tokens_and_before_texts(server: Serving, rows: torch.Tensor) -> None:
    truth = post(server, "/v1/completions", {"prompt": PROMPT, **GREEDY}).json()
    alone = post(server, "/v1/completions", {"prompt_embeds": encoded(rows), **GREEDY}).json()
    assert alone["choices"] == truth["choices"]
    assert alone["usage"]["prompt_tokens"] == truth["usage"]["prompt_tokens"] == len(rows)
    both = {"prompt": ["Good"], "prompt_embeds": [encoded(rows.float()), encoded(rows[None])], "return_token_ids": True}
    told = post(server, "/v1/completions", {**both, **GREEDY}).json()["choices"]
    assert [choice["text"] for choice in told[:2]] == [truth["choices"][0]["text"]] * 2
    assert [choice["prompt_token_ids"] is None for choice in told] == [True, True, False]
    streamed = post(server, "/v1/completions", {"prompt": "", "prompt_embeds": encoded(rows), "stream": True, **GREEDY})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == truth["choices"][0]["text"]


def test_chats_have_rows_where_their_parts_stand(server: Serving, rows: torch.Tensor) -> None:
    """The template writes around them; the text beside them is tokenised for itself."""
    part = {"type": "prompt_embeds", "data": encoded(rows)}

    def chat(*content: Any) -> Any:
        body = {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 8, "temperature": 0}
        return post(server, "/v1/chat/completions", {**body, "logprobs": True, "return_token_ids": True}).json()

    truth, found = chat({"type": "text", "text": PROMPT}), chat(part)
    assert found["choices"][0] == truth["choices"][0]
    assert found["usage"]["prompt_tokens"] == truth["usage"]["prompt_tokens"]
    assert truth["prompt_token_ids"] and found["prompt_token_ids"] is None
    twice = chat(part, {"type": "text", "text": "and"}, part)
    assert twice["usage"]["prompt_tokens"] > found["usage"]["prompt_tokens"] + len(rows)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"suffix": "a"}, "suffix"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"token_healing": True}, "token_healing"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"prompt": ["a"] * 1024}, "prompt"),
        *(({"prompt_embeds": value}, "prompt_embeds") for value in ("", "AAAA", "a\u00e9", [], 5, ["AAAA="])),
        *(({"odd": name}, "prompt_embeds") for name in ODD),
    ],
)
def test_what_cannot_be_rows_or_go_with_them_is_refused(
    server: Serving, rows: torch.Tensor, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt_embeds": encoded(rows), **fields}
    if odd := body.pop("odd", None):
        body["prompt_embeds"] = encoded(ODD[odd]())
    answer = post(server, "/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].partition("[")[0] == param


def test_parts_that_are_no_rows_and_prompts_that_cannot_be_told_are_refused(
    server: Serving, rows: torch.Tensor
) -> None:
    good = {"type": "prompt_embeds", "data": encoded(rows)}
    for part, more, param in (
        ({"type": "prompt_embeds"}, {}, "messages[0].content[0].data"),
        ({"type": "prompt_embeds", "data": "AAAA"}, {}, "messages[0].content[0].data"),
        (good, {"return_prompt_text": True}, "return_prompt_text"),
        (good, {"use_beam_search": True}, "use_beam_search"),
    ):
        answer = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    for path, body in (
        ("/v1/completions/render", {"prompt_embeds": encoded(rows)}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": [good]}]}),
    ):
        assert "cannot be rendered" in post(server, path, body).json()["error"]["message"]


def test_a_server_that_takes_none_says_what_would(module_server: Running, rows: torch.Tensor) -> None:
    parts = [{"type": "prompt_embeds", "data": encoded(rows)}]
    for path, body in (
        ("/v1/completions", {"prompt_embeds": encoded(rows)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}),
    ):
        answer = post(module_server, path, body)
        assert answer.status_code == 400 and "--enable-prompt-embeds" in answer.json()["error"]["message"]
