"""`penstock generate --batch`: requests in the form of OpenAI's batches, line by line."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from penstock.cli.batch import LONGEST_LINE, BatchLines, BatchRequest, LineError, Tally, output, run_batch
from penstock.cli.main import app
from penstock.config.errors import ConfigError

Told = list[dict[str, Any]]


def line(custom_id: object, body: object = None, url: object = "/v1/completions", **more: object) -> bytes:
    asked = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"prompt": "a"} if body is None else body}
    return json.dumps({**asked, **more}).encode() + b"\n"


def read(*lines: bytes, done: frozenset[str] = frozenset()) -> list[BatchRequest | LineError]:
    return list(BatchLines(io.BytesIO(b"".join(lines)), done))


def command(*arguments: str, given: bytes = b"") -> tuple[int, Told, str]:
    result = CliRunner().invoke(app, ["generate", "--batch", *arguments], input=given, catch_exceptions=False)
    return result.exit_code, [json.loads(text) for text in result.stdout.splitlines()], result.stderr


def test_requests_are_read_and_blank_lines_and_what_is_done_are_passed_over() -> None:
    found = read(line("a"), b"\n", line("b"), line("c", url="/v1/embeddings"), done=frozenset("b"))
    assert found == [
        BatchRequest("a", "/v1/completions", {"prompt": "a"}),
        BatchRequest("c", "/v1/embeddings", {"prompt": "a"}),
    ]


@pytest.mark.parametrize(
    ("bad", "code", "custom_id"),
    [
        (b"nonsense\n", "invalid_json_line", None),
        (b"\xff\xfe\n", "invalid_json_line", None),
        (b"[" * 100_000 + b"\n", "invalid_json_line", None),
        (b"[]\n", "missing_custom_id", None),
        (line(5), "missing_custom_id", None),
        (line(""), "missing_custom_id", None),
        (line("x" * 513), "missing_custom_id", None),
        (line("first"), "duplicate_custom_id", "first"),
        (line("x", url="/metrics"), "invalid_url", "x"),
        (line("x", url=None), "invalid_url", "x"),
        (line("x", method="GET"), "invalid_url", "x"),
        (line("x", body=[]), "invalid_body", "x"),
        (line("x", body={"stream": True}), "invalid_body", "x"),
        (line("x", body={"background": True}), "invalid_body", "x"),
        (b"x" * (LONGEST_LINE + 10) + b"\n", "line_too_long", None),
    ],
)
def test_a_line_that_asks_nothing_stops_no_other(bad: bytes, code: str, custom_id: str | None) -> None:
    first, error, last = read(line("first"), bad, line("last"))
    assert isinstance(error, LineError) and "line 2" in str(error)
    assert (error.code, error.custom_id) == (code, custom_id)
    assert [request.custom_id for request in (first, last) if isinstance(request, BatchRequest)] == ["first", "last"]


class Busy:
    """A server that is busy a number of times for each request, and remembers how many it answered at a time.

    Nobody is answered before `together` have asked.
    """

    def __init__(self, times: int, together: int = 1) -> None:
        self.times, self.asked = times, dict[str, int]()
        self.now, self.most = 0, 0
        self.together, self.all = together, asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[prompt] = self.asked.get(prompt, 0) + 1
        if self.now == self.together:
            self.all.set()
        await self.all.wait()
        busy = self.asked[prompt] <= self.times
        headers = [(b"retry-after", b"0"), (b"x-request-id", prompt.encode())]
        self.now -= 1
        await send({"type": "http.response.start", "status": 429 if busy else 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"busy": busy}).encode()})


def answered(busy: Busy, *lines: bytes, at_once: int = 2, patience_s: float = 60) -> tuple[Tally, Told]:
    told: Told = []

    async def main() -> Tally:
        transport = httpx2.ASGITransport(app=busy)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await run_batch(BatchLines(io.BytesIO(b"".join(lines))), client, told.append, at_once, patience_s)

    return asyncio.run(main()), told


def test_a_busy_server_is_asked_again_and_never_more_at_a_time_than_wanted() -> None:
    busy = Busy(2, together=3)
    tally, told = answered(busy, *(line(f"{n}", {"prompt": f"{n}"}) for n in range(10)), at_once=3)
    assert tally == Tally(10, 0) and set(busy.asked.values()) == {3} and busy.most == 3
    assert {entry["custom_id"] for entry in told} == {f"{n}" for n in range(10)}
    for entry in told:
        assert entry["response"] == {"status_code": 200, "request_id": entry["custom_id"], "body": {"busy": False}}
        assert entry["error"] is None


def test_a_server_that_stays_busy_is_believed_in_the_end() -> None:
    busy = Busy(1000)
    tally, told = answered(busy, line("a", {"prompt": "a"}), patience_s=0.2)
    assert tally == Tally(0, 1) and told[0]["response"]["status_code"] == 429 and busy.asked["a"] >= 1


class Away(Busy):
    """A server to which the first connections of each request fail."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        self.asked[prompt] = self.asked.get(prompt, 0) + 1
        if self.asked[prompt] <= self.times:
            raise httpx2.ConnectError("nobody listens")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def test_a_server_that_is_away_for_a_moment_loses_no_line() -> None:
    away = Away(2)
    tally, _ = answered(away, line("a", {"prompt": "a"}), line("b", {"prompt": "b"}))
    assert tally == Tally(2, 0) and set(away.asked.values()) == {3}
    tally, told = answered(Away(1000), line("a", {"prompt": "a"}), patience_s=0.1)
    assert tally == Tally(0, 1) and "nobody listens" in told[0]["error"]["message"]


def test_what_no_utf8_or_json_can_say_is_the_servers_to_refuse() -> None:
    """And stops no other line."""
    strange = b'{"custom_id": "\\ud800", "url": "/v1/completions", "body": {"prompt": "\\ud800", "temperature": NaN}}\n'
    status, told, _ = command(given=strange + line("b", {"prompt": "a", "max_tokens": 1}))
    found = {entry["custom_id"]: entry["response"]["status_code"] for entry in told}
    assert status == 1 and found == {"\ud800": 400, "b": 200}


def test_a_batch_says_what_single_requests_say(tmp_path: Path) -> None:
    single = CliRunner().invoke(
        app, ["complete", "-q", "I am looking", "--max-tokens", "5", "--temperature", "0"], catch_exceptions=False
    )
    body = {"prompt": "I am looking", "max_tokens": 5, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "A table for two, please."}], "max_tokens": 8}
    lines = [line("a", body), line("b", chat, "/v1/chat/completions"), line("c", {"input": "x"}, "/v1/embeddings")]
    status, told, said = command(given=b"".join([*lines, line("d", {"prompt": 5})]))
    found = {entry["custom_id"]: entry["response"] for entry in told}
    assert status == 1 and "3 completed, 1 failed" in said
    assert found["a"]["body"]["choices"][0]["text"] == single.stdout.removesuffix("\n")
    assert found["b"]["body"]["choices"][0]["message"]["content"]
    assert found["c"]["body"]["data"][0]["embedding"]
    assert found["d"]["status_code"] == 400 and "prompt is 5" in found["d"]["body"]["error"]["message"]


def test_a_file_is_gone_on_with_after_a_kill(tmp_path: Path) -> None:
    given, wanted = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_bytes(b"".join(line(f"{n}", {"prompt": "Hello", "max_tokens": 1}) for n in range(3)))
    assert command("--input", str(given), "--output", str(wanted))[0] == 0
    whole = wanted.read_text().splitlines()
    assert len(whole) == 3
    status, _, said = command("--input", str(given), "--output", str(wanted))
    assert status == 1 and "--resume" in said
    wanted.write_text("\n".join(whole[:2])[:-20])  # the second answer broke off
    status, _, said = command("--input", str(given), "--output", str(wanted), "--resume")
    assert status == 0 and "2 completed, 0 failed, 1 were answered before" in said
    kept = [json.loads(text)["custom_id"] for text in wanted.read_text().splitlines()]
    assert sorted(kept) == ["0", "1", "2"]


def test_output_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"), output(tmp_path / "no" / "x", resume=False):
        pass


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--batch", "-q", "x"), "bodies of their own"),
        (("--batch", "--temperature", "0"), "bodies of their own"),
        (("--batch", "--logprobs", "3"), "bodies of their own"),
        (("--batch", "--resume"), "which is not given"),
        (("--batch", "--input", "x", "--output", "./x"), "a file of their own"),
        (("-q", "x", "--max-concurrency", "3"), "--max-concurrency is given without --batch"),
        (("--batch", "--input", "/nowhere/x"), "cannot be read"),
        (("-q", "x", "--input", "y"), "--input is given without --batch"),
        (("-q", "x", "--resume"), "--resume is given without --batch"),
    ],
)
def test_flags_that_contradict_each_other(arguments: tuple[str, ...], told: str) -> None:
    result = CliRunner().invoke(app, ["generate", *arguments], catch_exceptions=False)
    assert result.exit_code == 1 and told in result.output
