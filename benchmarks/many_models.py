"""Five models of which two fit, asked at random while their engines are killed: what clients get, what memory is taken.

A real `penstock serve --models` on loopback. First every model is loaded by itself: how long that takes the first time
and again, and what its engine takes of what was planned for it once its cache has been filled. Then requests are drawn,
half of them streams, eight at a time, and now and then an engine is killed (SIGKILL). Passes if each request was
answered, or refused or ended with a sentence, and the engines never took more than the budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

MIB = 2**20
MODELS = ("one", "two", "three", "four", "five")
AT_ONCE = 8
FILLING = 64  # prompts of most of a context, which touch all of a cache


@dataclass
class Tally:
    """What clients got: how often what, and each kind of refusal's sentence; memory over time, bytes."""

    got: Counter[str] = field(default_factory=Counter)
    sentences: Counter[str] = field(default_factory=Counter)
    nothing: list[str] = field(default_factory=list)
    killed: int = 0
    taken: list[int] = field(default_factory=list)
    planned: list[int] = field(default_factory=list)
    live: list[int] = field(default_factory=list)


def engines(server: ServerChild) -> list[psutil.Process]:
    """The engine processes there are."""
    found = []
    for child in server.http.children():
        with contextlib.suppress(psutil.Error):
            if "penstock.engine.process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def taken(process: psutil.Process) -> int:
    """Bytes that a process alone has in memory; 0 for one that has gone."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def planned(server: ServerChild) -> dict[str, int]:
    """Bytes planned for each model that is loaded."""
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    found = re.findall(r'^penstock_model_memory_bytes\{model_name="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found if float(value)}


def load(server: ServerChild, name: str) -> float:
    """Seconds until the first token of a model that is not loaded."""
    began = time.perf_counter()
    body = {"model": name, "prompt": "Hello", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status()
    return time.perf_counter() - began


def fill(server: ServerChild, name: str, draw: random.Random, length: int) -> None:
    """Has a model's cache written to its end: prompts that share nothing."""
    for _ in range(FILLING):
        ids = [draw.randrange(5, 300) for _ in range(length)]
        body = {"model": name, "prompt": ids, "max_tokens": 1}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status()


def alone(server: ServerChild, draw: random.Random, length: int) -> dict[str, dict[str, float]]:
    """Of every model by itself: seconds of its first load and of the next, bytes planned and taken."""
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        first = load(server, name)
        httpx.post(f"{server.url}/models/unload", json={"model": name}, timeout=60, trust_env=False)
        again = [load(server, name)]
        fill(server, name, draw, length)
        room, held = planned(server)[name], sum(map(taken, engines(server)))
        for _ in range(2):
            httpx.post(f"{server.url}/models/unload", json={"model": name}, timeout=60, trust_env=False)
            again.append(load(server, name))
        httpx.post(f"{server.url}/models/unload", json={"model": name}, timeout=60, trust_env=False)
        found[name] = {"first_s": first, "again_s": statistics.median(again), "planned": room, "taken": held}
    return found


async def ask(client: httpx.AsyncClient, url: str, draw: random.Random, tally: Tally) -> None:
    """One request, and what came of it."""
    stream = draw.random() < 0.5
    body = {"model": draw.choice(MODELS), "prompt": "Hello, I would like", "stream": stream, "ignore_eos": True}
    body["max_tokens"] = draw.randint(1, 60)
    try:
        answer = await client.post(f"{url}/v1/completions", json=body, timeout=120)
    except httpx.HTTPError as failure:
        tally.nothing.append(f"{type(failure).__name__}: {failure}")
        return
    last = answer.text.strip().rsplit("data: ", 1)[-1] if stream and answer.status_code == 200 else answer.text
    error = None if last == "[DONE]" else json.loads(last).get("error")
    if error is None:
        tally.got["answered"] += 1
    else:
        tally.got["refused" if answer.status_code != 200 else "ended with an error"] += 1
        tally.sentences[f"{answer.status_code}: {error['message']}"] += 1


async def killing(server: ServerChild, draw: random.Random, tally: Tally, kills: int, until: asyncio.Event) -> None:
    for _ in range(kills):
        await asyncio.sleep(draw.uniform(0.5, 2.5))
        there = engines(server)
        if until.is_set():
            return
        if there:
            draw.choice(there).send_signal(signal.SIGKILL)
            tally.killed += 1


async def watching(server: ServerChild, tally: Tally, until: asyncio.Event) -> None:
    while not until.is_set():
        there = engines(server)
        tally.live.append(len(there))
        tally.taken.append(sum(map(taken, there)))
        tally.planned.append(sum((await asyncio.to_thread(planned, server)).values()))
        await asyncio.sleep(0.1)


async def storm(server: ServerChild, draw: random.Random, requests: int, kills: int) -> Tally:
    """All requests, while engines are killed."""
    tally, ended, room = Tally(), asyncio.Event(), asyncio.Semaphore(AT_ONCE)
    beside = [asyncio.create_task(killing(server, draw, tally, kills, ended))]
    beside.append(asyncio.create_task(watching(server, tally, ended)))

    async def one(client: httpx.AsyncClient) -> None:
        async with room:
            await ask(client, server.url, draw, tally)

    async with httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=AT_ONCE)) as client:
        await asyncio.gather(*(one(client) for _ in range(requests)))
    ended.set()
    await asyncio.gather(*beside)
    return tally


def listed(folder: Path, model: Path, length: int) -> Path:
    """A list of five models: copies of one, since what they say matters to nobody here."""
    about: list[str] = ["models:"]
    for name in MODELS:
        shutil.copytree(model, folder / name)
        about.append(f"  {name}: {{model: {folder / name}, options: {{max_model_len: {length}}}}}")
    path = folder / "models.yaml"
    path.write_text("\n".join(about), encoding="utf-8")
    return path


def measured(server: ServerChild, seed: int, requests: int, kills: int, length: int) -> dict[str, Any]:
    """Everything."""
    draw = random.Random(seed)
    single = alone(server, draw, length - 8)
    tally = asyncio.run(storm(server, draw, requests, kills))
    return {
        "alone": single,
        "requests": requests,
        "got": dict(tally.got),
        "sentences": dict(tally.sentences),
        "nothing": tally.nothing,
        "killed": tally.killed,
        "most_engines": max(tally.live),
        "most_taken": max(tally.taken),
        "most_planned": max(tally.planned),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Runs it; fails if a request got nothing, or engines took more than the budget."""
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=None, help="folder of the model that is copied five times")
    parser.add_argument("--memory-mib", type=int, default=400, help="the budget, of which two models are to fit")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024, help="the models' context, tokens")
    parser.add_argument("--api-server-count", type=int, default=1, help="processes that speak HTTP")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(given)
    model = chosen.model or chosen.data / "models" / "penstock-concierge"
    with tempfile.TemporaryDirectory() as folder:
        models = listed(Path(folder), model, chosen.length)
        flags = ["--models", str(models), "--memory", f"{chosen.memory_mib}MiB", "--pack-cache", f"{folder}/packed"]
        flags += ["--api-server-count", str(chosen.api_server_count)]
        with serve(flags) as server:
            found = measured(server, chosen.seed, chosen.requests, chosen.kills, chosen.length)
    budget = chosen.memory_mib * MIB
    single = list(found["alone"].values())
    rows = [
        ("first load, s", statistics.median(one["first_s"] for one in single)),
        ("switch to a model that was loaded before, s (median)", statistics.median(o["again_s"] for o in single)),
        ("planned for one, MiB", single[0]["planned"] / MIB),
        ("taken by one once its cache is full, MiB", statistics.median(one["taken"] for one in single) / MIB),
        ("requests", found["requests"]),
        *found["got"].items(),
        ("got nothing", len(found["nothing"])),
        ("engines killed", found["killed"]),
        ("engines at once, most", found["most_engines"]),
        ("budget, MiB", chosen.memory_mib),
        ("planned at once, most, MiB", found["most_planned"] / MIB),
        ("taken at once, most, MiB", found["most_taken"] / MIB),
    ]
    report(
        "many_models",
        chosen.results,
        {"budget": budget, "http_processes": chosen.api_server_count, **found},
        ("what", "figure"),
        rows,
    )
    if found["nothing"] or found["most_taken"] > budget or found["most_planned"] > budget:
        raise SystemExit(f"failed: {found['nothing'][:3]}, {found['most_taken']} bytes taken of {budget}")


if __name__ == "__main__":
    main()
