"""WebSocket mode of the Responses API: through OpenAI's own client, and message by message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from penstock.config import limits
from penstock.config.options import ServerOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.server.websocket import Incoming
from tests.server.support import ANSWER, Running, running, until

ENDS = ("response.completed", "response.incomplete", "response.failed", "error", "response.steer.failed")


def socket_url(server: Running) -> str:
    return server.url.replace("http", "ws") + "/v1/responses"


@contextmanager
def opened(server: Running, **more: Any) -> Iterator[ClientConnection]:
    with connect(socket_url(server), max_size=None, compression=None, open_timeout=60, **more) as socket:
        yield socket


def create(text: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"type": "response.create", "model": "scripted", "input": text, **more}


def told(socket: ClientConnection) -> list[dict[str, Any]]:
    """The messages of one turn."""
    found = [json.loads(socket.recv(60))]
    while found[-1]["type"] not in ENDS:
        found.append(json.loads(socket.recv(60)))
    return found


def ask(socket: ClientConnection, message: dict[str, Any]) -> dict[str, Any]:
    socket.send(json.dumps(message))
    return told(socket)[-1]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def test_openais_client_goes_on_from_what_is_not_stored(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api, api.responses.connect() as connection:
        asked: Any = {"model": "scripted", "store": False}
        connection.response.create(input="Hello", **asked)
        first = _events(connection)
        assert [event.type for event in first][:2] == ["response.created", "response.in_progress"]
        assert first[-1].response.output_text == ANSWER
        connection.response.create(input="Thanks", previous_response_id=first[-1].response.id, **asked)
        second = _events(connection)
        assert second[-1].response.previous_response_id == first[-1].response.id
        assert second[-1].response.usage.input_tokens > first[-1].response.usage.total_tokens
    assert httpx.get(f"{server.url}/v1/responses/{first[-1].response.id}").status_code == 404


def _events(connection: Any) -> list[Any]:
    found = [connection.recv()]
    while found[-1].type not in ENDS:
        found.append(connection.recv())
    return found


def test_the_events_are_those_of_a_stream(server: Running) -> None:
    with opened(server) as socket:
        socket.send(json.dumps(create()))
        here = told(socket)
    with httpx.stream(
        "POST", f"{server.url}/v1/responses", json={**create(), "stream": True} | {"type": None}
    ) as other:
        assert other.status_code == 400  # `type` is the message's alone
    body = {"model": "scripted", "input": "Hello", "stream": True}
    lines = httpx.post(f"{server.url}/v1/responses", json=body, timeout=60).text.splitlines()
    there = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in here] == [event["type"] for event in there]
    assert [event["sequence_number"] for event in here] == list(range(len(here)))
    assert text_of(here[-1]["response"]) == text_of(there[-1]["response"]) == ANSWER


def test_stored_responses_are_found_by_another_connection(server: Running) -> None:
    with opened(server) as socket:
        first = ask(socket, create())["response"]
        lost = ask(socket, create(store=False))["response"]
    with opened(server) as socket:
        again = ask(socket, create("More", previous_response_id=first["id"]))
        assert again["type"] == "response.completed"
        gone = ask(socket, create("More", previous_response_id=lost["id"]))
        assert gone["status"] == 400
        assert gone["error"]["code"] == "previous_response_not_found"
        assert gone["error"]["param"] == "previous_response_id"


def test_turns_wait_for_each_other(server: Running) -> None:
    server.runner.hold(2)
    with opened(server) as socket:
        for text in ("One", "Two", "Three"):
            socket.send(json.dumps(create(text, store=False)))
        assert server.runner.held.wait(60)
        assert server.live == 1
        server.runner.go()
        turns = [told(socket) for _ in range(3)]
    assert [turn[0]["type"] for turn in turns] == ["response.created"] * 3
    assert len({event["response"]["id"] for turn in turns for event in (turn[0], turn[-1])}) == 3


def test_streams_run_beside_each_other_and_fork(server: Running) -> None:
    with opened(server) as socket:
        root = ask(socket, create(store=False))["response"]["id"]
        server.runner.hold(2)
        for name in ("a", "b"):
            socket.send(json.dumps(create("More", store=False, previous_response_id=root, stream_id=name)))
        assert server.runner.held.wait(60)
        until(lambda: len(server.client._streams) == 2)  # the engine takes the second when it goes on
        server.runner.go()
        ended: dict[str, Any] = {}
        while len(ended) < 2:
            event = json.loads(socket.recv(60))
            if event["type"] in ENDS:
                ended[event["stream_id"]] = event["response"]
        assert {text_of(response) for response in ended.values()} == {ANSWER}
        on = ask(socket, create("On", store=False, previous_response_id=ended["a"]["id"], stream_id="a"))
        assert (on["type"], on["stream_id"]) == ("response.completed", "a")


def test_a_turn_that_fails_takes_what_it_went_on_from(server: Running) -> None:
    with opened(server) as socket:
        first = ask(socket, create(store=False))["response"]["id"]
        bad = ask(socket, create("More", store=False, previous_response_id=first, temperature=-1))
        assert (bad["status"], bad["error"]["param"]) == (400, "temperature")
        gone = ask(socket, create("More", store=False, previous_response_id=first))
        assert gone["error"]["code"] == "previous_response_not_found"
        kept = ask(socket, create())["response"]["id"]
        server.runner.die_after = 2
        assert ask(socket, create("More", previous_response_id=kept))["type"] == "response.failed"
        server.runner.die_after = None
        assert ask(socket, create("More", previous_response_id=kept))["type"] == "response.completed"


def test_generate_false_computes_the_prompt(server: Running) -> None:
    with opened(server) as socket:
        warm = ask(socket, create("A long question. " * 40, store=False, generate=False))["response"]
        assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
        answer = ask(socket, create("And?", store=False, previous_response_id=warm["id"]))["response"]
        assert text_of(answer) == ANSWER
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[1]", 400, None),
        (b'{"type": "response.cancel"}', 400, "type"),
        (json.dumps(create(background=True)).encode(), 400, "background"),
        (json.dumps(create(generate=1.5)).encode(), 400, "generate"),
        (json.dumps(create(stream_id=7)).encode(), 400, "stream_id"),
        (json.dumps(create(stream_id="x" * 129)).encode(), 400, "stream_id"),
        (json.dumps(create(model="other")).encode(), 404, "model"),
        (json.dumps(create(tenperature=1)).encode(), 400, "tenperature"),
        (b'{"type": "response.create", "input": ' + b"[" * 100 + b"]" * 100 + b"}", 400, None),
    ],
)
def test_errors_are_told_and_the_connection_stays(
    server: Running, message: bytes, status: int, param: str | None
) -> None:
    with opened(server) as socket:
        socket.send(message)
        (error,) = told(socket)
        assert (error["type"], error["status"], error["error"].get("param")) == ("error", status, param)
        assert error["error"]["message"]
        assert ask(socket, create())["type"] == "response.completed"


def test_steering_is_refused_with_its_input(server: Running) -> None:
    with opened(server) as socket:
        failed = ask(socket, {"type": "response.steer", "previous_response_id": "resp_1", "input": "Stop"})
        assert failed["error"]["code"] == "steering_not_supported"
        assert failed["steer"] == {"input": "Stop", "previous_response_id": "resp_1"}


def test_a_client_that_leaves_ends_its_response(server: Running) -> None:
    before = server.cancelled
    server.runner.hold(2)
    with opened(server) as socket:
        socket.send(json.dumps(create()))
        assert server.runner.held.wait(60)
    server.until_told()
    server.runner.go()
    server.until_idle()
    assert server.cancelled > before
    until(lambda: server.lifecycle.in_flight == 0)


def test_what_waits_is_bounded(server: Running) -> None:
    server.runner.hold(1)
    with opened(server) as socket:
        for _ in range(limits.MAX_WAITING_MESSAGES + 3):
            socket.send(json.dumps(create()))
        errors: list[dict[str, Any]] = []
        while len(errors) < 2:  # one runs, and of the others two are too many
            event = json.loads(socket.recv(60))
            errors += [event] if event["type"] == "error" else []
        assert {error["error"]["code"] for error in errors} == {"response_already_in_flight"}
        assert {error["status"] for error in errors} == {429}
        for number in range(limits.MAX_STREAMS_OF_A_SOCKET):
            socket.send(json.dumps(create(stream_id=f"s{number}", input=None)))
        server.runner.go()


def test_a_message_that_is_too_long_closes(server: Running) -> None:
    with opened(server) as socket:
        with suppress(ConnectionClosed):
            socket.send(b"x" * (limits.MAX_BODY_BYTES + 1))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(60)
    assert closed.value.rcvd is None or closed.value.rcvd.code == 1009


def test_a_large_message_is_answered(server: Running) -> None:
    with opened(server) as socket:
        error = ask(socket, create("word " * 200_000))
        assert error["error"]["code"] == "context_length_exceeded"


def test_parts_of_messages_are_bounded_together() -> None:
    incoming = Incoming(100)
    assert incoming.grow(60)
    assert not incoming.grow(41)
    incoming.give_back(60)
    assert incoming.grow(100)


@pytest.fixture(scope="module")
def keyed(text: TextPipeline) -> Iterator[Running]:
    with running(text, ServerOptions(api_keys=("secret",))) as server:
        yield server


def test_a_key_is_asked_for_when_the_connection_is_opened(keyed: Running) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(keyed):
        pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    with opened(keyed, additional_headers={"Authorization": "Bearer secret"}) as socket:
        assert ask(socket, create())["type"] == "response.completed"


@pytest.mark.parametrize(
    ("origin", "let_in"),
    [("https://evil.example", False), ("null", False), ("http://localhost:3000", True), ("same", True)],
)
def test_pages_of_other_origins_are_refused(server: Running, origin: str, let_in: bool) -> None:
    origin = server.url if origin == "same" else origin
    if let_in:
        with opened(server, origin=origin) as socket:
            assert ask(socket, create())["type"] == "response.completed"
        return
    with pytest.raises(InvalidStatus) as refused, opened(server, origin=origin):
        pass
    assert refused.value.response.status_code == 403
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "origin_not_allowed"


def test_other_hosts_are_refused(server: Running) -> None:
    head = b"GET /v1/responses HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    answer = server.raw(head + b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403 ")


def test_upgrades_are_passed_over_elsewhere(server: Running) -> None:
    rest = b"Host: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert server.raw(b"GET /v1/models HTTP/1.1\r\n" + rest).startswith(b"HTTP/1.1 200 ")
    assert server.raw(b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 405 "
    )


@pytest.mark.parametrize("cut", [1, 30, 80])
def test_a_head_may_come_in_pieces_and_messages_with_it(server: Running, cut: int) -> None:
    head = (
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    message = json.dumps(create("x" * 20)).encode()
    frame = bytes([0x81, 0x80 | 126, *len(message).to_bytes(2, "big"), 0, 0, 0, 0]) + message
    with server.connect() as connection:
        connection.sendall(head[:cut])
        server.call(lambda: None)
        connection.sendall(head[cut:] + frame)
        found = b""
        while b"response.completed" not in found:
            piece = connection.recv(65536)
            assert piece, found
            found += piece
    assert found.startswith(b"HTTP/1.1 101 ")


def test_a_connection_ends_after_its_time(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SOCKET_S", 0.05)
    server.runner.hold(2)
    with opened(server) as socket:
        socket.send(json.dumps(create()))
        found = [json.loads(socket.recv(60))]
        while found[-1]["type"] != "error":
            found.append(json.loads(socket.recv(60)))
        assert found[-1]["error"]["code"] == "websocket_connection_limit_reached"
        server.runner.go()
        assert told(socket)[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed):
            socket.recv(60)


def test_a_server_that_ends_closes_its_connections(text: TextPipeline) -> None:
    with running(text) as server:
        socket = connect(socket_url(server), open_timeout=60)
        assert ask(socket, create())["type"] == "response.completed"
        waiting = ThreadPoolExecutor(1).submit(socket.recv, 60)
    with pytest.raises(ConnectionClosed):
        waiting.result(60)


def test_each_turn_is_a_request_in_the_metrics(server: Running) -> None:
    def count() -> int:
        text = httpx.get(f"{server.url}/metrics").text
        mark = 'penstock_http_requests_total{method="POST",route="/v1/responses",status="200"}'
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(mark))

    before = count()
    with opened(server) as socket:
        ask(socket, create())
        ask(socket, create())
    assert count() == before + 2
