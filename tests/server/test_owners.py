"""Keys are told apart down to the engine: what one has sent, another cannot find out."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.request import EngineRequest
from penstock.engine.api import EngineState
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server.not_here import LISTED, NOT_HERE
from tests.server.support import Serving, running, serving, until
from tests.server.test_access import routes
from tests.weights.adapters.test_peft import write

KEYS = ("one", "two")
CHAT = {"messages": [{"role": "user", "content": "Hello, I need a table."}]}
TEXTS = {"input": ["Hello, I need a table."]}
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")
KSERVE = ("/v2/models/scripted", "/v2/models/scripted/versions/1")
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hello"]}
BODIES: dict[str, dict[str, Any]] = {  # of every route that reaches the engine
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/completions": {"prompt": ["Hello, I need a table.", "Good evening."], "max_tokens": 2},
    "/v1/responses": {"input": "Hello, I need a table.", "max_output_tokens": 16},
    "/v1/messages": {**CHAT, "model": "scripted", "max_tokens": 2},
    "/api/generate": {"model": "scripted", "prompt": "Hello, I need a table."},
    "/api/chat": {"model": "scripted", **CHAT},
    "/api/embed": {"model": "scripted", **TEXTS},
    "/api/embeddings": {"model": "scripted", "prompt": "Hello, I need a table."},
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), TEXTS),
    "/chat/completions": {**CHAT, "max_tokens": 2},
    **{path: {"prompt": "Hello, I need a table.", "n_predict": 2} for path in ("/completion", "/completions")},
    **{path: {"inputs": "Hello, I need a table."} for path in ("/", "/generate", "/generate_stream")},
    "/encode": {"text": "Hello"},
    "/v1/responses/compact": {"input": "Hello"},
    "/invocations": {**CHAT, "max_tokens": 2},
    **{f"/api/{path}/generate": {"prompt": "Hello, I need a table."} for path in ("v1", "latest")},
    "/api/extra/generate/stream": {"prompt": "Hello, I need a table."},
    **{f"{path}/{name}": {"text_input": "Hello"} for path in KSERVE for name in ("generate", "generate_stream")},
    **{f"{path}/infer": {"inputs": [TENSOR]} for path in KSERVE},
    "/embedding": {"content": "Hello"},
    "/v1/internal/logits": {"prompt": "Hello"},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}},
    "/generative_scoring": {"query": "Hello", "items": ["you"], "label_token_ids": [5]},
    "/vertex_generate": {"instances": [{"text": "Hello"}]},
    "/v1/moderations": TEXTS,
    "/v1/cache/match": {"prompt": "Hello"},
    "/v1/cache/pins": {"prompt": "Hello, I need a table for two. " * 4, "ttl": 9},
    "/v1/decisions": {"input": "Hello", "questions": [{"type": "predicate", "instructions": "It is a greeting."}]},
    "/classify": TEXTS,
    "/v1/classify": TEXTS,
    "/pooling": {**TEXTS, "task": "embed"},
    "/v2/embed": {"model": "scripted", "texts": ["Hello"], "input_type": "search_query"},
    **{path: {"query": "A table", "documents": ["Hello"]} for path in RERANK},
    **{path: {"text_1": "A table", "text_2": "Hello"} for path in ("/score", "/v1/score")},
}
TEXT_ONLY = {
    *(f"{prefix}/{name}" for prefix in ("", "/v1") for name in ("tokenize", "detokenize")),
    *(f"/v1/{name}/render" for name in ("chat/completions", "completions", "responses", "messages")),
    *(f"/{name}" for name in ("pause", "resume", "pause_generation", "continue_generation")),
    *(f"/{name}" for name in ("flush_cache", "reset_prefix_cache", "sleep", "wake_up")),
    *(f"/{name}_memory_occupation" for name in ("release", "resume")),
    *(f"/v1/{name}/input_tokens" for name in ("chat/completions", "responses")),
    *(f"/api/{name}" for name in ("show", "pull", "push", "create", "copy", "blobs/{digest}")),
    *("/apply-template", "/chat_tokenize", "/abort_request", "/open_session", "/close_session"),
    *NOT_HERE,
    *(f"{path}/{{id:path}}" for path in LISTED),
    *(f"/api/extra/{name}" for name in ("generate/check", "abort", "tokencount")),
    *(f"/v1/internal/{name}" for name in ("encode", "decode", "token-count", "chat-prompt")),
    *("/v1/messages/count_tokens", "/v1/streams/lookup", "/tools"),
    *("/v1/chat/completions/chatcmpl-1", "/v1/chat/completions/control"),
    "/v1/responses/resp_1/cancel",
    *(f"/v1/conversations{rest}" for rest in ("", "/conv_1", "/conv_1/items")),
    *("/props", "/slots/{id_slot}", "/lora-adapters", "/chat/completions/input_tokens"),
    *(
        f"{prefix}/{name}load_lora_adapter" for prefix in ("", "/v1") for name in ("", "un")
    ),  # asked with adapters below
    "/infill",  # needs tokens that this vocabulary has not; it goes the way of /completion
}
SYSTEM = "You answer the telephone of a restaurant. " * 12
QUESTION = "Could we please have a table for two by the window at seven this evening? " * 6


def post(server: Serving, key: str, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json=body, headers={"x-api-key": key}, timeout=60)
    assert answer.status_code == 200, (path, answer.text)
    return answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[EngineRequest]:
    """All that engines are asked."""
    found: list[EngineRequest] = []
    submit = ThreadClient.submit

    def noted(client: ThreadClient, request: EngineRequest) -> Any:
        found.append(request)
        return submit(client, request)

    monkeypatch.setattr(ThreadClient, "submit", noted)
    return found


def test_every_route_tells_the_engine_whose_request_it_is(text: TextPipeline, asked: list[EngineRequest]) -> None:
    posted = {path for method, path in routes(text) if method == "POST"}
    assert posted == BODIES.keys() | TEXT_ONLY, "a new route: say whether it reaches the engine"
    labelled = replace(text, pooling=replace(text.pooling, labels=("dull", "toxic")))
    options = ServerOptions(api_keys=KEYS)
    with running(text, options) as generates, running(labelled, options) as classifies:
        for path, body in BODIES.items():
            server = classifies if re.search("classify|moderations", path) else generates
            owners = []
            for key in KEYS:
                asked.clear()
                post(server, key, path, body)
                assert asked, path
                owners.append({request.owner for request in asked})
            assert [len(found) for found in owners] == [1, 1] and owners[0] != owners[1], path
            assert "" not in owners[0] | owners[1], path


@pytest.mark.parametrize("more", [{"background": True}, {"previous_response_id": None}, {"stream": True}], ids=str)
def test_responses_of_every_kind_have_an_owner(
    text: TextPipeline, asked: list[EngineRequest], more: dict[str, Any]
) -> None:
    with running(text, ServerOptions(api_keys=KEYS)) as server:
        path, body = "/v1/responses", {"input": "Hello", "max_output_tokens": 16}
        if "previous_response_id" in more:
            more = {"previous_response_id": post(server, "one", path, body).json()["id"]}
        post(server, "one", path, {**body, **more})
        until(lambda: bool(asked) and server.live == 0)
        assert {len(request.owner) for request in asked} == {32}


def test_beams_and_the_best_of_several_have_an_owner(text: TextPipeline, asked: list[EngineRequest]) -> None:
    with running(text, ServerOptions(api_keys=KEYS)) as server:
        for more in ({"use_beam_search": True, "n": 2}, {"best_of": 2, "n": 1}):
            asked.clear()
            post(server, "one", "/v1/completions", {"prompt": "Hello", "max_tokens": 2, "temperature": 1, **more})
            assert {len(request.owner) for request in asked} == {32}


def test_adapters_are_tried_in_the_name_of_who_loads_them(
    text: TextPipeline, asked: list[EngineRequest], tmp_path: Path
) -> None:
    body = {"lora_name": "a", "lora_path": str(write(tmp_path / "a"))}
    with running(text, ServerOptions(api_keys=KEYS)) as server:
        post(server, "one", "/v1/load_lora_adapter", body)
    assert [len(request.owner) for request in asked] == [32]
    assert [use.path for use in asked[0].adapters] == [body["lora_path"]]


def test_an_open_server_tells_nobody_apart(text: TextPipeline, asked: list[EngineRequest]) -> None:
    with running(text) as server:
        post(server, "whatever", "/v1/completions", BODIES["/v1/completions"])
        assert {request.owner for request in asked} == {""}


@contextmanager
def concierge(text: TextPipeline, **options: Any) -> Iterator[tuple[Serving, Engine]]:
    """The bundled model behind two keys."""
    settings = EngineOptions(model="penstock-concierge", threads=1, kv_blocks=400, **options)
    engines: list[Engine] = []

    def build() -> Any:
        engine, info = build_engine(settings)
        engines.append(engine)
        return engine, info

    client = ThreadClient(build)
    with serving(client, text, ServerOptions(api_keys=KEYS)) as server:
        until(lambda: client.state is EngineState.READY)
        yield server, engines[0]


def openai_usage(answer: Any) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


DIALECTS = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}, openai_usage),
    "/v1/completions": ({"prompt": QUESTION, "max_tokens": 2}, openai_usage),
    "/v1/responses": (
        {"input": QUESTION + "And a menu.", "max_output_tokens": 16},
        lambda answer: answer.json()["usage"]["input_tokens_details"]["cached_tokens"],
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "Hello. " + QUESTION}], "model": "scripted", "max_tokens": 2},
        lambda answer: answer.json()["usage"]["cache_read_input_tokens"],
    ),
    "/api/chat": (
        {
            "messages": [{"role": "user", "content": "Hi. " + QUESTION}],
            "model": "scripted",
            "stream": False,
            "options": {"num_predict": 2},
        },
        None,
    ),
    "/api/generate": (
        {
            "prompt": "Good evening. " + QUESTION,
            "model": "scripted",
            "stream": False,
            "raw": True,
            "options": {"num_predict": 2},
        },
        None,
    ),
    "/v1/embeddings": ({"input": "Dear all. " + QUESTION}, openai_usage),
}


def test_no_dialect_tells_a_key_what_another_has_sent(text: TextPipeline) -> None:
    with concierge(text) as (server, engine):
        for path, (body, told) in DIALECTS.items():
            hits = []
            for key in ("one", "one", "two"):
                before = engine.stats().prefix_hits
                answer = post(server, key, path, body)
                hits.append(engine.stats().prefix_hits - before)
                assert told is None or told(answer) == hits[-1], path
            assert hits[0] == hits[2] < hits[1], (path, hits)  # what a key knows of itself


def test_the_first_requests_of_two_keys_see_the_same(text: TextPipeline) -> None:
    body = DIALECTS["/v1/completions"][0]
    with concierge(text) as (server, _):
        assert [openai_usage(post(server, key, "/v1/completions", body)) for key in KEYS] == [0, 0]


def test_an_operator_may_share_the_cache(text: TextPipeline) -> None:
    body = DIALECTS["/v1/completions"][0]
    with concierge(text, share_prefix_cache=True) as (server, _):
        cached = [openai_usage(post(server, key, "/v1/completions", body)) for key in KEYS]
        assert cached[0] == 0 and cached[1] > 32


def test_shared_prompts_are_everybodys_and_what_follows_is_not(text: TextPipeline) -> None:
    def chat(server: Serving, key: str, said: str) -> int:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
        return openai_usage(post(server, key, "/v1/chat/completions", {"messages": messages, "max_tokens": 4}))

    with concierge(text, shared_prompts=(SYSTEM,)) as (server, engine):
        first = chat(server, "one", QUESTION)
        assert first > len(text.tokenizer.encode(SYSTEM)) - 16
        assert chat(server, "one", QUESTION) > first + 32
        assert chat(server, "two", QUESTION) == first
        assert chat(server, "two", QUESTION) > first + 32
        plain = {"prompt": SYSTEM + QUESTION, "max_tokens": 2}
        assert openai_usage(post(server, "two", "/v1/completions", plain)) > len(text.tokenizer.encode(SYSTEM)) - 16
        engine.scheduler.check_integrity()
        assert engine.stats().failed == 0


def test_a_shared_prompt_changes_no_answer(text: TextPipeline) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 24, "seed": 5, "temperature": 1, "logprobs": True, "top_logprobs": 3}
    answers = []
    for shared in ((), (SYSTEM,)):
        with concierge(text, shared_prompts=shared) as (server, _):
            answers.append([post(server, key, "/v1/chat/completions", body).json()["choices"] for key in KEYS])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("shared", "options", "message"),
    [
        ("Hi", {}, "shared prompt 1 fills no block of 64 tokens"),
        (SYSTEM * 40, {}, "shared prompt 1 cannot be kept: .*context holds 256"),
        ("", {}, "allowed: texts that are not empty"),
        (SYSTEM, {"enable_prefix_caching": False}, "shared prompts need the prefix cache"),
    ],
)
def test_what_cannot_be_shared_is_refused(shared: str, options: dict[str, Any], message: str) -> None:
    from penstock.config.errors import ConfigError

    settings = EngineOptions(
        model="penstock-concierge", threads=1, block_size=64, kv_blocks=40, max_model_len=256, shared_prompts=(shared,)
    )
    with pytest.raises(ConfigError, match=message):
        functools.partial(build_engine, replace(settings, **options))()
