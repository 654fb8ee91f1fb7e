"""Engines that are killed at random moments under streams: python -m benchmarks.engine_kills

Several engines of the bundled model (`-dp`) answer so many streams at once, and at a random moment one of them, or with
`--both` two, is ended with SIGKILL. Every stream must be what it is undisturbed, token by token; nothing may be left in
the client or in the engines. Told is the longest pause between two outputs of a stream that was moved.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from typing import Any

from benchmarks.report import arguments, report
from penstock.cluster.client import ClusterClient
from penstock.cluster.engines import cluster
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams, stream_key
from penstock.core.request import EngineRequest
from penstock.engine.api import EngineState
from penstock.host.process_client import ProcessClient

COLUMNS = ["moments", "streams", "moved", "wrong", "ended with an error", "left behind", "pause p50, s", "p99, s"]


def requests(given: Any, moment: int) -> list[EngineRequest]:
    """The same at each moment, but for their names."""
    draw = random.Random(given.seed)
    made = []
    for number in range(given.streams):
        prompt = tuple(draw.randrange(3, 4000) for _ in range(draw.randrange(20, 200)))
        how = SamplingParams(temperature=0.8, max_tokens=given.tokens, ignore_eos=True)
        made.append(EngineRequest(f"{moment}.{number}", prompt, how, seed=stream_key("seed", number)))
    return made


async def read(client: ClusterClient, request: EngineRequest) -> tuple[list[int], str | None, float]:
    """A stream's tokens, its error, and the longest time between two of its outputs."""
    tokens, error, pause = list[int](), None, 0.0
    last: float | None = None
    async for output in client.submit(request):
        now = time.monotonic()
        if output.tokens:
            pause, last = max(pause, now - (last or now)), now
        tokens += output.tokens
        error = output.error or error
    return tokens, error, pause


async def until_ready(client: ClusterClient) -> int:
    """Waits until all engines are there and rest; what is left in them."""
    async with asyncio.timeout(120):
        while any(engine.state is not EngineState.READY for engine in client.engines):
            await asyncio.sleep(0.05)
    stats = await client.stats()
    return stats.running + stats.waiting + stats.blocks_used + sum(len(one.line.streams) for one in client.engines)


async def measured(given: Any) -> dict[str, Any]:
    options = EngineOptions(
        data_parallel_size=given.engines, threads=2, max_model_len=1024, max_num_seqs=32, kv_blocks=2000,
        memory=given.engines << 30,
    )  # fmt: skip
    client = cluster(options)
    await client.start()
    draw, pauses = random.Random(given.seed), list[float]()
    counts = {"moved": 0, "wrong": 0, "errors": 0, "left": 0}
    try:
        began = time.monotonic()
        expected = [tokens for tokens, _, _ in await asyncio.gather(*(read(client, r) for r in requests(given, -1)))]
        usual = time.monotonic() - began
        for moment in range(given.moments):
            before = (await client.stats()).resumed
            asked = requests(given, moment)
            reading = [asyncio.ensure_future(read(client, request)) for request in asked]
            await asyncio.sleep(draw.uniform(0.0, usual))
            victims = draw.sample(list(enumerate(client.engines)), 2 if given.both else 1)
            there = {request.request_id for request in asked}
            moved = set[str]()
            for _, engine in victims:
                assert isinstance(engine, ProcessClient)
                moved |= {stream.request.request_id for stream in engine.line.streams.live()} & there
                os.kill(engine.pid, signal.SIGKILL)
            told = await asyncio.wait_for(asyncio.gather(*reading), 300)
            for request, wanted, (tokens, error, pause) in zip(asked, expected, told, strict=True):
                counts["errors"] += error is not None
                counts["wrong"] += error is None and tokens != wanted
                if request.request_id in moved:
                    pauses.append(pause)
            counts["left"] += await until_ready(client)
            counts["moved"] += (await client.stats()).resumed - before
    finally:
        await client.close()
    return {**counts, "pauses": sorted(pauses), "undisturbed_seconds": usual}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--moments", type=int, default=40)
    parser.add_argument("--both", action="store_true", help="two engines at once")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    figures = asyncio.run(measured(given))
    pauses = figures["pauses"]
    at = [pauses[int(share * (len(pauses) - 1))] if pauses else 0.0 for share in (0.5, 0.99)]
    row = [given.moments, given.moments * given.streams, figures["moved"], figures["wrong"], figures["errors"]]
    report("engine_kills", given.results, figures, COLUMNS, [[*row, figures["left"], *at]])
    if figures["wrong"] or figures["left"] or figures["errors"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
