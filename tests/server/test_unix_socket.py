"""A server on a Unix socket, and behind a proxy's path; what streams and log-probabilities are told without asking."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.server.app import create_app
from penstock.server.root_path import check_root_path
from penstock.server.serve import serve, url_of, where_to_ask
from penstock.server.unix_socket import bind_unix, remove_unix
from tests.engine.support import null_engine
from tests.server.support import Running, running, until

SCRIPT = """
from penstock.config.options import EngineOptions, ServerOptions
from penstock.server.serve import serve
serve(EngineOptions(threads=1, max_model_len=512, kv_blocks=100), ServerOptions(uds={path!r}))
"""
USER = {"messages": [{"role": "user", "content": "Hello"}]}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_who_may_use_it(tmp_path: Path) -> None:
    for private, mode in ((True, 0o600), (False, 0o666)):
        path = tmp_path / str(private)
        listener = bind_unix(str(path), private=private)
        assert mode_of(path) == mode
        assert url_of(listener).startswith("http+unix://%2F")
        told = where_to_ask(url_of(listener), "model", keyed=False)
        assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in told
        listener.close()
        remove_unix(str(path))
        assert not path.exists()


def test_what_is_there_already(tmp_path: Path) -> None:
    """A socket that nobody listens at is replaced; another server's and other files are left alone."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    first = bind_unix(str(path), private=True)
    with pytest.raises(ConfigError, match="another server listens there"):
        bind_unix(str(path), private=True)
    remove_unix(str(path))  # which is another's: it answers
    assert path.exists()
    first.close()
    remove_unix(str(path))
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(ConfigError, match="there is something else"):
        bind_unix(str(path), private=True)
    remove_unix(str(path))
    assert path.read_text() == "mine"
    for wrong in (str(tmp_path / "none" / "s"), str(tmp_path / ("x" * 200)), "a\0b"):
        with pytest.raises(ConfigError, match="--uds"):
            bind_unix(wrong, private=True)


def test_a_server_on_a_socket(tmp_path: Path, shared_data: Path) -> None:
    """It answers there; at the end the socket is gone."""
    path = tmp_path / "penstock.sock"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(path=str(path))])
    try:
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any.name", timeout=90
        ) as client:

            def ready() -> bool:
                return path.exists() and client.get("/readyz").status_code == 200

            until(lambda: process.poll() is not None or ready(), 90)
            answer = client.post("/v1/chat/completions", json={**USER, "max_tokens": 3}, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == 3
        process.terminate()
        assert process.wait(30) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


def test_several_http_processes_have_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-server-count"):
        serve(EngineOptions(), ServerOptions(uds=str(tmp_path / "s"), api_server_count=2))


@pytest.mark.parametrize("wrong", ["models", "/", "/a/", "//a", "/a b", "/a?b", "/%2e"])
def test_root_paths_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--root-path"):
        check_root_path(wrong)


@pytest.mark.parametrize("prefix", ["/v1", "/api", "/v1/chat"])
def test_a_root_path_of_our_own_routes_is_refused(text: TextPipeline, prefix: str) -> None:
    engine = ThreadClient(null_engine)
    with pytest.raises(ConfigError, match="begins so"):
        create_app(Frontend(engine, text, served_name="x"), ServerOptions(root_path=prefix))


@pytest.fixture(scope="module")
def habitual(text: TextPipeline) -> Any:
    options = ServerOptions(root_path="/models/chat", force_include_usage=True, tokens_as_ids=True, api_keys=("key",))
    with running(text, options) as server:
        yield server


def ask(server: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers={"Authorization": "Bearer key"})


def test_a_proxy_s_path_is_taken_off_where_it_is_there(habitual: Running) -> None:
    for path in ("/v1/chat/completions", "/models/chat/v1/chat/completions"):
        assert ask(habitual, path, **USER).status_code == 200
    for path in ("/models/chatter/v1/chat/completions", "/models/chat/models/chat/v1/chat/completions"):
        assert ask(habitual, path, **USER).status_code == 404
    assert httpx.post(f"{habitual.url}/models/chat/v1/chat/completions", json=USER).status_code == 401
    for path in ("/openapi.json", "/models/chat/openapi.json"):
        document = httpx.get(f"{habitual.url}{path}", headers={"Authorization": "Bearer key"}).json()
        assert document["servers"] == [{"url": "/models/chat"}]
        assert "/v1/models" in document["paths"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**USER, "logprobs": True, "top_logprobs": 1}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3, "logprobs": 1}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"max_tokens": 3}}),
    ],
)
def test_what_is_told_without_being_asked_for(habitual: Running, path: str, body: dict[str, Any]) -> None:
    raw = ask(habitual, path, **body, stream=True).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in raw if line.startswith("data: {")]
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    assert not any(chunk.get("usage") for chunk in chunks[:-1])
    told = ask(habitual, path, **body).json()["choices"][0]["logprobs"]
    if path == "/v1/completions":
        assert all(token.startswith("token_id:") for token in told["tokens"])
    elif told is not None:
        assert all(entry["token"].startswith("token_id:") for entry in told["content"])


@pytest.mark.parametrize("path", ["", "\0abstract"])
def test_a_socket_without_a_file_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="no path of a file"):
        bind_unix(path, private=True)
