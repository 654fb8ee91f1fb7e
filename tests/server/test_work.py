"""What a body may cost: work that grows no faster than its size, little of it on the event loop."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
import pytest

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.api import Delta
from penstock.server import active_call, encoding
from penstock.server import body as bodies
from penstock.server.body import validate
from penstock.server.clock import Clock
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.responses.schema import ResponsesBody
from penstock.server.metrics import Metrics
from penstock.server.prompts import check_shared, prompts_of
from penstock.server.strict_json import parse_json
from penstock.text.length import characters
from penstock.text.tokenizer import Tokenizer
from tests.server.support import Running

SIZE = 12_000  # of the smaller, which is decoded in pieces as the larger is


def members(count: int, value: str = "1") -> bytes:
    return ",".join(f'"k{number}":{value}' for number in range(count)).encode()


HOSTILE: dict[str, Callable[[int], bytes]] = {
    "members": lambda n: b"{%b}" % members(n),
    "a member twice": lambda n: b'{%b,"k%d":1}' % (members(n), n - 1),
    "members in a list": lambda n: b'{"a":[%b]}' % b",".join([b'{"a":1}'] * n),
    "lists": lambda n: b'{"a":[%b]}' % b",".join([b"[      ]"] * n),
    "numbers": lambda n: b'{"prompt":[%b]}' % b",".join([b"1"] * 5 * n),
    "strokes": lambda n: b'{"prompt":"%b"}' % (rb"\\" * 50 * n),
    "escaped quotes": lambda n: b'{"prompt":"%b"}' % (rb"\"" * 50 * n),
    "strings": lambda n: b'{"a":[%b]}' % b",".join([b'"abcdef"'] * n),
    "spaces": lambda n: b'{"prompt":%b1}' % (b" " * 100 * n),
    "unknown members": lambda n: b'{"prompt":"x",%b}' % members(n),
    "unknown members within": lambda n: b'{"prompt":"x","stream_options":{%b}}' % members(n),
    "biases": lambda n: b'{"prompt":"x","logit_bias":{%b}}' % members(n),
    "choices": lambda n: b'{"prompt":"x","guided_choice":[%b]}' % b",".join([b"1234567"] * n),
    "prompts": lambda n: b'{"prompt":[%b]}' % b",".join([b"[123456]"] * n),
    "a long name": lambda n: b'{"prompt":"x","%b":1}' % (b"response_format" * n),
}


def spent(raw: bytes) -> float:
    """Seconds of this thread to read a body, the least of some; without the collection of what others left behind."""
    least = math.inf
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            started = time.thread_time()
            with suppress(RequestError):
                body = validate(CompletionBody, parse_json(raw))
                prompts_of(body.prompt, "prompt")
            least = min(least, time.thread_time() - started)
    finally:
        gc.enable()
    return least


@pytest.mark.parametrize("shape", HOSTILE)
def test_reading_a_body_is_linear(shape: str) -> None:
    make = HOSTILE[shape]
    exponents = []
    for _ in range(3):
        small, large = spent(make(SIZE)), spent(make(8 * SIZE))
        exponents.append(math.log(large / small, 8))
        if exponents[-1] < 1.7:  # a busy machine shows more than 1 for what is linear; quadratic is 2
            return
    pytest.fail(f"seconds grow with a power of {exponents} of the size")


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (CompletionBody, {"prompt": "x"} | {f"k{i}": 1 for i in range(50_000)}),
        (CompletionBody, {"prompt": "x", "stream_options": {f"k{i}": 1 for i in range(50_000)}}),
        (CompletionBody, {"prompt": "x", "logit_bias": {f"k{i}": 1 for i in range(50_000)}}),
        (CompletionBody, {"prompt": "x", "guided_choice": [1] * 50_000}),
        (CompletionBody, {"prompt": "x", "allowed_token_ids": ["a"] * 50_000}),
        (CompletionBody, {"prompt": "x", "stop": [1] * 50_000}),
        (ChatBody, {"messages": [1] * 50_000}),
        (ChatBody, {"messages": [{}], "documents": [1] * 50_000}),
        (ResponsesBody, {"input": "x", "metadata": {f"k{i}": 1 for i in range(50_000)}}),
        (ResponsesBody, {"input": "x", "include": [1] * 50_000}),
    ],
)
def test_few_faults_of_a_body_are_looked_for(
    model: type[CompletionBody], data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling of each of them takes a hundred times as long as finding that there is one."""
    found: list[int] = []
    told = bodies.refusal  # type: ignore[attr-defined]

    def counted(error: Any, *rest: Any) -> RequestError:
        found.append(error.error_count())
        return told(error, *rest)

    monkeypatch.setattr(bodies, "refusal", counted)
    with pytest.raises(RequestError):
        validate(model, data)
    assert found[0] <= len(model.model_fields) + 1


@pytest.fixture
def blocked(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How large the bodies are that were read in the event loop's own thread."""
    sizes: list[int] = []
    loop_thread = server.wait(_thread())

    def counted(raw: bytes) -> dict[str, Any]:
        if threading.get_ident() == loop_thread:
            sizes.append(len(raw))
        return parse_json(raw)

    monkeypatch.setattr(bodies, "parse_json", counted)
    return sizes


async def _thread() -> int:
    return threading.get_ident()


def test_large_bodies_are_read_beside_the_event_loop(server: Running, blocked: list[int]) -> None:
    for size in (10, 1000, 20_000, 500_000):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * size, "max_tokens": 1})
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * size}]})
        httpx.post(f"{server.url}/tokenize", json={"prompt": "x" * size})
    assert blocked
    assert max(blocked) < 16_384


def request(**fields: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=2, **fields.pop("sampling", {}))
    return GenerationRequest(request_id="r", sampling=sampling, **fields)


@pytest.fixture
def tokenised(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Texts that were tokenised: their lengths, and whether in the event loop's own thread."""
    seen: list[tuple[int, bool]] = []
    loop_thread, encode = server.wait(_thread()), Tokenizer.encode

    def counted(self: Any, text: str, **options: Any) -> list[int]:
        seen.append((len(text), threading.get_ident() == loop_thread))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return seen


def test_bad_words_are_tokenised_no_further_than_they_count(server: Running, tokenised: list[tuple[int, bool]]) -> None:
    words = [f"{number}" + "!?" * 500 for number in range(128)]
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1, "bad_words": words})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")
    long = [entry for entry in tokenised if entry[0] > 100]
    assert sum(length for length, _ in long) <= 4 * limits.MAX_BAD_WORD_TOKENS
    assert not any(in_loop for _, in_loop in long)


def test_a_text_that_no_context_holds_is_not_tokenised(server: Running, tokenised: list[tuple[int, bool]]) -> None:
    text = "word " * 200_000
    chat = {"messages": [{"role": "user", "content": text}]}
    described = {"type": "function", "function": {"name": "f", "description": text}}
    tools = {"messages": [{"role": "user", "content": "Hello"}], "tools": [described]}
    many = {"messages": [{"role": "user", "content": ""}] * 3000}
    for path, body, param in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/v1/chat/completions", chat, "messages"),
        ("/v1/chat/completions", tools, "tools"),
        ("/v1/chat/completions", many, "messages"),
        ("/v1/messages", {**chat, "model": "scripted", "max_tokens": 3}, "messages"),
    ):
        answer = httpx.post(f"{server.url}{path}", json=body)
        assert answer.status_code == 400, (path, answer.text)
        if path != "/v1/messages":
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert not [length for length, _ in tokenised if length > 1000]


def test_what_many_prompts_share_is_counted_for_each() -> None:
    words = {"sampling": {"bad_words": ("a" * 1000,) * 100}}
    check_shared([request(prompt="x", **words)] * 10)
    with pytest.raises(ParameterError, match=r"bad_words.*send fewer"):
        check_shared([request(prompt="x", **words)] * 11)
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        check_shared([request(prompt="x", sampling={"allowed_token_ids": tuple(range(2000))})] * 1024)


def test_more_token_ids_than_there_are_tokens(server: Running) -> None:
    ids = [1] * 200_000
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "allowed_token_ids": ids})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


def test_characters_of_all_strings() -> None:
    assert characters({"ab": ["c", {"d": "ef"}, 3, None], "g": ("hi",)}) == 9


def test_large_answers_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = msgspec.json.encode

    def counted(value: object) -> bytes:
        sizes.append(len(encode(value)))
        return encode(value)

    entry = {"token": "x", "logprob": -0.5, "top_logprobs": [{"token": "y", "logprob": -1.5}] * 20}
    body = {
        "choices": [{"index": i, "logprobs": {"content": [entry] * 200}, "text": "é\ud800" * 3} for i in range(16)],
        "data": [[0.25] * 4096] * 40,
        "ids": {1: "a", 2: None},
        "nothing": [[], {}],
    }
    monkeypatch.setattr(encoding.msgspec.json, "encode", counted)  # type: ignore[attr-defined]
    answer = asyncio.run(encoding.json_answer(body))
    expected = json.loads(json.dumps(body).replace("\\ud800", "?"))
    assert json.loads(bytes(answer.body)) == expected
    assert sum(sizes) > 1_000_000
    assert max(sizes) < 100_000


@pytest.mark.parametrize("prompts", [64, 128])
async def test_the_times_of_many_prompts_are_told_in_linear_work(prompts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their tokens may bring its sequence's times (timings_per_token)."""
    looks: list[str] = []

    class Counted(Clock):
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            looks.append(name)
            return super().__getattribute__(name)

    class Generation:
        prompt_ids, cached_tokens, queue_seconds = (1, 2, 3), 1, 0.0
        missed = ""
        drafts: Mapping[int, tuple[int, int]] = MappingProxyType({})

        async def aclose(self) -> None:
            pass

    monkeypatch.setattr(active_call, "Clock", Counted)
    requests = [request(prompt="x")] * prompts
    metrics = Metrics().model("m")
    call = active_call.ActiveCall(requests, [Generation()] * prompts, metrics, time.monotonic())  # type: ignore[list-item]
    for index in range(prompts):
        call._observe(index, Delta(0, text="a", token_ids=(7,)), cancelled=False)
        told = call.timings(index)
        assert (told["prompt_n"], told["cache_n"], told["predicted_n"]) == (2, 1, 1)
        assert call.prompt_progress(index)["total"] == 3
    assert call.timings()["predicted_n"] == prompts
    await call.aclose()
    assert prompts <= len(looks) <= 40 * prompts


def test_queries_have_few_fields(server: Running) -> None:
    path = f"{server.url}/v1/responses/resp_x/input_items"
    answer = httpx.get(f"{path}?{'&'.join(f'a{i}[]=1' for i in range(5000))}")
    assert (answer.status_code, answer.json()["error"]["code"]) in ((400, "invalid_query"), (404, "response_not_found"))
