"""Functions before and after a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.hooks import load_hook
from tests.server.support import ANSWER, Running, running

HELLO = [{"role": "user", "content": "Hello!"}]
HERE = "tests.server.test_hooks"


def before(body: dict[str, Any]) -> dict[str, Any]:
    if body.get("user") == "nobody":
        raise ValueError("nobody may not ask.")
    if body.get("user") == "broken":
        raise KeyError("secret")
    return {**body, "max_tokens": 3, "model": "scripted"}


def after(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["usage"]["completion_tokens"] != 3:
        return None  # type: ignore[return-value]
    return {**answer, "seen": "é"}


@pytest.fixture(scope="module")
def hooked(text: TextPipeline) -> Iterator[Running]:
    with running(text, ServerOptions(pre=f"{HERE}:before", post=f"{HERE}:after")) as server:
        yield server


def ask(server: Running, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": HELLO, **body}, timeout=60)


def test_a_request_is_changed_before_and_its_answer_after(hooked: Running) -> None:
    answer = ask(hooked, model="another", max_tokens=50)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["seen"] == "é"
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_streams_are_told_as_they_come(hooked: Running) -> None:
    lines = ask(hooked, stream=True).text.split("\n\n")
    assert lines[-2] == "data: [DONE]"
    assert "seen" not in "".join(lines)
    assert ANSWER.startswith("Hello")


@pytest.mark.parametrize(
    ("user", "status", "code", "told"),
    [("nobody", 400, "refused_by_hook", "nobody may not ask."), ("broken", 500, "hook_failed", "its log says why")],
)
def test_what_a_hook_raises(hooked: Running, user: str, status: int, code: str, told: str) -> None:
    refused = ask(hooked, user=user)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert told in refused.json()["error"]["message"]
    assert "secret" not in refused.text


def test_a_hook_that_gives_nothing_has_failed(text: TextPipeline) -> None:
    with running(text, ServerOptions(post=f"{HERE}:after")) as server:
        assert ask(server, max_tokens=2).json()["error"]["code"] == "hook_failed"
        assert ask(server, max_tokens=3).status_code == 200
        assert ask(server, max_tokens=-3).status_code == 400  # errors are told as they are


def test_bodies_that_are_no_objects_are_refused_as_ever(hooked: Running) -> None:
    for content in (b"[1]", b"{", b"", b'{"a": 1, "a": 2}'):
        refused = httpx.post(
            f"{hooked.url}/v1/chat/completions", content=content, headers={"content-type": "application/json"}
        )
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("json", "allowed: module:function"), (":f", "allowed: module:function"), ("no.such:f", "No module named"),
        ("json:nothing", "has no attribute"), ("json:__name__", "is no function"),
    ],
)  # fmt: skip
def test_a_hook_that_is_not_there(named: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_hook(named, "--pre")
