"""Logits processors over HTTP: named by requests, registered by whoever starts the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.config.options import EngineOptions
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from tests.engine import processors
from tests.server.support import Serving, serving, until

HELLO = [{"role": "user", "content": "Hello"}]
PATHS = ("/v1/completions", "/v1/chat/completions", "/completion", "/api/v1/generate")


@pytest.fixture(scope="module")
def served(text: TextPipeline) -> Iterator[Serving]:
    options = EngineOptions(model="penstock-concierge", threads=1, logits_processors=processors.ALL)
    client = ThreadClient(lambda: build_engine(options))
    with serving(client, text) as server:
        until(lambda: client.state is EngineState.READY)
        yield server


def post(server: Serving, path: str, **fields: Any) -> httpx.Response:
    said: dict[str, Any] = {"messages": HELLO} if "chat" in path else {"prompt": "A table for"}
    if path == "/generate":
        said = {"text": "A table for"}
    return httpx.post(server.url + path, json={**said, **fields})


@pytest.mark.parametrize("path", PATHS)
def test_a_name_and_its_arguments_are_honoured(served: Serving, path: str) -> None:
    most = {"/completion": "n_predict", "/api/v1/generate": "max_length"}.get(path, "max_tokens")
    found = []
    for call in (
        None,
        [{"name": "history", "args": [30]}],
        [{"name": "bias", "args": [{"9": 90}]}],
        [{"qualname": "bias", "args": [{"9": 90}]}],
    ):
        answer = post(served, path, temperature=0, logits_processors=call, **{most: 8})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        told = body.get("choices", body.get("results", [body]))[0]
        found.append(told.get("text") or told.get("content") or told["message"]["content"])
    assert found[2] == found[3] and len(set(found)) == 3


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"logits_processors": ["nobody"]}, 400, "one of bias, history, Odd, failing, wrong"),
        ({"logits_processors": [{"name": "bias", "kwargs": {"x": 1}}]}, 400, "does not take the arguments"),
        ({"logits_processors": [{"name": "bias", "x": 1}]}, 400, "args"),
        ({"logits_processors": ["failing"]}, 500, "raised RuntimeError"),
        ({"logits_processors": ["history"], "use_beam_search": True, "n": 2}, 400, "beam search"),
        ({"custom_logit_processor": "x"}, 400, "Requests bring no code"),
    ],
)
def test_what_is_refused(served: Serving, fields: dict[str, Any], status: int, said: str) -> None:
    answer = post(served, "/v1/completions", max_tokens=4, **fields)
    assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text
    assert "secret" not in answer.text
    assert post(served, "/v1/completions", max_tokens=2).status_code == 200


def test_sglang_names_one_and_sends_no_code(served: Serving) -> None:
    params = {"temperature": 0, "max_new_tokens": 6, "custom_params": {"biases": {"9": 90}}}
    held = post(served, "/generate", sampling_params=params, custom_logit_processor="bias")
    assert held.status_code == 200, held.text
    named = post(
        served,
        "/v1/completions",
        temperature=0,
        max_tokens=6,
        logits_processors=[{"name": "bias", "args": [{"9": 90}]}],
    )
    assert held.json()["text"] == named.json()["choices"][0]["text"]
    for fields, said in (
        ({"custom_logit_processor": '{"callable": "8004"}'}, "--logits-processors"),
        ({"custom_logit_processor": "nobody"}, "one of bias"),
        ({"sampling_params": {"custom_params": {"a": 1}}}, "custom_logit_processor names"),
    ):
        answer = post(served, "/generate", **fields)
        assert answer.status_code == 400 and said in answer.text, answer.text
    many = post(
        served,
        "/generate",
        text=["a", "b"],
        custom_logit_processor=["history", None],
        sampling_params={"max_new_tokens": 2},
    )
    assert len(many.json()) == 2


def test_what_a_render_gives_is_taken(served: Serving) -> None:
    call = [{"name": "bias", "args": [{"9": 90}]}]
    fields = {"temperature": 0, "max_tokens": 4, "logits_processors": call}
    rendered = post(served, "/v1/completions/render", **fields).json()
    rendered = rendered[0] if isinstance(rendered, list) else rendered
    sent = {name: rendered[name] for name in ("token_ids", "sampling_params")}
    answer = httpx.post(served.url + "/inference/v1/generate", json=sent)
    assert answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == [9] * 4, answer.text


def test_a_server_without_any(concierge: Serving) -> None:
    answer = post(concierge, "/v1/completions", logits_processors=["history"])
    assert answer.status_code == 400 and "allowed: none;" in answer.text, answer.text
    assert post(concierge, "/v1/completions", logits_processors=[], max_tokens=2).status_code == 200
