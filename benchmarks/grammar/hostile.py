"""Hostile grammars beside quiet streams: are the streams disturbed, is everything answered, does memory stay flat?

A few clients read streams all the time. First alone; then while others send grammars that are costly to compile or to
follow, and templates that would be costly to render; then while others send `--schemas` different schemas, none
twice. Reported are the times between the streams' events in each phase, answers by status, the longest answer, and the
resident memory of the engine over the second half of the schemas. Exit status 1 if an answer is a 5xx or lost.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve
from benchmarks.soak import MIB, slope

ASK = {"prompt": "The list begins:", "max_tokens": 24, "temperature": 0}
COLUMNS = ("phase", "streams' ms p50", "p99", "longest", "answers", "longest answer, s")


def bombs() -> list[dict[str, Any]]:
    """Bodies, each of which would be costly without limits."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"anyOf": [{"type": "array", "items": deep}, {"type": "object", "properties": {"a": deep}}]}
        if len(json.dumps(deep)) > 200_000:
            break
    chain = "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a" r{i + 1}' for i in range(2000)) + '\nr2000 ::= "b"'
    many = {f"p{i}": {"type": "string", "pattern": f"^(a|b{i}){{1,50}}$"} for i in range(2000)}
    return [
        {"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100})b"},
        {"guided_regex": "(a|aa|aaa|aaaa)*" * 30 + "c"},
        {"guided_regex": "|".join(f"(x{i}[a-z]*y){{3}}" for i in range(3000))},
        {"guided_json": deep},
        {"guided_json": {"type": "object", "properties": many, "required": list(many)}},
        {"guided_json": {"enum": [f"value {i}" * 5 for i in range(20_000)]}},
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 20}}}},
        {"guided_grammar": "root ::= r0\n" + chain},
        {"guided_grammar": 'root ::= (root root | "a" | "")*'},
        {"guided_choice": ["x" * 2000 + str(i) for i in range(3000)]},
    ]


def schemas() -> Iterator[dict[str, Any]]:
    """Schemas, all different."""
    for number in itertools.count():
        keys = {f"key_{number}_{i}": {"type": ("string", "integer", "boolean")[(number + i) % 3]} for i in range(4)}
        yield {"guided_json": {"type": "object", "properties": keys, "required": list(keys)}}


@dataclass(slots=True)
class Phase:
    """What happened while something was sent.

    Attributes:
        gaps: seconds between events of the quiet streams.
        statuses: answers by status, "lost" for none.
        longest: seconds the slowest answer took.
    """

    gaps: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0

    def figures(self) -> dict[str, Any]:
        p50, p99 = (float(q) * 1e3 for q in np.percentile(self.gaps, (50, 99)))
        quiet = {"gap_p50_ms": p50, "gap_p99_ms": p99, "gap_longest_ms": max(self.gaps) * 1e3, "events": len(self.gaps)}
        return {**quiet, "statuses": dict(self.statuses), "longest_answer_s": self.longest}


async def quiet_stream(client: httpx.AsyncClient, phase: Phase, done: asyncio.Event) -> None:
    """Reads streams one after the other."""
    body = {**ASK, "max_tokens": 512, "stream": True, "ignore_eos": True}
    while not done.is_set():
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            last = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        phase.gaps.append(now - last)
                    last = now
                if done.is_set():
                    break


async def send(client: httpx.AsyncClient, phase: Phase, body: dict[str, Any]) -> None:
    """One request, read whole."""
    began = time.perf_counter()
    try:
        answer = await client.post("/v1/completions", json={**ASK, "max_tokens": 2} | body)
        phase.statuses[str(answer.status_code)] += 1
    except httpx.HTTPError as error:
        phase.statuses[f"lost ({type(error).__name__})"] += 1
    phase.longest = max(phase.longest, time.perf_counter() - began)


async def during(client: httpx.AsyncClient, streams: int, work: Callable[[Phase], Awaitable[None]]) -> Phase:
    """Runs the quiet streams beside some work."""
    phase, done = Phase(), asyncio.Event()
    readers = [asyncio.ensure_future(quiet_stream(client, phase, done)) for _ in range(streams)]
    await asyncio.sleep(0.5)
    phase.gaps.clear()
    await work(phase)
    done.set()
    await asyncio.gather(*readers)
    return phase


async def attack(server: ServerChild, streams: int, senders: int, count: int, seconds: float) -> dict[str, Any]:
    """All phases; figures by phase, and the engine's memory."""
    memory: list[tuple[float, float]] = []
    engine, fresh = server.engine(), schemas()

    async def nothing(_: Phase) -> None:
        await asyncio.sleep(seconds)

    async def bombing(phase: Phase) -> None:
        until = time.monotonic() + seconds
        for number, body in enumerate(itertools.cycle(bombs())):
            if time.monotonic() > until and number >= len(bombs()):
                return
            await send(client, phase, body)

    async def sending(phase: Phase) -> None:
        async def one() -> None:
            while phase.statuses.total() < count:
                await send(client, phase, next(fresh))
                if phase.statuses.total() % max(1, count // 200) == 0:
                    memory.append((time.monotonic(), engine.memory_info().rss))

        await asyncio.gather(*(one() for _ in range(senders)))

    limits = httpx.Limits(max_connections=streams + senders + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, limits=limits) as client:
        phases = {"alone": nothing, "bombs": bombing, "schemas": sending}
        found = {name: (await during(client, streams, work)).figures() for name, work in phases.items()}
    half = memory[len(memory) // 2 :]
    megabytes = [rss / MIB for _, rss in memory]
    return {
        "phases": found,
        "engine_rss_mib": {"first": megabytes[0], "half": megabytes[len(megabytes) // 2], "last": megabytes[-1]},
        "engine_growth_mib_per_minute": 60 * slope(half) / MIB,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a folder or file; by default the bundled model, which outruns its readers")
    parser.add_argument("--name", default="grammar_hostile", help="of the results' file")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--schemas", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    model = (given.model, "--max-model-len", "2048") if given.model else ()
    with serve((*model, "--kv-cache-memory", "512MiB")) as server:
        found = asyncio.run(attack(server, given.streams, given.senders, given.schemas, given.seconds))
    rows = [
        (name, f["gap_p50_ms"], f["gap_p99_ms"], f["gap_longest_ms"], f["statuses"] or "–", f["longest_answer_s"])
        for name, f in found["phases"].items()
    ]
    setup = {name: getattr(given, name) for name in ("streams", "senders", "schemas")}
    setup["model"] = Path(given.model or "penstock-concierge").name
    report(given.name, given.results, {**setup, **found}, COLUMNS, rows)
    print(found["engine_rss_mib"], found["engine_growth_mib_per_minute"])
    bad = [status for f in found["phases"].values() for status in f["statuses"] if not status.startswith(("2", "4"))]
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
