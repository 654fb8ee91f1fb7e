"""Many streaming clients against a real server for minutes, a third of them leaving in the middle of an answer.

Clients are the openai package. Passes if no request failed, every block is free again afterwards (blocks that only the
prefix cache holds do not count as used), and the resident memory of neither process grew by more than `slope` MiB a
minute over the second half.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

USED_BLOCKS = "penstock_kv_cache_usage_ratio"
SAMPLE_EVERY_S = 1.0
KV_CACHE = "64MiB"  # small, so that all of it has been touched long before the second half
MIB = 2**20


@dataclass(slots=True)
class Tally:
    """What happened.

    Attributes:
        completed, disconnected: answers read to their end, and left in the middle.
        errors: what went wrong, in words.
        memory: (seconds since the start, bytes of the HTTP process, bytes of the engine).
    """

    completed: int = 0
    disconnected: int = 0
    errors: list[str] = field(default_factory=list)
    memory: list[tuple[float, int, int]] = field(default_factory=list)


async def one_client(
    client: AsyncOpenAI, model: str, questions: list[str], until: float, seed: int, tally: Tally
) -> None:
    """Asks one question after the other until the time is over."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        length = rng.randint(8, 96)
        leave_after = rng.randint(1, length // 2) if rng.random() < 1 / 3 else None
        message: Any = {"role": "user", "content": rng.choice(questions)}
        try:
            stream = await client.chat.completions.create(
                model=model,
                messages=[message],
                max_tokens=length,
                stream=True,
                seed=rng.randrange(2**31),
                extra_body={"ignore_eos": True},
            )
            pieces, finished = 0, False
            async for event in stream:
                pieces += 1
                finished = finished or any(choice.finish_reason for choice in event.choices)
                if pieces == leave_after:
                    break
            await stream.close()
        except Exception as error:
            tally.errors.append(f"{type(error).__name__}: {error}"[:200])
            continue
        if finished:
            tally.completed += 1
        elif pieces == leave_after:
            tally.disconnected += 1
        else:
            tally.errors.append(f"a stream ended after {pieces} events without a finish_reason")


async def watch(server: ServerChild, until: float, tally: Tally) -> None:
    """Samples the memory of both processes."""
    engine, started = server.engine(), time.monotonic()
    while time.monotonic() < until:
        tally.memory.append((time.monotonic() - started, server.http.memory_info().rss, engine.memory_info().rss))
        await asyncio.sleep(SAMPLE_EVERY_S)


def slope(samples: list[tuple[float, float]]) -> float:
    """Bytes a second, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


async def soak(server: ServerChild, questions: list[str], clients: int, seconds: float) -> tuple[Tally, float]:
    """Runs the clients; returns the tally and the share of blocks in use once all is quiet."""
    tally, until = Tally(), time.monotonic() + seconds
    async with (
        DefaultAsyncHttpxClient(timeout=120, trust_env=False) as http,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        model = (await client.models.list()).data[0].id
        tasks = [one_client(client, model, questions, until, seed, tally) for seed in range(clients)]
        await asyncio.gather(watch(server, until, tally), *tasks)
    deadline = time.monotonic() + 10
    while (used := server.metric(USED_BLOCKS)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return tally, used


def questions_of(data: Path) -> list[str]:
    """First user turns of the dialogues."""
    lines = (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines()
    return [next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user") for line in lines]


def verdict(tally: Tally, used: float, most_mib_per_minute: float) -> dict[str, Any]:
    """The figures, and whether all of them are in order."""
    half = tally.memory[len(tally.memory) // 2 :]
    growth = [60 * slope([(row[0], row[part]) for row in half]) / MIB for part in (1, 2)]
    return {
        "completed": tally.completed,
        "disconnected": tally.disconnected,
        "errors": len(tally.errors),
        "first_errors": tally.errors[:5],
        "share_of_blocks_in_use_afterwards": used,
        "http_rss_mib": [tally.memory[0][1] / MIB, tally.memory[-1][1] / MIB],
        "engine_rss_mib": [tally.memory[0][2] / MIB, tally.memory[-1][2] / MIB],
        "http_growth_mib_per_minute": growth[0],
        "engine_growth_mib_per_minute": growth[1],
        "passed": not tally.errors and not used and tally.disconnected > 0 and max(growth) <= most_mib_per_minute,
    }


def main() -> None:
    """Soaks one server; exit code 1 if it did not pass."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slope", type=float, default=1.0, help="MiB a minute that memory may grow")
    given = parser.parse_args()
    with serve(("--kv-cache-memory", KV_CACHE)) as server:
        tally, used = asyncio.run(soak(server, questions_of(given.data), given.clients, given.seconds))
    found = verdict(tally, used, given.slope)
    setup = {"clients": given.clients, "seconds": given.seconds}
    rows = [(name, json.dumps(value)) for name, value in found.items()]
    report("soak", given.results, {**setup, **found}, ("what", "figure"), rows)
    raise SystemExit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
