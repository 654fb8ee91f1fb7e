"""`serve --api-server-count` as people run it: HTTP processes come and go over one engine, on one port."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.server.serve import serve
from tests.server.served import Served, listening
from tests.server.support import until

pytestmark = pytest.mark.timeout(900)
COUNT = 2
WAIT_S = 240  # for what comes in a moment on a machine that does nothing else
LONG = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}
SEEDS = 4  # different answers: one that reaches another reader than its own is seen


@contextlib.contextmanager
def running(*more: str) -> Iterator[Served]:
    """A server whose directories lie in a folder of its own; when it ends nothing of it is left, however it ended."""
    flags = [
        "--port",
        "0",
        "--threads",
        "1",
        "--max-model-len",
        "1024",
        "--kv-blocks",
        "1100",
        "--drain-timeout",
        "240",
        *more,
    ]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # sockets lie in it: its path is short
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", folder)
            found = listening("-m", "penstock", "serve", "penstock-concierge", *flags, "--api-server-count", str(COUNT))
        try:
            until(lambda: len(fronts(found)) == COUNT and all(listens(found) for _ in range(20)), WAIT_S)
            yield found
        finally:
            there = found.children() if found.process.poll() is None else []
            found.process.kill()
            found.process.wait()
            assert psutil.wait_procs(there, WAIT_S)[1] == []
            until(lambda: not list(Path(folder).glob("penstock-*")), WAIT_S)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running() as found:
        yield found


def listens(served: Served) -> bool:
    return httpx.get(f"{served.url}/readyz", timeout=WAIT_S).status_code == 200


def command(process: psutil.Process) -> str:
    """Of a process; nothing of one that has gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def fronts(served: Served) -> list[psutil.Process]:
    return [child for child in served.children() if "penstock.server.worker" in command(child)]


def engine(served: Served) -> psutil.Process:
    (found,) = [child for child in served.children() if "penstock.engine.process" in command(child)]
    return found


def by_process(served: Served, count: int) -> list[httpx.Client]:
    """So many clients, each with a connection of its own."""
    clients = [httpx.Client(base_url=served.url, timeout=WAIT_S) for _ in range(count)]
    for client in clients:
        assert client.get("/livez").status_code == 200
    return clients


class Reader(threading.Thread):
    """Reads a stream on a client's connection.

    Attributes:
        seed: of its request.
        text: what it said.
        ended: whether the stream ended as it should.
        error: what was told instead.
        port: from which it asked.
    """

    def __init__(self, client: httpx.Client, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.seed = seed
        self.client, self.text, self.ended, self.error = client, "", False, ""
        self.port = 0
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.client.stream("POST", "/v1/completions", json={**LONG, "seed": self.seed}) as answer:
                self.port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.ended = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        self.error = self.error or str(event.get("error", ""))
                        self.text += event["choices"][0]["text"] if "choices" in event else ""
                        self.begun.set()
        except httpx.HTTPError as error:
            self.error = type(error).__name__
        self.begun.set()


def held(served: Served, count: int, texts: list[str]) -> list[Reader]:
    """So many readers, some without half of their text, of an engine that is stopped until it may go on."""
    while True:
        readers = [Reader(client, number % SEEDS) for number, client in enumerate(by_process(served, count))]
        assert all(reader.begun.wait(WAIT_S) for reader in readers)
        engine(served).suspend()
        settle(readers)
        if any(far(reader, texts) for reader in readers):
            return readers
        engine(served).resume()  # it was faster than this thread: once more
        for reader in readers:
            reader.join(WAIT_S)
        until(lambda: all(listens(served) for _ in range(20)), WAIT_S)


def settle(readers: list[Reader]) -> None:
    """Returns when what the engine had said before it was stopped has been read."""
    before: list[int] = []
    while before != (now := [len(reader.text) for reader in readers]):
        before = now
        time.sleep(1)


def far(reader: Reader, texts: list[str]) -> bool:
    """Whether it has not half of its text."""
    return 2 * len(reader.text) < len(texts[reader.seed])


def total(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics", timeout=WAIT_S).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{| )", line))


def test_an_http_process_is_replaced_and_an_engine_outlived(served: Served) -> None:
    alone = [Reader(client, seed) for seed, client in enumerate(by_process(served, SEEDS))]
    for reader in alone:
        reader.join(WAIT_S)
    texts = [reader.text for reader in alone]
    assert all(reader.ended for reader in alone) and len(set(texts)) == SEEDS and min(map(len, texts)) > 600
    readers = held(served, 16, texts)
    first_engine = engine(served).pid
    ports = {reader.port for reader in readers if far(reader, texts)}

    def kept(front: psutil.Process) -> int:
        return len(ports & {one.raddr.port for one in connections(front, served)})

    victim = max(fronts(served), key=kept)
    least = kept(victim)
    most = len(connections(victim, served))
    victim.send_signal(signal.SIGKILL)
    victim.wait(WAIT_S)
    engine(served).resume()
    for _ in range(50):  # the port is never closed: the next connection is another's
        assert httpx.get(f"{served.url}/livez", timeout=WAIT_S).status_code == 200
    for reader in readers:
        reader.join(WAIT_S)
    lost = [reader for reader in readers if not reader.ended]
    assert 1 <= least <= len(lost) <= most
    assert all(texts[reader.seed] == reader.text for reader in readers if reader.ended)
    assert all(texts[reader.seed].startswith(reader.text) for reader in lost)
    until(lambda: len(fronts(served)) == COUNT, WAIT_S)
    assert engine(served).pid == first_engine
    until(lambda: total(served, "penstock_requests_running") == 0, WAIT_S)
    cancelled = "penstock_engine_sequences_cancelled_total"  # some of the lost had been computed to their end
    until(lambda: least <= total(served, cancelled) <= len(lost), WAIT_S)

    readers = held(served, 8, texts)
    engine(served).send_signal(signal.SIGKILL)
    for reader in readers:
        reader.join(WAIT_S)
    assert all((reader.ended, reader.error, reader.text) == (True, "", texts[reader.seed]) for reader in readers)
    assert total(served, "penstock_engine_restarts_total") == 1
    until(lambda: 1 <= total(served, "penstock_requests_resumed_total") <= 8, WAIT_S)
    told = "penstock_generation_tokens_total"  # the same, whoever is asked
    until(lambda: len({total(served, told) for _ in range(20)}) == 1, WAIT_S)


def connections(front: psutil.Process, served: Served) -> list[Any]:
    """Those that clients have to a process."""
    port = int(served.url.rsplit(":", 1)[1])
    return [one for one in front.net_connections("tcp") if one.status == "ESTABLISHED" and one.laddr.port == port]


def test_what_one_keeps_all_find_and_figures_are_of_all(served: Served) -> None:
    made = httpx.post(
        f"{served.url}/v1/responses", json={"input": "Hello", "max_output_tokens": 16}, timeout=WAIT_S
    ).json()
    clients = by_process(served, 12)
    assert {client.get(f"/v1/responses/{made['id']}").status_code for client in clients} == {200}
    told = clients[0].post("/v1/responses", json={"input": "Hello", "background": True})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "background")
    counted = [total(served, "penstock_http_requests_total") for _ in range(6)]
    assert counted == sorted(counted)
    name = "penstock_http_requests_total"
    until(lambda: total(served, name) >= counted[0] + 6, WAIT_S)  # once their answers are told


def test_the_last_requests_are_told_whoever_took_them(served: Served) -> None:
    clients = by_process(served, 12)
    ids = {f"req-{number}" for number in range(12)}
    for client, name in zip(clients, sorted(ids), strict=True):
        body = {"prompt": "Hello", "max_tokens": 1}
        client.post("/v1/completions", json=body, headers={"X-Request-Id": name}).raise_for_status()

    def told(client: httpx.Client) -> list[str]:
        return [one["request_id"] for one in client.get("/requests").json()["requests"]]

    until(lambda: all(ids <= set(told(client)) for client in clients), WAIT_S)  # once their answers are told
    assert [name for name in told(clients[0]) if name in ids] == sorted(ids)
    began = [one["began"] for one in clients[0].get("/requests").json()["requests"]]
    assert began == sorted(began)


def test_a_silent_http_process_keeps_nobody_else(served: Served) -> None:
    """What it has counted is told by others meanwhile, and the engine's death is nobody's end but, perhaps, its own."""
    alone = [Reader(client, seed) for seed, client in enumerate(by_process(served, SEEDS))]
    for reader in alone:
        reader.join(WAIT_S)
    texts = [reader.text for reader in alone]
    before = total(served, "penstock_http_requests_total")
    silent = max(fronts(served), key=lambda front: len(connections(front, served)))
    readers = held(served, 16, texts)
    silent.suspend()
    engine(served).send_signal(signal.SIGKILL)
    own = {one.raddr.port for one in connections(silent, served)}
    others = [reader for reader in readers if reader.port not in own]
    for reader in others:
        reader.join(WAIT_S)
    assert all((reader.ended, reader.error, reader.text) == (True, "", texts[reader.seed]) for reader in others)
    until(lambda: total(served, "penstock_http_requests_total") > before, WAIT_S)  # this question counts itself
    with contextlib.suppress(psutil.NoSuchProcess):  # its host may have done so
        silent.kill()
    for reader in readers:
        reader.join(WAIT_S)
        assert texts[reader.seed].startswith(reader.text)
    until(lambda: len(fronts(served)) == COUNT, WAIT_S)
    until(lambda: total(served, "penstock_http_requests_total") > before, WAIT_S)


def test_sigterm_drains_all() -> None:
    with running() as served:
        readers = [Reader(client) for client in by_process(served, 6)]
        assert all(reader.begun.wait(WAIT_S) for reader in readers)
        there = served.children()
        served.process.send_signal(signal.SIGTERM)
        for reader in readers:
            reader.join(WAIT_S)
        assert all(reader.ended for reader in readers)
        assert served.process.wait(WAIT_S) == 0
        assert psutil.wait_procs(there, WAIT_S)[1] == []


class Written(threading.Thread):
    """Reads a Kobold stream of a name of its own."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        super().__init__(daemon=True)
        self.client, self.name, self.begun = client, name, threading.Event()
        self.start()

    def run(self) -> None:
        body = {"prompt": "Hello", "max_length": 900, "max_context_length": 1024, "bypass_eos": True}
        with self.client.stream("POST", "/api/extra/generate/stream", json={**body, "genkey": self.name}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.begun.set()
        self.begun.set()


def test_an_answer_is_asked_for_and_ended_whichever_process_writes_it(served: Served) -> None:
    """The engine is stopped meanwhile, so that no answer comes to its end."""
    others, live, turn = by_process(served, 8), list[Written](), 0
    while not live:
        turn += 1
        writers = [Written(client, f"k{turn}-{at}") for at, client in enumerate(by_process(served, 8))]
        assert all(writer.begun.wait(WAIT_S) for writer in writers)
        engine(served).suspend()
        time.sleep(1)  # what is on its way is read
        live = [writer for writer in writers if writer.is_alive()]
        if not live:
            engine(served).resume()
    try:
        for other, writer in zip(others, live, strict=False):
            asked = {"genkey": writer.name}
            assert other.post("/api/extra/generate/check", json=asked).json()["results"][0]["text"]
            assert other.post("/api/extra/abort", json=asked).json()["success"] == "true"
        assert others[0].post("/api/extra/abort", json={"genkey": "nobody"}).json()["success"] == "false"
        unknown = others[0].post("/v1/chat/completions/control", json={"id": "chatcmpl-x", "action": "reasoning_end"})
        assert unknown.status_code == 404
    finally:
        engine(served).resume()
    for writer in live:
        writer.join(WAIT_S)
        assert not writer.is_alive()
    until(lambda: all(listens(served) for _ in range(20)), WAIT_S)


def test_the_hosts_death_is_everybodys(served: Served) -> None:
    """The last test of this server."""
    until(lambda: len(served.children()) == COUNT + 1, WAIT_S)
    there = served.children()
    served.process.kill()
    assert psutil.wait_procs(there, WAIT_S)[1] == []


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_processes_that_cannot_be(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"--api-server-count is {count}; allowed: 1 to 64"):
        serve(EngineOptions(), ServerOptions(port=0, api_server_count=count))
