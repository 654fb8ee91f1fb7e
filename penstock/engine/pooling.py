"""Prompts whose hidden states are wanted instead of a continuation."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from penstock.config.errors import ContextLengthError, EngineDeadError
from penstock.core.pooling import PoolingParams
from penstock.core.request import EngineRequest, GenerationRequest
from penstock.engine.frontend import Frontend


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


async def pool(frontend: Frontend, request: GenerationRequest, params: PoolingParams) -> Pooled:
    """Computes a prompt and what `params` ask of it; n and max_tokens of the request's sampling are 1.

    Raises:
        RequestError: the request is refused.
        EngineDeadError: the engine failed or is away.
    """
    ids = await frontend.tokenize(request)
    if len(ids) > (most := frontend.info.max_model_len):
        raise ContextLengthError(
            f"The text has {len(ids)} tokens; at most {most} are taken. Shorten it.", param="input"
        )
    scheduling: dict[str, Any] = {"priority": request.priority, "cache_salt": request.cache_salt}
    sent = EngineRequest(request.request_id, ids, request.sampling, pooling=params, **scheduling)
    outputs, cached = frontend.client.submit(sent), 0
    try:
        async for output in outputs:
            cached = output.cached_tokens or cached
            if output.pooled is not None:
                return Pooled(array("f", output.pooled), len(ids), cached)
    finally:
        await outputs.aclose()
    raise EngineDeadError("The engine failed while it computed this text.")
