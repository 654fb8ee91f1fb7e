"""Tools of MCP servers that the server runs: listed, called by their policy, bounded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.config import limits
from penstock.config.errors import ConfigError
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.tools.servers_file import Policy, read_servers
from tests.server.support import Running, running, until

PROGRAM = str(Path(__file__).with_name("mcp_server.py"))
POLICIES = {"add": "allow", "secret": "allow", "much": "allow", "fail": "allow", "die": "allow", "much2": "deny"}


def written(folder: Path, **servers: Any) -> str:
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tooled(text: TextPipeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    http = subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.DEVNULL)
    until(lambda: _listens(port))
    file = written(
        tmp_path_factory.mktemp("mcp"),
        local={"command": sys.executable, "args": [PROGRAM], "env": {"GIVEN": "yes"}, "policy": POLICIES},
        far={"url": f"http://127.0.0.1:{port}/mcp", "policy": {"*": "deny", "add": "allow"}},
        hasty={"command": sys.executable, "args": [PROGRAM], "timeout_ms": 5000, "policy": {"*": "allow"}},
        gone={"command": "/no/such/program"},
    )
    try:
        with running(text, ServerOptions(mcp_servers=file)) as server:
            yield server
    finally:
        http.terminate()
        http.wait(60)


def _listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def call(server: Running, tool: str, confirmed: bool = False, **params: Any) -> httpx.Response:
    body = {"tool": tool, "params": params} | ({"confirmed": True} if confirmed else {})
    return httpx.post(f"{server.url}/tools", json=body, timeout=120)


def test_tools_are_listed_as_models_take_them(tooled: Running) -> None:
    listed = {tool["tool"]: tool for tool in httpx.get(f"{tooled.url}/tools", timeout=120).json()}
    assert {name for name in listed if name.startswith("far__")} == {"far__add"}
    add = listed["local__add"]
    assert (add["policy"], add["type"], add["permissions"]) == ("allow", "mcp", {"write": True})
    assert add["definition"]["function"]["description"] == "Both together."
    assert set(add["definition"]["function"]["parameters"]["properties"]) == {"a", "b"}
    assert listed["local__slow"]["policy"] == "ask"
    chat = {"messages": [{"role": "user", "content": "Hello"}], "tools": [add["definition"]]}
    assert httpx.post(f"{tooled.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200


@pytest.mark.parametrize("server", ["local", "far"])
def test_a_tool_is_called(tooled: Running, server: str) -> None:
    answer = call(tooled, f"{server}__add", a=2, b=3)
    assert (answer.status_code, answer.json()) == (200, {"plain_text_response": "5"})


def test_a_program_sees_what_the_file_gives_it_alone(tooled: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(tooled, "local__secret", name="GIVEN").json()["plain_text_response"] == "yes"
    assert call(tooled, "local__secret", name="PYTEST_CURRENT_TEST").json()["plain_text_response"] == "not there"


def test_a_person_is_asked_first(tooled: Running) -> None:
    refused = call(tooled, "local__slow")
    assert (refused.status_code, refused.json()["error"]["message"][:26]) == (403, "local__slow runs when a pe")
    for name in ("far__much", "local__none", "none__add", "x"):
        assert call(tooled, name, confirmed=True).status_code == 404


def test_answers_are_bounded_in_size_and_time(tooled: Running) -> None:
    said = call(tooled, "local__much").json()["plain_text_response"]
    assert len(said) < limits.MAX_TOOL_CHARS + 100
    assert said.endswith("characters]")
    late = call(tooled, "hasty__slow")
    assert late.status_code == 504
    assert "within 5 s" in late.json()["error"]["message"]


def test_what_fails_is_told(tooled: Running) -> None:
    assert "fail" in call(tooled, "local__fail").json()["plain_text_response"]
    assert call(tooled, "local__add", a="x").json()["plain_text_response"].startswith("error: ")
    assert call(tooled, "gone__x").status_code == 502
    assert call(tooled, "hasty__die").status_code in (502, 504)
    assert call(tooled, "hasty__add", a=1, b=1).json() == {"plain_text_response": "2"}  # it is started again


def test_a_server_without_tools_says_so(server: Running) -> None:
    for answer in (httpx.get(f"{server.url}/tools"), call(server, "x")):
        assert answer.status_code == 501
        assert "--mcp-servers" in answer.json()["error"]["message"]


def test_an_administrators_key_is_needed_where_there_are_some(text: TextPipeline, tmp_path: Path) -> None:
    options = ServerOptions(mcp_servers=written(tmp_path), api_keys=("user",), admin_keys=("admin",))
    with running(text, options) as server:
        for key, status in (("user", 403), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{server.url}/tools", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({}, "exactly one of command and url"),
        ({"command": "x", "url": "http://x"}, "exactly one of command and url"),
        ({"command": "x", "policy": {"a": "maybe"}}, "allowed: allow, ask, deny"),
        ({"command": "x", "timeout_ms": 0}, "timeout_ms"),
        ({"url": "ftp://x"}, "url"),
        ({"command": "x", "argz": []}, "argz"),
    ],
)
def test_files_are_checked(tmp_path: Path, about: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_servers(Path(written(tmp_path, one=about)))


def test_a_policy_asks_unless_it_is_said(tmp_path: Path) -> None:
    (one,) = read_servers(Path(written(tmp_path, one={"command": "x", "policy": {"a": "allow", "b": "deny"}})))
    assert [one.policy(tool) for tool in "abc"] == [Policy.ALLOW, Policy.DENY, Policy.ASK]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_servers(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="allowed: up to 64"):
        read_servers(Path(written(tmp_path, **{"a b": {"command": "x"}})))
