"""Several engines under the usual routing policy and others: python -m benchmarks.routing

Conversations of several turns behind a common system prompt, so many at a time, over so many engines of the bundled
model (`-dp`), each with room for its part of the conversations in use and not for all of them. Each turn brings new
tokens and goes on from the answers before; draws have seeds, so that every policy must give the same conversations,
which is asserted. Counted are tokens, not time: the engines share this machine's cores.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from typing import Any

from benchmarks.report import arguments, report
from penstock.cluster.engines import cluster
from penstock.config.data_parallel import ROUTING_POLICIES
from penstock.config.engine_stats import EngineStats
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams, stream_key
from penstock.core.request import EngineRequest
from penstock.engine.api import EngineClient

VOCABULARY = 4000
COLUMNS = [
    *("policy", "prompt tokens", "found in caches", "computed", "found, over round-robin", "computed, over it"),
    *("most over least computed by an engine", "seconds"),
]


class Conversation:
    """One person's turns."""

    def __init__(self, number: int, given: Any) -> None:
        draw = random.Random(given.seed)
        self._number, self._given = number, given
        self._draw = random.Random(given.seed * 10_007 + number)
        self.tokens = [draw.randrange(3, VOCABULARY) for _ in range(given.system)]

    async def hold(self, client: EngineClient) -> None:
        """Asks turn after turn."""
        for turn in range(self._given.turns):
            size = self._draw.randrange(self._given.turn // 2, self._given.turn * 3 // 2)
            self.tokens += [self._draw.randrange(3, VOCABULARY) for _ in range(size)]
            name = f"{self._number}.{turn}"
            request = EngineRequest(
                name,
                tuple(self.tokens),
                SamplingParams(temperature=0.7, max_tokens=self._given.answer, ignore_eos=True),
                seed=stream_key("seed", self._number),
                session=str(self._number),
            )
            async for output in client.submit(request):
                assert output.error is None, output.error
                self.tokens += output.tokens


async def held(policy: str, given: Any) -> tuple[EngineStats, float, str]:
    """What engines counted under a policy, seconds, and what names all that was said."""
    options = EngineOptions(
        data_parallel_size=given.engines,
        routing_policy=policy,
        threads=given.threads,
        max_model_len=2048,
        max_num_seqs=16,
        kv_blocks=given.blocks,
        memory=given.engines << 30,
    )
    client = cluster(options)
    await client.start()
    try:
        waiting = [Conversation(number, given) for number in range(given.conversations)]
        places, began = asyncio.Semaphore(given.at_once), time.monotonic()

        async def one(conversation: Conversation) -> None:
            async with places:
                await conversation.hold(client)

        await asyncio.gather(*map(one, waiting))
        took, stats = time.monotonic() - began, await client.stats()
        left = sum(len(engine.line.streams) for engine in client.engines)
        assert left == 0 and stats.running == 0 and stats.blocks_used == 0, "something is left"
    finally:
        await client.close()
    said = hashlib.sha256(repr([conversation.tokens for conversation in waiting]).encode()).hexdigest()
    return stats, took, said


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--policies", nargs="+", default=["round-robin", "cost", "cache-aware", "session"])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="of all engines together")
    parser.add_argument("--blocks", type=int, default=256, help="KV blocks of an engine, of 16 tokens")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--at-once", type=int, default=16, help="conversations that are held at a time")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--system", type=int, default=32, help="tokens that all begin with")
    parser.add_argument("--turn", type=int, default=96, help="tokens that a turn brings, about")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if unknown := [policy for policy in given.policies if policy not in ROUTING_POLICIES]:
        parser.error(f"--policies: {', '.join(unknown)}; there are: {', '.join(ROUTING_POLICIES)}")
    found: dict[str, dict[str, Any]] = {}
    said = set[str]()
    for policy in dict.fromkeys(("round-robin", *given.policies)):
        stats, seconds, words = asyncio.run(held(policy, given))
        said.add(words)
        each = [one.prompt_tokens - one.cached_tokens for one in stats.engines]
        found[policy] = {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "computed_by_engine": each,
            "seconds": seconds,
        }
    assert len(said) == 1, "policies gave different answers"
    rows, plain = [], found["round-robin"]
    for policy, figures in found.items():
        computed = figures["prompt_tokens"] - figures["cached_tokens"]
        base = plain["prompt_tokens"] - plain["cached_tokens"]
        row = [policy, figures["prompt_tokens"], figures["cached_tokens"], computed]
        row += [figures["cached_tokens"] / max(1, plain["cached_tokens"]), computed / base]
        rows.append([*row, max(figures["computed_by_engine"]) / min(figures["computed_by_engine"]), figures["seconds"]])
    setting = {name: value for name, value in vars(given).items() if name not in ("data", "results")}
    report("routing", given.results, {"setting": setting, "policies": found}, COLUMNS, rows)


if __name__ == "__main__":
    main()
