"""Requests drawn from our own OpenAPI document: never a 5xx, never a status the document does not name."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from penstock.engine.text_pipeline import TextPipeline
from tests.server.support import Running, running

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance)
OPERATIONS = [
    ("POST", "/v1/chat/completions", 25),
    ("POST", "/v1/completions", 25),
    ("POST", "/tokenize", 15),
    ("POST", "/v1/tokenize", 10),
    ("POST", "/detokenize", 15),
    ("POST", "/v1/detokenize", 10),
    ("GET", "/v1/models/{model}", 25),
    *(("POST", f"/v1/{path}", 10) for path in ("chat/completions/render", "completions/render")),
    *(("POST", path, 5) for path in ("/apply-template", "/v1/chat/completions/input_tokens")),
    ("POST", "/v1/responses", 25),
    ("POST", "/v1/responses/input_tokens", 15),
    ("POST", "/v1/responses/{response_id}/cancel", 10),
    *(("GET", f"/v1/responses/{{response_id}}{rest}", 10) for rest in ("", "/input_items")),
    ("DELETE", "/v1/responses/{response_id}", 5),
    ("POST", "/v1/messages", 25),
    ("POST", "/v1/messages/count_tokens", 15),
    *(("POST", f"/api/{name}", 25) for name in ("generate", "chat")),
    *(("POST", f"/api/{name}", 10) for name in ("embed", "embeddings", "show")),
    *(("GET", path, 2) for path in ("/", "/api/tags", "/api/ps", "/api/version")),
    *(("HEAD", path, 2) for path in ("/", "/api/tags", "/api/version")),
    *(("POST", path, 15) for path in ("/v1/embeddings", "/pooling", "/classify", "/rerank", "/score")),
    *(("POST", path, 5) for path in ("/v1/classify", "/v1/rerank", "/v2/rerank", "/v2/embed", "/v1/score")),
    *(("GET", path, 2) for path in ("/v1/models", "/version", "/metrics", "/docs", "/openapi.json")),
    *(("GET", path, 2) for path in ("/livez", "/readyz", "/health")),
]


# These answer 501 to everybody.
NOT_YET = {
    *(("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy", "blobs/{digest}")),
    *{("DELETE", "/api/delete"), ("HEAD", "/api/blobs/{digest}")},
}

# Without these, which well-formed requests rarely have right, more requests reach the engine.
OFTEN_REFUSED = frozenset({
    *("model", "max_tokens", "max_completion_tokens", "min_tokens", "best_of", "suffix", "tools", "tool_choice"),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("modalities", "audio", "functions", "function_call", "web_search_options", "use_beam_search", "length_penalty"),
    *("stream_options", "logit_bias", "allowed_token_ids", "stop_token_ids", "top_logprobs", "chat_template_kwargs"),
    *("continue_final_message", "prompt_logprobs", "previous_response_id", "conversation", "prompt", "text", "include"),
})  # fmt: skip


# What is put back, or in, so that requests of the dialects that name a model get on to the engine.
NEEDED: dict[str, dict[str, object]] = {
    "/v1/messages": {"model": "scripted", "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "scripted"},
    "/api/generate": {"model": "scripted", "prompt": "Hello"},
    **{f"/api/{name}": {"model": "scripted"} for name in ("chat", "embed", "embeddings", "show")},
}


@pytest.fixture(scope="module")
def fuzzed(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


def test_every_operation_is_in_the_list(fuzzed: Running) -> None:
    document = httpx.get(f"{fuzzed.url}/openapi.json").json()
    there = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert there == {(method, path) for method, path, _ in OPERATIONS} | NOT_YET


@pytest.mark.parametrize(
    ("method", "path", "examples", "mode"),
    [
        (*operation, mode)
        for operation in OPERATIONS
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE
        or (operation[0] == "POST" and "cancel" not in operation[1])  # the others take nothing that could be wrong
    ],
    ids=str,
)
def test_requests_of_the_document(fuzzed: Running, method: str, path: str, examples: int, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operation = schema[path][method]
    seen: set[int] = set()
    count = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def run(case: schemathesis.Case) -> None:
        nonlocal count
        count += 1
        if isinstance(case.body, dict) and count % 2:
            case.body = {name: value for name, value in case.body.items() if name not in OFTEN_REFUSED}
            case.body |= NEEDED.get(path, {})
        response = case.call(timeout=20)
        seen.add(response.status_code)
        case.validate_response(response, checks=list(CHECKS))

    run()
    assert seen
    assert not any(status >= 500 for status in seen)


def test_the_engine_served_some_of_them(fuzzed: Running) -> None:
    assert len(fuzzed.runner.seen) > 10
    fuzzed.until_idle()
    assert httpx.post(f"{fuzzed.url}/v1/completions", json={"prompt": "Hello"}).status_code == 200
