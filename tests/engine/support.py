"""Engines without a model, and requests for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from penstock.config.options import SchedulerOptions
from penstock.core.cache_spec import CacheGroup, CacheKind
from penstock.core.null_runner import NullRunner
from penstock.core.protocol import Runner
from penstock.core.request import EngineOutput, EngineRequest
from penstock.core.sampling import SamplingParams
from penstock.core.scheduler import Scheduler
from penstock.engine.api import EngineInfo, Outputs
from penstock.engine.loop import Engine

VOCAB = 4096
GROUPS = (CacheGroup(CacheKind.FULL, None, (0,), 2),)
_ids = itertools.count()


def null_engine(
    max_model_len: int = 2048, num_blocks: int = 1024, wrap: Callable[[Runner], Runner] = lambda runner: runner
) -> tuple[Engine, EngineInfo]:
    """An engine over the null runner, which `wrap` may replace by one that misbehaves."""
    options = SchedulerOptions(64, 512, max_model_len, 16, (num_blocks,))
    runner = wrap(NullRunner(GROUPS, (num_blocks,), 16, VOCAB, check=False))
    info = EngineInfo(
        "null", "", "Null", max_model_len, VOCAB, 16, num_blocks, 64, 512, "float32", "cpu", "exact"
    )  # fmt: skip
    return Engine(Scheduler(options, GROUPS), runner), info


def request(
    prompt: int = 5, *, request_id: str | None = None, stop_ids: tuple[int, ...] = (), **sampling: Any
) -> EngineRequest:
    """A request with a prompt of that many tokens, all different from other requests'."""
    number = next(_ids)
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling})
    tokens = tuple((number * 7919 + position * 31) % VOCAB for position in range(prompt))
    return EngineRequest(request_id or f"r{number}", tokens, params, stop_ids, seed=number)


async def read(outputs: Outputs) -> list[EngineOutput]:
    """Everything a stream yields."""
    return [output async for output in outputs]


def tokens_of(outputs: list[EngineOutput], branch: int = 0) -> list[int]:
    return [token for output in outputs if output.branch == branch for token in output.tokens]
