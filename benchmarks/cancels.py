"""Thousands of streams whose clients leave after the first piece of text, twenty at a time.

First answers that would never end, of which every one has to be cancelled; then a tenth as many that end by themselves
within a few tokens, where a client may come too late: those have finished, by the engine's own count. Clients leave as
clients do: they close, reset, or close behind a second request they have sent on the connection.

Passes if every endless answer was cancelled and counted so by the engine, the server's answers and HTTP, if the other
requests add up, and if no block is in use afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import struct
import time
from urllib.parse import urlsplit

import httpx

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

CLIENTS = 20
ENDLESS_TOKENS = 400
WAYS = ("close", "reset", "second request")
KV_CACHE = "64MiB"
FIGURES = {
    "running": "penstock_requests_running",
    "waiting": "penstock_requests_waiting",
    "blocks_in_use": "penstock_kv_cache_usage_ratio",
    "tokens": "penstock_generation_tokens_total",
    "steps": "penstock_engine_steps_total",
    "engine_finished": "penstock_engine_sequences_finished_total",
    "engine_cancelled": "penstock_engine_sequences_cancelled_total",
}


def figures(server: ServerChild) -> dict[str, float]:
    """What the server counts, by engine, by answers and by HTTP."""
    found = {name: server.metric(metric) for name, metric in FIGURES.items()}
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    for name, pattern in (
        ("answers_cancelled", r'penstock_requests_finished_total\{finished_reason="cancelled".*\} (\S+)'),
        ("http_499", r'penstock_http_requests_total\{.*completions",status="499"\} (\S+)'),
        ("http_200", r'penstock_http_requests_total\{.*completions",status="200"\} (\S+)'),
    ):
        found[name] = sum(float(number) for number in re.findall(pattern, text))
    return found


def ask(netloc: str, number: int, endless: bool) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"{number}: a table for two, please."}],
            "max_tokens": ENDLESS_TOKENS,
            "ignore_eos": endless,
            "stream": True,
        }
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def leave(url: str, number: int, endless: bool) -> None:
    """One stream, read up to its first text."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(ask(address.netloc, number, endless))
    data = b""
    while b'"content":"' not in data.replace(b'"content":""', b""):
        piece = await reader.read(65536)
        if not piece:
            raise RuntimeError(f"stream {number} ended before its first text: {data[:300]!r}")
        data += piece
    way = WAYS[number % len(WAYS)]
    if way == "reset":
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif way == "second request":
        writer.write(ask(address.netloc, number, endless))
    writer.close()


async def crowd(url: str, streams: int, endless: bool) -> None:
    numbers = itertools.count()

    async def client() -> None:
        while (number := next(numbers)) < streams:
            await leave(url, number, endless)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


def phase(server: ServerChild, streams: int, *, endless: bool) -> dict[str, float]:
    """What was counted meanwhile, and how things are when all is quiet."""
    before, started = figures(server), time.monotonic()
    asyncio.run(crowd(server.url, streams, endless))
    took = time.monotonic() - started
    deadline = time.monotonic() + 5
    while (now := figures(server))["running"] + now["waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    gauges = ("running", "waiting", "blocks_in_use")
    grown = {name: value if name in gauges else value - before[name] for name, value in now.items()}
    return {"streams": streams, "seconds": took, **grown, "tokens_each": grown["tokens"] / streams}


def in_order(endless: dict[str, float], ending: dict[str, float]) -> bool:
    """Whether all that was counted adds up."""
    quiet = all(not found[name] for found in (endless, ending) for name in ("running", "waiting", "blocks_in_use"))
    counted = {endless[name] for name in ("engine_cancelled", "answers_cancelled", "http_499")}
    return (
        quiet
        and counted == {endless["streams"]}
        and not endless["engine_finished"]
        and not endless["http_200"]
        and ending["engine_finished"] + ending["engine_cancelled"] >= ending["streams"]
        and ending["http_200"] <= ending["engine_finished"]
    )


def main() -> None:
    """Exit code 1 if a stream was missed."""
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, default=10_000)
    given = parser.parse_args()
    with serve(("--kv-cache-memory", KV_CACHE)) as server:
        endless = phase(server, given.streams, endless=True)
        ending = phase(server, given.streams // 10, endless=False)
    found = {"endless": endless, "ending": ending, "passed": in_order(endless, ending)}
    rows = [(name, endless[name], ending[name]) for name in endless]
    report("cancels", given.results, {"clients": CLIENTS, **found}, ("what", "endless", "ending"), rows)
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
