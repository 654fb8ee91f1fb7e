"""Two engines at work beside each other on the same cores: tokens a second of each, with and without a rule.

Real `penstock serve`s on loopback, one stream each of `--tokens` tokens. `one host`: one server of both models, whose
engines deal out the cores among those that have work. `two servers`: a server for each, whose engines both take all
cores. Beside them: one of the engines alone.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import arguments, report
from benchmarks.server_child import serve

NAMES = ("first", "second")


async def speed(client: httpx.AsyncClient, url: str, model: str, tokens: int) -> float:
    """Tokens a second of a stream, from its first token to its last."""
    body = {"model": model, "prompt": "Hello, I would like", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    times: list[float] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return (tokens - 1) / (times[-1] - times[0])


async def speeds(targets: Sequence[tuple[str, str]], tokens: int, rounds: int) -> list[list[float]]:
    """Of each (url, model) its speed while all are at work, round by round; the first round counts for nothing."""
    found: list[list[float]] = []
    async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
        for _ in range(rounds + 1):
            found.append(list(await asyncio.gather(*(speed(client, url, model, tokens) for url, model in targets))))
    return [list(values) for values in zip(*found[1:], strict=True)]


def one_host(model: Path, folder: str, chosen: Any) -> dict[str, list[list[float]]]:
    """Both by one server, and one of them alone."""
    listed = Path(folder, "models.yaml")
    about = f'{{model: "{model.resolve()}", options: {{max_model_len: 1024}}}}'
    listed.write_text("models:\n" + "".join(f"  {name}: {about}\n" for name in NAMES), encoding="utf-8")
    with serve(["--models", str(listed), "--pack-cache", f"{folder}/packed"]) as server:
        both = [(server.url, name) for name in NAMES]
        return {
            "alone": asyncio.run(speeds(both[:1], chosen.tokens, chosen.rounds)),
            "one host": asyncio.run(speeds(both, chosen.tokens, chosen.rounds)),
        }


def two_servers(model: Path, folder: str, chosen: Any) -> dict[str, list[list[float]]]:
    """Each by a server of its own."""
    flags = [str(model), "--max-model-len", "1024", "--pack-cache", f"{folder}/packed", "--served-model-name"]
    with ExitStack() as stack:
        there = [(stack.enter_context(serve([*flags, name])).url, name) for name in NAMES]
        return {"two servers": asyncio.run(speeds(there, chosen.tokens, chosen.rounds))}


def main(given: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("model", type=Path, help="a model, which both engines serve")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as folder:
        found = {**one_host(chosen.model, folder, chosen), **two_servers(chosen.model, folder, chosen)}
    rows = []
    for name, engines in found.items():
        medians = [statistics.median(values) for values in engines]
        rows.append((name, " and ".join(f"{value:.1f}" for value in medians), f"{sum(medians):.1f}"))
    report("beside", chosen.results, found, ("engines", "tokens/s of each", "together"), rows)


if __name__ == "__main__":
    main()
