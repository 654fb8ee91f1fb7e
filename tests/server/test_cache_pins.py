"""What of a prompt would be found is told beforehand; pinned prefixes stay, and each key has its own."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from tests.server.support import Serving
from tests.server.test_owners import KEYS, concierge

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SYSTEM = "You answer the telephone of a restaurant by the sea, and you never forget a guest. " * 6
CHAT = [{"role": "system", "content": SYSTEM}]
OTHER = "The harbour is full of boats that wait for the tide, and for somebody who knows the way. " * 4


def sent(server: Serving, method: str, path: str, body: Any = None, key: int = 0) -> tuple[int, Any]:
    answer = httpx.request(method, server.url + path, json=body, headers={"x-api-key": KEYS[key]}, timeout=60)
    return answer.status_code, answer.json()


def matched(server: Serving, body: dict[str, Any], key: int = 0) -> dict[str, Any]:
    status, told = sent(server, "POST", "/v1/cache/match", body, key)
    assert status == 200 and told["object"] == "cache.match", told
    assert told["device"] + told["below"] + told["computed"] == told["prompt_tokens"]
    return dict(told)


def test_what_would_be_found_is_found(text: TextPipeline) -> None:
    with concierge(text) as (server, engine):
        asked = {"messages": [*CHAT, {"role": "user", "content": "Hello"}]}
        before = matched(server, asked)
        assert (before["device"], before["missed"]) == (0, "first_seen")
        status, answer = sent(server, "POST", "/v1/chat/completions", {**asked, "max_tokens": 1})
        assert status == 200 and answer["timings"]["cache_miss"] == "first_seen"
        after = matched(server, asked)
        assert after["computed"] == 1 and after["missed"] is None
        status, answer = sent(server, "POST", "/v1/chat/completions", {**asked, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == after["device"] + after["below"]
        assert answer["usage"]["prompt_tokens"] == after["prompt_tokens"] and "cache_miss" not in answer["timings"]
        for body, key in ((asked, 1), ({**asked, "cache_salt": "pepper"}, 0)):
            assert matched(server, body, key)["missed"] == "first_seen", "told of another's"
        counted = engine.stats()
        matched(server, asked)
        assert engine.stats().prefix_queries == counted.prefix_queries
        for wrong in ({}, {"prompt": "a", "messages": CHAT}, {"prompt": ""}, {"prompt": [10**6]}):
            assert sent(server, "POST", "/v1/cache/match", wrong)[0] == 400


def test_a_pin_outlasts_others_and_is_its_keys_own(text: TextPipeline) -> None:
    with concierge(text) as (server, _):
        status, pin = sent(server, "POST", "/v1/cache/pins", {"messages": CHAT, "ttl": 600, "id": "desk"})
        assert status == 200 and pin["id"] == "desk" and pin["tokens"] > 40, pin
        assert 0 < pin["expires_at"] - time.time() <= 600
        for index in range(40):
            sent(server, "POST", "/v1/completions", {"prompt": f"{index}. {OTHER * 3}", "max_tokens": 1})
        sent(server, "POST", "/reset_prefix_cache")
        asked = {"messages": [*CHAT, {"role": "user", "content": "Do you have a table?"}]}
        assert matched(server, asked)["device"] >= pin["tokens"]
        assert matched(server, asked, 1)["device"] == 0
        assert sent(server, "GET", "/v1/cache/pins", key=1) == (200, {"object": "list", "data": []})
        assert [one["id"] for one in sent(server, "GET", "/v1/cache/pins")[1]["data"]] == ["desk"]
        for path, key, status in (("desk", 1, 404), ("desks", 0, 404), ("desk", 0, 200), ("desk", 0, 404)):
            assert sent(server, "DELETE", f"/v1/cache/pins/{path}", key=key)[0] == status
        sent(server, "POST", "/reset_prefix_cache")
        assert matched(server, asked)["device"] == 0


def test_what_cannot_be_pinned_is_refused_with_the_remedy(text: TextPipeline) -> None:
    with concierge(text, max_model_len=1024) as (server, _):
        first = {"prompt": OTHER, "id": "one"}
        assert sent(server, "POST", "/v1/cache/pins", first)[0] == 200
        status, told = sent(server, "POST", "/v1/cache/pins", first)
        assert (status, told["error"]["code"]) == (409, "pin_exists")
        status, told = sent(server, "POST", "/v1/cache/pins", {"prompt": "a"})
        assert (status, told["error"]["code"]) == (400, "pin_too_short")
        for index in range(40):
            status, told = sent(server, "POST", "/v1/cache/pins", {"prompt": f"{index}. {OTHER * 3}"})
            if status != 200:
                break
        assert (status, told["error"]["code"]) == (409, "pins_full")
        assert "--kv-cache-memory" in told["error"]["message"] and "that a key may pin" in told["error"]["message"]
        assert sent(server, "POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("key", ["", "5a" * 32], ids=["clear", "encrypted"])
def test_pins_are_there_after_a_restart(
    key: str, text: TextPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KV_KEY", key)
    below = {"kv_disk": 64 << 20, "kv_disk_path": str(tmp_path / "kv")}
    body = {"messages": [*CHAT, {"role": "user", "content": "Hello"}]}
    with concierge(text, **below) as (server, _):
        pin = sent(server, "POST", "/v1/cache/pins", {"messages": CHAT, "id": "desk", "cache_salt": "pepper"})[1]
    (kept,) = (tmp_path / "kv").glob("*/pins")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert (b"pepper" in kept.read_bytes()) == (not key), "what an index has encrypted lies beside it in clear"
    with concierge(text, **below) as (server, _):
        until = time.monotonic() + 60
        while not (found := sent(server, "GET", "/v1/cache/pins")[1]["data"]):
            assert time.monotonic() < until
        assert [(one["id"], one["tokens"]) for one in found] == [("desk", pin["tokens"])]
        assert abs(found[0]["expires_at"] - pin["expires_at"]) < 5
        assert matched(server, {**body, "cache_salt": "pepper"})["device"] >= pin["tokens"]
        assert matched(server, body)["device"] == 0
        assert sent(server, "DELETE", "/v1/cache/pins/desk")[0] == 200
    kept.write_text('[{"name": "x", "owner": "", "salt": "", "tokens": [99999999999], "until": 1e12}, 7]')
    with concierge(text, **below) as (server, _):  # what is no such file is nothing
        assert sent(server, "GET", "/v1/cache/pins")[1]["data"] == []


def test_files_are_pinned_and_warmed_from_the_command_line(
    text: TextPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", KEYS[0])
    lines, plain = tmp_path / "prompts.jsonl", tmp_path / "system.txt"
    lines.write_text("\n".join(map(json.dumps, (OTHER, {"messages": CHAT}))) + "\n\n")
    plain.write_text(SYSTEM)

    def said(*words: str, status: int = 0) -> Any:
        result = CliRunner().invoke(app, ["cache", "kv", *words, "--url", server.url])
        assert result.exit_code == status, result.output
        return result.output

    with concierge(text) as (server, _):
        warmed = json.loads(said("warm", str(lines), "--json"))["prompts"]
        assert [(one["line"], one["cached_tokens"]) for one in warmed] == [(1, 0), (2, 0)]
        assert matched(server, {"prompt": OTHER})["computed"] == 1
        (pin,) = json.loads(said("pin", str(plain), "--system", "--ttl", "60", "--json"))["pins"]
        assert pin["cached_tokens"] > 40 and pin["id"] in said("pins")
        assert said("unpin", pin["id"]) == f"ended {pin['id']}\n"
        assert json.loads(said("pins", "--json")) == {"pins": []}
        lines.write_text('{"prompt": "a", "messages": []}')
        assert "line 1" in said("warm", str(lines), status=1)
