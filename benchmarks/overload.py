"""A server that is asked for ten times what it can do: how much it still does, and what the others are told, how fast.

First as many clients as keep every slot busy ask one request after the other: the requests they finish a second are the
best there is (measured again in the end; the mean counts, as others may use the machine too). Then requests come at a
fixed rate, ten times that, from clients that wait for nobody and give up after a while. Each has a connection of its
own. Goodput is counted while requests come, from when the first clients would have given up: by then a queue that is
too long is full of requests that will not be answered in time. The clients take processor time from the server.

Passes if goodput is at least 0.9 of the best, no request failed but with 429, and refusals took at most 50 ms (median).
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

SLOTS = 16
RAMP_S = 5.0
FACTOR = 10.0
LEAST_SHARE, MOST_REFUSAL_S = 0.9, 0.05


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request.

    Attributes:
        began: seconds since the phase began.
        took: seconds until its answer was there, or the client gave up.
        status: of the answer; 0 if the client gave up or lost its connection.
        retry_after: what the answer said of it, seconds.
        code: the error's code.
    """

    began: float
    took: float
    status: int
    retry_after: int | None = None
    code: str = ""

    @property
    def ended(self) -> float:
        return self.began + self.took


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked for.

    Attributes:
        url: the server's.
        prompt_words: words of a prompt, no two of which are alike.
        max_tokens: tokens of every answer.
        patience: seconds after which a client gives up.
    """

    url: str
    prompt_words: int
    max_tokens: int
    patience: float


async def ask(load: Load, number: int, since: float) -> Outcome:
    """One request over a connection of its own."""
    began = time.monotonic() - since
    try:
        async with asyncio.timeout(load.patience):
            head, body = await exchange(load, number)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        return Outcome(began, time.monotonic() - since - began, 0)
    took = time.monotonic() - since - began
    status = int(head.split(" ", 2)[1])
    headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
    error = json.loads(body).get("error") or {}
    retry = headers.get("retry-after")
    return Outcome(began, took, status, None if retry is None else int(retry), error.get("code") or "")


async def exchange(load: Load, number: int) -> tuple[str, bytes]:
    """Head and body of the answer."""
    rng = random.Random(number)
    prompt = " ".join(
        rng.choice(("table", "train", "hotel", "taxi", "north", "cheap")) for _ in range(load.prompt_words)
    )
    body = json.dumps(
        {"prompt": f"{number} {prompt}", "max_tokens": load.max_tokens, "temperature": 0, "ignore_eos": True}
    )
    address = urlsplit(load.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        return head.decode("latin-1"), await reader.read()
    finally:
        writer.close()


async def closed_loop(load: Load, clients: int, seconds: float) -> float:
    """Requests finished a second by clients that ask one after the other, without the first few seconds."""
    since, outcomes = time.monotonic(), list[Outcome]()

    async def client(first: int) -> None:
        number = first
        while time.monotonic() - since < seconds:
            outcomes.append(await ask(load, number, since))
            number += clients

    await asyncio.gather(*(client(10**6 + first) for first in range(clients)))
    return rate(outcomes, RAMP_S, seconds)


async def open_loop(load: Load, per_second: float, seconds: float) -> list[Outcome]:
    """Requests at a fixed rate, whatever becomes of them."""
    since = time.monotonic()
    tasks: list[asyncio.Task[Outcome]] = []
    while (now := time.monotonic() - since) < seconds:
        while len(tasks) < now * per_second:
            tasks.append(asyncio.create_task(ask(load, len(tasks), since)))
        await asyncio.sleep(0.5 / per_second)
    return await asyncio.gather(*tasks)


def rate(outcomes: Sequence[Outcome], start: float, end: float) -> float:
    """Answers a second within a time."""
    return sum(outcome.status == 200 and start <= outcome.ended < end for outcome in outcomes) / (end - start)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def verdict(best: float, outcomes: Sequence[Outcome], start: float, seconds: float) -> dict[str, Any]:
    """The figures, and whether they are in order."""
    goodput = rate(outcomes, start, seconds)
    answered = [outcome for outcome in outcomes if outcome.status == 200]
    refused = [outcome for outcome in outcomes if outcome.status not in (0, 200)]
    taken = len(outcomes) - len(refused)
    told = [outcome.retry_after for outcome in refused if outcome.retry_after is not None]
    statuses = Counter(str(outcome.status or "gave up") for outcome in outcomes)
    latencies = [outcome.took for outcome in refused]
    return {
        "best_requests_per_s": best,
        "offered_requests_per_s": len(outcomes) / seconds,
        "goodput_requests_per_s": goodput,
        "goodput_share_of_best": goodput / best,
        "statuses": dict(statuses),
        "codes": dict(Counter(outcome.code for outcome in refused)),
        "taken_that_finished": len(answered) / taken if taken else 1.0,
        "answer_s_p50_p99": [quantile([outcome.took for outcome in answered], share) for share in (0.5, 0.99)],
        "refusal_s_p50_p99": [quantile(latencies, share) for share in (0.5, 0.99)],
        "retry_after_min_median_max": [min(told), statistics.median(told), max(told)] if told else [],
        "passed": goodput >= LEAST_SHARE * best
        and set(statuses) <= {"200", "429"}
        and quantile(latencies, 0.5) <= MOST_REFUSAL_S,
    }


def measure(server: ServerChild, load: Load, seconds: float) -> dict[str, Any]:
    """All phases."""
    best = asyncio.run(closed_loop(load, 2 * SLOTS, RAMP_S + 10))
    before = server.http.cpu_times()
    outcomes = asyncio.run(open_loop(load, FACTOR * best, seconds))
    after = server.http.cpu_times()
    again = asyncio.run(closed_loop(load, 2 * SLOTS, RAMP_S + 10))
    spent = after.user + after.system - before.user - before.system
    found = verdict((best + again) / 2, outcomes, load.patience, seconds)
    return {**found, "http_cpu_ms_per_request": 1000 * spent / len(outcomes)}


def main() -> None:
    """Overloads one server; exit code 1 if it did not pass."""
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="for which requests come")
    parser.add_argument("--patience", type=float, default=60, help="seconds after which a client gives up")
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()
    with serve(("--max-num-seqs", str(SLOTS), "--kv-cache-memory", "256MiB")) as server:
        load = Load(server.url, given.prompt_words, given.max_tokens, given.patience)
        found = measure(server, load, given.seconds)
    setup = {"slots": SLOTS, "factor": FACTOR, "seconds": given.seconds, "patience_s": given.patience}
    shape = {"prompt_words": given.prompt_words, "max_tokens": given.max_tokens}
    rows = [(name, json.dumps(value)) for name, value in found.items()]
    report("overload", given.results, {**setup, **shape, **found}, ("what", "figure"), rows)
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
