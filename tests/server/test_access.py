"""API keys, exposure, CORS and routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import httpx
import pytest
from fastapi import FastAPI

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server.app import create_app
from penstock.server.auth import PUBLIC_PATHS, is_loopback
from penstock.server.serve import bind, serve
from tests.engine.support import null_engine
from tests.server.support import Running, running

KEYS = ("first-key", "zweiter-Schlüssel")


@pytest.fixture(scope="module")
def locked(text: TextPipeline) -> Iterator[Running]:
    options = ServerOptions(api_keys=KEYS, allowed_origins=("https://app.example",))
    with running(text, options) as server:
        yield server


def routes(text: TextPipeline) -> list[tuple[str, str]]:
    """(method, path) of every route the application registers, in its document or not."""
    app: FastAPI = create_app(Frontend(ThreadClient(null_engine), text, served_name="scripted"), ServerOptions())
    found: list[tuple[str, str]] = []

    def walk(items: Iterable[object]) -> None:
        for item in items:
            if path := getattr(item, "path", None):
                found.extend((method, path) for method in getattr(item, "methods", None) or ())
            else:
                walk(getattr(item, "original_router", item).routes)  # type: ignore[attr-defined]

    walk(app.routes)
    documented = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    assert {(method, re.sub(r":\w+}", "}", path)) for method, path in found} == documented
    given = {
        "{model:path}": "scripted",
        "{model:kserve_model}": "scripted",
        "{version}": "1",
        "{response_id:response_id}": "resp_1",
        "{conversation_id:conversation_id}": "conv_1",
        "{completion_id:completion_id}": "chatcmpl-1",
        "{item_id}": "msg_1",
        "{name:path}": "app.js",
    }
    return [(method, re.sub(r"{[\w:]+}", lambda name: given.get(name[0], name[0]), path)) for method, path in found]


def test_the_document_says_how_keys_are_sent(locked: Running) -> None:
    document = httpx.get(f"{locked.url}/openapi.json", headers={"x-api-key": KEYS[0]}).json()
    schemes = {name: scheme["type"] for name, scheme in document["components"]["securitySchemes"].items()}
    assert schemes == {"bearer": "http", "key": "apiKey"}
    assert document["security"] == [{name: []} for name in schemes]


def test_every_route_but_the_public_ones_needs_a_key(locked: Running, text: TextPipeline) -> None:
    walked = routes(text)
    assert {path for _, path in walked} > PUBLIC_PATHS
    with httpx.Client(base_url=locked.url) as http:
        for method, path in [*walked, ("GET", "/no/such/route"), ("PUT", "/v1/models"), ("OPTIONS", "/metrics")]:
            answer = http.request(method, path)
            if (path in PUBLIC_PATHS and method != "POST") or path.startswith("/web/"):
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, (method, path)
            if method != "HEAD":
                assert "This server needs an API key." in answer.text
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/livez/../metrics", "//metrics", "/livez%2f..%2fmetrics", "/%6detrics", "/metrics/"])
def test_no_spelling_of_a_path_goes_around_the_key(locked: Running, path: str) -> None:
    answer = locked.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_no_host_header_goes_around_the_key(locked: Running) -> None:
    for host in ("localhost/livez?", "localhost#", "x/livez", "localhost:80/livez"):
        answer = locked.raw(f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer first-key"}, 200),
        ({"x-api-key": "first-key"}, 200),
        ({"Authorization": "Bearer second"}, 401),
        ({"Authorization": "Bearer first-ke"}, 401),
        ({"Authorization": "Bearer first-key2"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic first-key"}, 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": "Bearer wrong", "x-api-key": "first-key"}, 401),
    ],
)
def test_keys(locked: Running, headers: dict[str, str], expected: int) -> None:
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == expected


def test_a_key_with_other_than_ascii_letters(locked: Running) -> None:
    key = b"Authorization: Bearer " + KEYS[1].encode()
    answer = locked.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + key + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_a_refusal_does_not_repeat_the_key(locked: Running) -> None:
    answer = httpx.get(f"{locked.url}/v1/models", headers={"Authorization": "Bearer s3cret"})
    assert "s3cret" not in answer.text


def test_cors_of_other_sites_is_off_unless_configured(locked: Running, server: Running) -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert httpx.options(f"{locked.url}/v1/models", headers=ask).headers["access-control-allow-origin"] == ask["Origin"]
    other = {**ask, "Origin": "https://evil.example"}
    assert "access-control-allow-origin" not in httpx.options(f"{locked.url}/v1/models", headers=other).headers
    answer = httpx.options(f"{server.url}/v1/models", headers=ask)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


HERE = ("http://localhost:3000", "https://localhost", "http://127.0.0.1:5173", "http://[::1]:8080", "tauri://localhost")
ELSEWHERE = ("https://localhost.evil.example", "http://127.0.0.1.evil.example", "https://evil.example", "null")


@pytest.mark.parametrize("origin", [*HERE, "http://app.localhost:4000", "app://obsidian.md", *ELSEWHERE])
def test_pages_of_this_machine_may_call(server: Running, origin: str) -> None:
    ask = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    preflight = httpx.options(f"{server.url}/v1/chat/completions", headers=ask)
    listed = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin})
    for answer in (preflight, listed):
        assert answer.headers.get("access-control-allow-origin") == (None if origin in ELSEWHERE else origin)
    assert preflight.status_code == (400 if origin in ELSEWHERE else 200)


def test_even_pages_of_this_machine_can_be_refused(text: TextPipeline) -> None:
    with running(text, ServerOptions(allowed_origins=("none",))) as server:
        ask = {"Origin": HERE[0], "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{server.url}/v1/models", headers=ask).status_code == 405
        assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=ask).headers


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "", "no.such.host.invalid"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key") as caught:
        serve(EngineOptions(), ServerOptions(host=host, port=0))
    assert "127.0.0.1" in str(caught.value)


def test_an_empty_key_is_no_key() -> None:
    for keys in (("",), ("good", " ")):
        with pytest.raises(ConfigError, match="empty"):
            serve(EngineOptions(), ServerOptions(host="0.0.0.0", port=0, api_keys=keys))


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "8.8.8.8", "", "fe80::1")))


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}.*Choose another"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="70000"):
        bind("127.0.0.1", 70000)


def test_unknown_routes_and_methods(server: Running) -> None:
    missing = httpx.get(f"{server.url}/v1/nothing?secret=1")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_route")
    wrong = httpx.delete(f"{server.url}/v1/models")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_operators_routes(server: Running) -> None:
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/version").json().keys() == {"version", "arithmetic_version"}


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(server: Running, text: TextPipeline, prefix: str) -> None:
    said = "Grüße, 世界! 😀"
    answer = httpx.post(f"{server.url}{prefix}/tokenize", json={"prompt": said, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    back = httpx.post(f"{server.url}{prefix}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": said, "content": said}


def test_an_empty_text_has_no_tokens(server: Running) -> None:
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": ""}).json()
    assert (answer["count"], answer["tokens"]) == (0, [])


def test_tokenize_a_chat(server: Running) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = httpx.post(f"{server.url}/tokenize", json={"messages": messages, "model": "scripted"}).json()
    httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert answer["tokens"] == list(server.runner.seen[0].prompt_ids)


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": []}, {"prompt": 5}, {"prompt": "x", "what": 1}])
def test_tokenize_refuses(server: Running, body: dict[str, object]) -> None:
    assert httpx.post(f"{server.url}/tokenize", json=body).status_code == 400


@pytest.mark.parametrize("tokens", [[-1], [10**9], ["a"], "abc", None, [1.5], [True]])
def test_detokenize_refuses(server: Running, tokens: object) -> None:
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).status_code == 400
