"""Prompts whose hidden states are wanted instead of a continuation."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.config.adapters import activated
from penstock.config.errors import (
    CLIENT_FAILURES,
    AbortedError,
    ContextLengthError,
    EngineDeadError,
    RequestError,
    param_names,
)
from penstock.config.generation import GenerationRequest
from penstock.config.pooling import PoolingParams
from penstock.core.request import EngineRequest, FinishReason
from penstock.engine.frontend import Frontend
from penstock.text.cut import chunks_of

_STARTED_TOGETHER = 4  # of many texts, so that others get their turn between


@dataclass(frozen=True, slots=True)
class Pooled:
    """A result.

    Attributes:
        values: float32, of all tokens one after the other where every token has its own.
        prompt_tokens, cached_tokens: tokens of the prompt, and of those from the prefix cache.
    """

    values: array[float]
    prompt_tokens: int
    cached_tokens: int


async def pool(frontend: Frontend, request: GenerationRequest, params: PoolingParams, field: str = "input") -> Pooled:
    """Computes a prompt and what `params` ask of it; n and max_tokens of the request's sampling are 1.

    Raises:
        RequestError: the request is refused; `field` stands for its text.
        EngineDeadError: the engine failed or is away.
    """
    with param_names({"prompt": field, "max_tokens": field}):
        return await _pool(frontend, request, params, field)


async def _pool(frontend: Frontend, request: GenerationRequest, params: PoolingParams, field: str) -> Pooled:
    ids = await frontend.tokenize(request)
    if len(ids) <= (most := frontend.info.max_model_len):
        return await _computed(frontend, request, ids, params, field)
    longest = frontend.text.pooling.longest(params)
    if longest is None or len(ids) > longest:
        most = most if longest is None else longest
        raise ContextLengthError(f"The text has {len(ids)} tokens; at most {most} are taken. Shorten it.", param=field)
    chunks = await asyncio.to_thread(chunks_of, ids, most, frontend.around(request))
    unscaled, parts = replace(params, normalize=False), list[Pooled]()
    for number, (part, _) in enumerate(chunks):  # one after the other, so that a long text takes one place
        named = replace(request, request_id=f"{request.request_id}-{number}")
        parts.append(await _computed(frontend, named, part, unscaled, field))
    return _averaged(parts, [count for _, count in chunks], params.normalize)


def _averaged(parts: Sequence[Pooled], counts: Sequence[int], normalize: bool) -> Pooled:
    """The vectors' mean, each weighted by its count."""
    rows = np.stack([np.frombuffer(part.values, np.float32) for part in parts]).astype(np.float64)
    mean = np.average(rows, axis=0, weights=counts)
    if normalize:
        mean /= max(float(np.linalg.norm(mean)), 1e-12)
    tokens, cached = sum(part.prompt_tokens for part in parts), sum(part.cached_tokens for part in parts)
    return Pooled(array("f", mean.astype(np.float32).tobytes()), tokens, cached)


async def _computed(
    frontend: Frontend, request: GenerationRequest, ids: tuple[int, ...], params: PoolingParams, field: str
) -> Pooled:
    more: dict[str, Any] = {name: getattr(request, name) for name in ("priority", "cache_salt", "owner")}
    adapters = await asyncio.to_thread(activated, frontend.adapters, ids) if frontend.adapters else ()
    sent = EngineRequest(request.live_id, ids, request.sampling, pooling=params, adapters=adapters, **more)
    outputs, cached = frontend.client.submit(sent), 0
    try:
        async for output in outputs:
            cached = output.cached_tokens or cached
            if output.pooled is not None:
                return Pooled(array("f", output.pooled), len(ids), cached)
            if output.error is not None and output.error in CLIENT_FAILURES:
                raise RequestError(output.error, param=field, code=CLIENT_FAILURES[output.error])
            if output.finish_reason is FinishReason.CANCELLED:
                raise AbortedError
    finally:
        await outputs.aclose()
    raise EngineDeadError("The engine failed while it computed this text.")


async def pool_all(
    frontend: Frontend, requests: Sequence[GenerationRequest], params: Sequence[PoolingParams], field: str = "input"
) -> list[Pooled]:
    """One result a request, all computed together; raises the first refusal, which cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, both in enumerate(zip(requests, params, strict=True), 1):
                tasks.append(group.create_task(pool(frontend, *both, field)))
                if number % _STARTED_TOGETHER == 0:
                    await asyncio.sleep(0)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
