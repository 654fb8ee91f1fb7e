"""Reasoning that a second call ends while the first one is answered, through a real server and the bundled model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.protocol import Runner, StepResult
from penstock.engine.api import EngineInfo, EngineState
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.text.parsers.format import choose
from penstock.text.parsers.reading import visible_ids
from tests.engine.support import Wrapped
from tests.server.support import Serving, serving, until

KEYS = ("first", "second")
OPENED = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "<think>What city do"}]
CHAT: dict[str, Any] = {"messages": OPENED, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT |= {"add_generation_prompt": False, "continue_final_message": True, "return_token_ids": True}
BEFORE = 6  # tokens that are drawn before the reasoning is ended


class Gate(Wrapped):
    """A runner that stops behind some of its draws, until it may go on."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.free = 10**9
        self.shut, self.opened = threading.Event(), threading.Event()

    def stop_behind(self, draws: int) -> None:
        self.shut.clear()
        self.opened.clear()
        self.free = draws

    def sample(self, step: int) -> StepResult:
        result = super().sample(step)
        self.free -= sum(len(row.tokens) for row in result.results)
        if self.free == 0:
            self.shut.set()
            assert self.opened.wait(60)
        return result


@dataclass
class Gated:
    """A server whose model reasons, and the gate in its engine."""

    server: Serving
    gate: Gate

    def post(self, path: str, body: dict[str, Any], key: str = KEYS[0]) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, headers={"x-api-key": key}, timeout=60)

    def control(self, key: str = KEYS[0], **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions/control", {"id": "chatcmpl-held", "action": "reasoning_end"} | body, key)


@pytest.fixture(scope="module")
def gated(text: TextPipeline) -> Iterator[Gated]:
    gates: list[Gate] = []

    def build() -> tuple[Engine, EngineInfo]:
        engine, info = build_engine(EngineOptions(model="penstock-concierge", threads=1))
        gates.append(Gate(engine.runner))
        engine.runner = gates[0]
        return engine, info

    answers = choose("", "hermes", "qwen3")
    client = ThreadClient(build)
    reasoner = replace(text, answers=answers, mark_ids=visible_ids(answers, text.tokenizer))
    with serving(client, reasoner, ServerOptions(api_keys=KEYS)) as server:
        until(lambda: client.state is EngineState.READY, 60)
        yield Gated(server, gates[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_reasoning_ended_from_outside_is_that_of_a_budget(gated: Gated, stream: bool, n: int) -> None:
    asked = {**CHAT, "n": n, "request_id": "held"}
    free = gated.post("/v1/chat/completions", asked).json()["choices"]
    told = gated.post("/v1/chat/completions", {**asked, "thinking_token_budget": BEFORE + 1}).json()["choices"]
    for choice, held in zip(free, told, strict=True):
        assert choice["token_ids"][: BEFORE + 1] == held["token_ids"][: BEFORE + 1]
        assert choice["token_ids"] != held["token_ids"]
    gated.gate.stop_behind(BEFORE * n)
    answers: list[httpx.Response] = []
    body = {**asked, "reasoning_control": True, "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(gated.post("/v1/chat/completions", body)))
    thread.start()
    try:
        assert gated.gate.shut.wait(60)
        assert gated.control(key=KEYS[1]).status_code == 404  # of another client it is unknown
        assert gated.control().json() == {"id": "chatcmpl-held", "action": "reasoning_end", "success": True}
    finally:
        gated.gate.opened.set()
        thread.join()
    assert answers[0].status_code == 200
    if not stream:
        assert answers[0].json()["choices"] == told
    assert gated.control().status_code == 404  # it is over


def test_what_cannot_be_controlled(gated: Gated) -> None:
    refused = gated.control(id="chatcmpl-nobody")
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found_error"
    assert "reasoning_control: true" in refused.json()["error"]["message"]
    assert gated.control(action="reasoning_begin").status_code == 400
    assert gated.control(id=5).status_code == 400
    searched = {**CHAT, "use_beam_search": True, "reasoning_control": True}
    assert "use_beam_search" in gated.post("/v1/chat/completions", searched).json()["error"]["message"]
    text = {"prompt": "Hello", "reasoning_control": True}
    assert "chats alone" in gated.post("/v1/completions", text).json()["error"]["message"]


def test_a_chat_without_control_is_not_found_while_it_runs(gated: Gated) -> None:
    gated.gate.stop_behind(3)
    answers: list[httpx.Response] = []
    body = {**CHAT, "request_id": "held"}
    thread = threading.Thread(target=lambda: answers.append(gated.post("/v1/chat/completions", body)))
    thread.start()
    try:
        assert gated.gate.shut.wait(60)
        assert gated.control().status_code == 404
    finally:
        gated.gate.opened.set()
        thread.join()
    assert answers[0].status_code == 200
