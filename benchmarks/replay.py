"""Runs requests through the real scheduler and cache with the null runner in the model's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.traces import Lengths
from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.options import SchedulerOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.runtime.null_runner import NullRunner

GROUPS = (CacheGroup(CacheKind.FULL, None, (0,), 8),)
VOCABULARY = 32_000


def null_engine(
    *, rows: int, budget: int, max_model_len: int, num_blocks: int, block_size: int = 16, caching: bool = True
) -> Engine:
    """An engine with one full cache group."""
    options = SchedulerOptions(rows, budget, max_model_len, block_size, (num_blocks,), caching)
    runner = NullRunner(GROUPS, options.num_blocks, block_size, VOCABULARY, check=False)
    return Engine(Scheduler(options, GROUPS), runner)


def engine_for(requests: Sequence[Lengths], *, rows: int, block_size: int = 16) -> Engine:
    """An engine without prefix caching in which `rows` of the longest requests fit, prompts in one step each."""
    longest = max(request.context + request.output for request in requests)
    blocks = 1 + rows * (-(-longest // block_size) + 2)
    prompts = rows * max(request.context for request in requests)
    return null_engine(
        rows=rows,
        budget=prompts,
        max_model_len=longest,
        num_blocks=blocks,
        block_size=block_size,
        caching=False,
    )


def request_of(name: str, prompt: Sequence[int], max_tokens: int) -> EngineRequest:
    """A greedy request of exactly `max_tokens`."""
    return EngineRequest(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens))


def replay(
    engine: Engine, requests: Sequence[Lengths], *, rows: int, after_step: Callable[[], None] | None = None
) -> int:
    """Keeps the queue filled until all requests have ended and returns the number of steps.

    `after_step` is called after every step in which the batch still has work queued behind it or in it.
    """
    waiting: Iterator[tuple[int, Lengths]] = enumerate(requests)
    steps = left = 0
    exhausted = False
    while True:
        while left < 2 * rows and not exhausted:
            item = next(waiting, None)
            if item is None:
                exhausted = True
                break
            index, lengths = item
            engine.add(request_of(str(index), range(lengths.context), lengths.output))
            left += 1
        if not engine.has_work:
            return steps
        left -= sum(output.finish_reason is not None for output in engine.step())
        steps += 1
        if after_step is not None:
            after_step()
