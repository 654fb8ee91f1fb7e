"""Requests drawn from our own OpenAPI document: it says exactly what is taken, refused and answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    status_code_conformance,
)

from penstock.engine.text_pipeline import TextPipeline
from penstock.server.not_here import LISTED, NOT_HERE
from penstock.server.paths import FORMS
from tests.server.support import Running, running, until

CHECKS = (status_code_conformance, content_type_conformance, negative_data_rejection)
KSERVE = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
OPERATIONS = [
    ("POST", "/v1/chat/completions", 10),
    ("GET", "/v1/chat/completions", 10),
    *((method, "/v1/chat/completions/{completion_id}", 5) for method in ("GET", "POST", "DELETE")),
    ("GET", "/v1/chat/completions/{completion_id}/messages", 5),
    ("POST", "/v1/completions", 10),
    ("POST", "/tokenize", 8),
    ("POST", "/v1/tokenize", 10),
    ("POST", "/detokenize", 8),
    ("POST", "/v1/detokenize", 10),
    ("GET", "/v1/models/{model}", 10),
    *(("POST", f"/{path}", 10) for path in ("completion", "completions", "chat/completions")),
    ("POST", "/v1/chat/completions/control", 5),
    *(("GET", "/v1/stream", 5), ("DELETE", "/v1/stream", 5), ("POST", "/v1/streams/lookup", 5)),
    *(("POST", f"/{path}", 5) for path in ("embedding", "embeddings", "chat/completions/input_tokens")),
    *(("POST", path, 5) for path in ("/reranking", "/v1/reranking", "/lora-adapters")),
    *(("GET", f"/{path}", 2) for path in ("props", "slots", "lora-adapters", "models", "v1/health")),
    *(("POST", f"/v1/{path}", 10) for path in ("chat/completions/render", "completions/render")),
    *(("POST", path, 5) for path in ("/apply-template", "/v1/chat/completions/input_tokens")),
    *(("POST", path, 5) for path in ("/", "/generate", "/generate_stream", "/chat_tokenize")),
    *(("POST", path, 5) for path in ("/encode", "/abort_request", "/open_session", "/close_session")),
    *(("GET", f"/{path}", 2) for path in ("info", "get_model_info", "model_info", "get_server_info", "server_info")),
    *(("GET", "/health_generate", 2), ("GET", "/ping", 2), ("POST", "/invocations", 5)),
    *(("POST", f"/api/{path}", 5) for path in ("v1/generate", "latest/generate", "extra/generate/stream")),
    *(("POST", f"/api/extra/{path}", 5) for path in ("generate/check", "abort", "tokencount")),
    *(("GET", f"/api/extra/{path}", 2) for path in ("generate/check", "version", "perf", "true_max_context_length")),
    *(("GET", f"/api/v1/{path}", 2) for path in ("model", "info/version", "config/max_length")),
    *(("GET", f"/api/{path}", 2) for path in ("latest/model", "v1/config/max_context_length")),
    *(("GET", f"/v2{path}", 2) for path in ("", "/health/live", "/health/ready")),
    *(("GET", f"{path}{rest}", 2) for path in KSERVE for rest in ("", "/ready")),
    *(("POST", f"{path}/{rest}", 5) for path in KSERVE for rest in ("infer", "generate", "generate_stream")),
    *(("POST", f"{path}/{name}load_lora_adapter", 5) for path in ("", "/v1") for name in ("", "un")),
    ("POST", "/v1/responses", 10),
    ("POST", "/v1/responses/input_tokens", 8),
    ("POST", "/v1/responses/compact", 8),
    ("POST", "/v1/responses/{response_id}/cancel", 10),
    *(("GET", f"/v1/responses/{{response_id}}{rest}", 10) for rest in ("", "/input_items")),
    ("DELETE", "/v1/responses/{response_id}", 5),
    ("POST", "/inference/v1/generate", 8),
    *(("POST", f"/v1/internal/{name}", 5) for name in ("encode", "decode", "token-count", "logits", "chat-prompt")),
    *(("GET", f"/v1/internal/{name}", 2) for name in ("health", "model/info", "model/list", "lora/list")),
    ("POST", "/generative_scoring", 8),
    ("POST", "/v1/decisions", 8),
    ("POST", "/v1/responses/render", 10),
    ("POST", "/v1/messages/render", 10),
    ("POST", "/vertex_generate", 8),
    *(("GET", f"/{path}", 2) for path in ("load", "is_paused", "is_sleeping", "tokenizer_info", "flush_cache")),
    *(("POST", f"/{path}", 2) for path in ("resume", "flush_cache", "reset_prefix_cache", "continue_generation")),
    ("POST", "/v1/conversations", 8),
    *((method, "/v1/conversations/{conversation_id}", 5) for method in ("GET", "POST", "DELETE")),
    *((method, "/v1/conversations/{conversation_id}/items", 5) for method in ("GET", "POST")),
    *((method, "/v1/conversations/{conversation_id}/items/{item_id}", 2) for method in ("GET", "DELETE")),
    ("POST", "/v1/messages", 10),
    ("POST", "/v1/messages/count_tokens", 8),
    *(("POST", f"/api/{name}", 10) for name in ("generate", "chat")),
    *(("POST", f"/api/{name}", 10) for name in ("embed", "embeddings", "show")),
    *(("GET", path, 2) for path in ("/", "/api/tags", "/api/ps", "/api/version")),
    *(("HEAD", path, 2) for path in ("/", "/api/tags", "/api/version")),
    *(("POST", path, 8) for path in ("/v1/embeddings", "/pooling", "/classify", "/rerank", "/score")),
    *(("POST", path, 5) for path in ("/v1/classify", "/v1/rerank", "/v2/rerank", "/v2/embed", "/v1/score")),
    *(("GET", path, 2) for path in ("/v1/models", "/version", "/metrics", "/requests", "/docs", "/openapi.json")),
    *(("POST", "/v1/cache/match", 10), ("POST", "/v1/cache/pins", 8)),
    *(("GET", "/v1/cache/pins", 2), ("DELETE", "/v1/cache/pins/{pin_id}", 2)),
    *(("GET", path, 2) for path in ("/v1/cache", "/livez", "/readyz", "/health", "/web/{name}")),
]


SLEEPS = ("/sleep", "/wake_up", "/release_memory_occupation", "/resume_memory_occupation")
# These answer 501 to everybody.
NOT_YET = [
    *(("POST", f"/api/{name}", 2) for name in ("pull", "push", "create", "copy", "blobs/{digest}")),
    *(("DELETE", "/api/delete", 2), ("HEAD", "/api/blobs/{digest}", 2)),
    *(("POST", path, 1) for path in NOT_HERE),
    *(("POST", path, 1) for path in SLEEPS),  # of an engine in a thread
    *(("GET", path, 1) for path in LISTED),
    *((method, path + "/{id}", 1) for path in LISTED for method in ("GET", "POST", "DELETE")),
    *(("GET", "/tools", 1), ("POST", "/tools", 2), ("POST", "/v1/moderations", 2)),  # of a model that is no guard
    *(("POST", "/infill", 5), ("POST", "/props", 2), ("POST", "/slots/{id_slot}", 2)),
]

_TAKES_LITTLE = re.compile("cancel|infer|resume|cache")
# Nobody would be answered after them.
PAUSES = [("POST", path, 0) for path in ("/pause", "/pause_generation")]

# Beyond its schema a body is refused for these reasons alone: fields that go together or contradict each other,
BEYOND = re.compile(
    "|".join([
        *("only together with", "only with", r"only without", "at least n ", "at most max_tokens"),
        *("only for embeddings", "as many as the other list has", "allowed: instruction, a string"),
        *("this model's context", "max_pattern_size", "Send exactly one of", "The body has", "are taken"),
        "sampling_params",
        *("dry_sequence_breakers", "with commas between them", "processors are registered by"),
        "in a stream, whose events",
        *("among the tools", "one of tools", "without tools", "both say what form", "leave one of them out"),
        *("which is fetched later", "--max-logprobs"),
        *("values that are all different", "each is one token here", "ask fewer at once"),
        *(r"with stream: true", "is required with", "use_beam_search", "with beam search"),
        *("the server sets itself", "which is reserved"),
        *("leave no room for the prompt", "leave the other out"),
        *("as many as there are prompts", "differ from each other", "the same for all prompts"),
        *("and both of them", "which say the same", "post_sampling_probs is true"),
        r"content\[\d+\] .*allowed: token ids",
        r"logit_bias .*allowed: token ids",  # which are names there, and a pattern of names has no greatest
        # what is too long for the context,
        *("context is", "tokens are taken", "n times the number of prompts"),
        # grammars, schemas and patterns that cannot be followed,
        *("JSON schema", "regular expression", "grammar", "pattern", "takes no", "schema", "structural tag"),
        # what the model was not trained for,
        "suffix cannot be followed",
        # what the template of the model refuses, and what it cannot do,
        *("A system message must come first", "cannot classify", "roles must", "this model's: ", "no prompts"),
        "no text to continue",
        # what fills no block of the cache, or has no room there,
        *("there is nothing to pin", "You have a pin", "that a key may pin", "pins have", "would not fit"),
        # what only an archive of torch can be,
        *("torch.save of a tensor", "only possible without prompt_embeds"),
        # adapters that are not there or count too much,
        *("no adapter", "the id of an adapter", "that count", "adapters of a request", "nothing beside lora"),
        # and items that refer to what is not kept.
        *("Previous response", "the id of ", "call_id of a function_call", "There is no session", "The session "),
    ])
)  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed(text: TextPipeline) -> Iterator[Running]:
    with running(text) as server:
        yield server


def test_every_operation_is_in_the_list(fuzzed: Running) -> None:
    document = httpx.get(f"{fuzzed.url}/openapi.json").json()
    there = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    assert there == {(method, path) for method, path, _ in OPERATIONS + NOT_YET + PAUSES}


def test_every_part_of_a_path_is_told(fuzzed: Running) -> None:
    for path, item in httpx.get(f"{fuzzed.url}/openapi.json").json()["paths"].items():
        for method, operation in item.items():
            told = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert told == set(re.findall(r"\{(\w+)\}", path)), (method, path)


def refused_beyond_the_schema(response: schemathesis.Response) -> bool:
    """Whether a request that fits the document was refused for a reason that no schema can say."""
    if response.status_code == 404:  # of a response or a model
        return True
    body = response.json()
    told = body["error"] if "error" in body else body["detail"]["msg"]
    return BEYOND.search(told if isinstance(told, str) else told["message"]) is not None


@pytest.mark.parametrize(
    ("method", "path", "examples", "mode"),
    [
        (*operation, mode)
        for operation in OPERATIONS + NOT_YET
        for mode in GenerationMode
        if mode is GenerationMode.POSITIVE
        or (operation[0] == "POST" and not _TAKES_LITTLE.search(operation[1]) and operation not in NOT_YET)
    ],  # the others take nothing that could be wrong, or tensors, of which the document tells the simplest
    ids=str,
)
def test_requests_of_the_document(fuzzed: Running, method: str, path: str, examples: int, mode: GenerationMode) -> None:
    """What fits the document is taken, what does not is refused, and every answer is one the document names."""
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    operation = schema[path][method]
    seen: Counter[int] = Counter()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    def run(case: schemathesis.Case[Any]) -> None:
        response = case.call(timeout=60)
        seen[response.status_code] += 1
        case.validate_response(response, checks=list(CHECKS))
        if mode is GenerationMode.POSITIVE and 400 <= response.status_code < 500:
            as_another = path == "/invocations" and "unknown_parameter" in response.text  # the first field decides
            assert as_another or refused_beyond_the_schema(response), (case.body, case.query, response.text)

    run()
    assert seen
    assert {status for status in seen if status >= 500} == ({501} if (method, path, examples) in NOT_YET else set())


@pytest.mark.parametrize("strange", ["OPTIONS", "PUT", "TRACE", "PATCH"])
def test_methods_that_are_not_there_are_told_those_that_are(fuzzed: Running, strange: str) -> None:
    document = httpx.get(f"{fuzzed.url}/openapi.json").json()
    for path, item in document["paths"].items():
        target = re.sub(r"\{(\w+)\}", lambda found: FORMS.get(found[1], "").partition("[")[0].lstrip("^") + "x", path)
        answer = httpx.request(strange, f"{fuzzed.url}{target}")
        assert answer.status_code == 405, path
        assert set(answer.headers["allow"].split(", ")) == {method.upper() for method in item}, path


@pytest.mark.parametrize(
    "path", ["/v1/responses/compact/now", "/v1/responses/resp_x/nothing", "/v1/chat", "/v1/messages/batches"]
)
def test_sub_routes_that_are_not_there(fuzzed: Running, path: str) -> None:
    for method in ("GET", "POST", "DELETE", "OPTIONS"):
        answer = httpx.request(method, f"{fuzzed.url}{path}")
        assert answer.status_code == 404


def test_the_engine_served_some_of_them(fuzzed: Running) -> None:
    assert len(fuzzed.runner.seen) > 10
    until(lambda: not (fuzzed.client._streams or fuzzed.live))
    for pin in httpx.get(f"{fuzzed.url}/v1/cache/pins").json()["data"]:
        assert httpx.delete(f"{fuzzed.url}/v1/cache/pins/{pin['id']}").status_code == 200
    fuzzed.until_idle()
    assert httpx.post(f"{fuzzed.url}/v1/completions", json={"prompt": "Hello"}).status_code == 200
