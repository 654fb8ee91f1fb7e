"""What clients see when a part of a server is killed: an HTTP process, the engine, the host, under streams.

A real `penstock serve` on loopback, with one HTTP process, which is the host too, and with several. While 32 streams
run, a part is ended with SIGKILL. Told is how the streams ended compared with an undisturbed one, the longest pause
between two of their tokens, whether the port refused a connection meanwhile, what was started again, and what is left
behind when all is over. Passes if nobody got another text, nothing but a dead HTTP process's streams was lost, and
nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

HTTP, ENGINE, HOST = "an HTTP process", "the engine", "the host"
_LOOK_S = 0.02


@dataclass
class Stream:
    """What a client got.

    Attributes:
        text: so far.
        ended: how: "" while it runs, "whole", "cut", or the error that was told.
        pause: longest time between two of its events, seconds.
    """

    text: str = ""
    ended: str = ""
    pause: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, url: str, tokens: int) -> None:
        """Asks, and reads to the end."""
        asked = {"prompt": "Hello, I would like", "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
        last: float | None = None
        try:
            async with (
                httpx.AsyncClient(trust_env=False, timeout=300) as client,
                client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
            ):
                async for line in answer.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        self.ended = self.ended or "whole"
                        break
                    now, last = time.perf_counter(), last or time.perf_counter()
                    self.pause, last = max(self.pause, now - last), now
                    event = json.loads(line[6:])
                    if "error" in event:
                        self.ended = str(event["error"]["message"])
                    else:
                        self.text += event["choices"][0]["text"]
                        self.begun.set()
        except httpx.HTTPError:
            pass
        self.ended = self.ended or "cut"
        self.begun.set()


def processes(server: ServerChild) -> dict[str, list[psutil.Process]]:
    """The living processes of a server, by what they are."""
    found: dict[str, list[psutil.Process]] = {HOST: [server.http], HTTP: [], ENGINE: []}
    for child in server.http.children():
        try:
            command = " ".join(child.cmdline())
        except psutil.Error:
            continue
        for kind, module in ((HTTP, "penstock.server.worker"), (ENGINE, "penstock.engine.process")):
            if module in command:
                found[kind].append(child)
    return found


async def knock(url: str, until: asyncio.Event) -> int:
    """How many connections the port refused until then."""
    host, port = url.removeprefix("http://").split(":")
    refused = 0
    while not until.is_set():
        try:
            with socket.create_connection((host, int(port)), timeout=5):
                pass
        except ConnectionRefusedError:
            refused += 1
        await asyncio.sleep(_LOOK_S)
    return refused


async def kill(server: ServerChild, what: str, streams: int, tokens: int) -> dict[str, Any]:
    """Kills a part while streams run; what came of it."""
    alone = Stream()
    await alone.read(server.url, tokens)
    there = [Stream() for _ in range(streams)]
    reading = [asyncio.create_task(stream.read(server.url, tokens)) for stream in there]
    await asyncio.gather(*(stream.begun.wait() for stream in there))
    before = processes(server)
    over = asyncio.Event()
    knocking = asyncio.create_task(knock(server.url, over)) if what != HOST else None
    victim = max(before[what], key=lambda process: len(process.net_connections("tcp")))
    os.kill(victim.pid, signal.SIGKILL)
    await asyncio.gather(*reading)
    over.set()
    refused = None if knocking is None else await knocking
    again = {}
    if what != HOST:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = processes(server)
            if len(now[HTTP]) == len(before[HTTP]) and len(now[ENGINE]) == 1:
                break
            await asyncio.sleep(_LOOK_S)
        again = {kind: len(set(now[kind]) - set(before[kind])) for kind in (HTTP, ENGINE)}
    return {
        "killed": what,
        "whole": sum(stream.ended == "whole" and stream.text == alone.text for stream in there),
        "other_text": sum(not alone.text.startswith(stream.text) for stream in there),
        "cut": sum(stream.ended == "cut" for stream in there),
        "told": [stream.ended for stream in there if stream.ended not in ("whole", "cut")],
        "pause_s": max((stream.pause for stream in there if stream.ended == "whole"), default=None),
        "undisturbed_pause_s": alone.pause,
        "refused": refused,
        "started_again": again,
    }


@contextmanager
def apart() -> Iterator[Path]:
    """A folder in which servers keep what they keep in temporary ones."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        os.environ["TMPDIR"] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before


def left(folder: Path, there: Sequence[psutil.Process], shared: set[str]) -> list[str]:
    """What is left of a server: processes, directories with sockets, shared memory."""
    _, alive = psutil.wait_procs(there, timeout=30)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and list(folder.iterdir()):
        time.sleep(_LOOK_S)
    found = [f"process {process.pid}" for process in alive]
    found += [str(path) for path in folder.iterdir()]
    return found + [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared]


def tried(flags: Sequence[str], what: str, streams: int, tokens: int) -> dict[str, Any]:
    """One part of one server, killed."""
    shared = set(os.listdir("/dev/shm"))
    with apart() as folder:
        with serve(flags) as server:
            there = [process for kind in processes(server).values() for process in kind]
            found = asyncio.run(kill(server, what, streams, tokens))
            if what != HOST:
                there += [process for kind in processes(server).values() for process in kind]
        return {**found, "left": left(folder, there, shared)}


def main(given: Sequence[str] | None = None) -> None:
    """Runs it; fails if a client got another text, more was lost than the dead process's, or something is left."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="penstock-concierge")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--api-server-count", type=int, default=3)
    chosen = parser.parse_args(given)
    rows, figures, failed = [], [], []
    for count in (1, chosen.api_server_count):
        for what in (ENGINE, HTTP, HOST) if count > 1 else (ENGINE, HOST):
            flags = [chosen.model, "--max-model-len", "1024", "--max-num-seqs", "64", "--api-server-count", str(count)]
            found = {"http_processes": count, **tried(flags, what, chosen.streams, chosen.tokens)}
            figures.append(found)
            pause = "-" if found["pause_s"] is None else f"{found['pause_s']:.2f}"
            again = ", ".join(f"{number} x {kind}" for kind, number in found["started_again"].items() if number)
            told = "; ".join(sorted(set(found["told"]))) or "-"
            rows.append(
                (count, what, found["whole"], found["cut"], told, pause, found["refused"], again or "nothing",
                 ", ".join(found["left"]) or "nothing")
            )  # fmt: skip
            lost = found["cut"] + len(found["told"])
            if found["other_text"] or found["left"] or found["refused"] or (lost and what == ENGINE):
                failed.append(found)
    columns = (
        "HTTP processes", "killed", "streams whole, as undisturbed", "cut", "told", "longest pause, s",
        "connections refused", "started again", "left behind",
    )  # fmt: skip
    report(
        "kills", chosen.results, {"streams": chosen.streams, "tokens": chosen.tokens, "runs": figures}, columns, rows
    )
    if failed:
        raise SystemExit(f"failed: {failed}")


if __name__ == "__main__":
    main()
