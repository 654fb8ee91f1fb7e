"""Prompts whose hidden states are wanted instead of a continuation, and pairs of texts that are scored."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.config import limits
from penstock.config.errors import (
    CLIENT_FAILURES,
    ContextLengthError,
    EngineDeadError,
    ParameterError,
    RequestError,
    param_names,
)
from penstock.core.pooling import PoolingParams
from penstock.core.request import EngineRequest, GenerationRequest
from penstock.engine.frontend import Frontend
from penstock.text.pairs import PairCut, encode_cut_pair

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
    if len(ids) > (most := frontend.info.max_model_len):
        raise ContextLengthError(f"The text has {len(ids)} tokens; at most {most} are taken. Shorten it.", param=field)
    scheduling: dict[str, Any] = {name: getattr(request, name) for name in ("priority", "cache_salt", "owner")}
    sent = EngineRequest(request.live_id, ids, request.sampling, pooling=params, **scheduling)
    outputs, cached = frontend.client.submit(sent), 0
    try:
        async for output in outputs:
            cached = output.cached_tokens or cached
            if output.pooled is not None:
                return Pooled(array("f", output.pooled), len(ids), cached)
            if output.error is not None and output.error in CLIENT_FAILURES:
                raise RequestError(output.error, param=field, code=CLIENT_FAILURES[output.error])
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


async def score_pairs(
    frontend: Frontend,
    pairs: Sequence[tuple[str, str]],
    make: Callable[[str | Sequence[int]], GenerationRequest],
    field: str,
    instruction: str | None = None,
    cut: PairCut | None = None,
    use_activation: bool = True,
) -> list[Pooled]:
    """Scores pairs of a query and a document: what a ranking model gives, else the cosine of their embeddings.

    Args:
        frontend: of the model.
        pairs: the texts.
        make: makes a request of a text or token ids.
        field: stands for the documents in messages.
        instruction: what a model that takes one is told to look for.
        cut: how texts are cut that are too long; None to refuse them.
        use_activation: scores are what the model's last function makes of its logits; else they are these.

    Returns:
        One a pair; its last value is the score.

    Raises:
        RequestError: the model cannot score, or a text is refused.
    """
    pooling, tokenizer = frontend.text.pooling, frontend.text.tokenizer
    if len(instruction or "") * len(pairs) > limits.MAX_PROMPT_CHARS:
        told = f"at most {limits.MAX_PROMPT_CHARS // len(pairs)} with {len(pairs)} pairs; send fewer of them"
        raise ParameterError("instruction", f"{len(instruction or '')} characters", told)
    cut = cut or PairCut()
    if (params := pooling.ranking()) is None:
        if cut != PairCut():
            pairs = await asyncio.to_thread(lambda: [cut.texts(tokenizer, *pair) for pair in pairs])
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        unit = [pooling.embedding(normalize=True)] * len(texts)
        found = dict(
            zip(texts, await pool_all(frontend, list(map(make, pooling.prompted(texts))), unit, field), strict=True)
        )
        return [_compared(found[query], found[document]) for query, document in pairs]
    shape = pooling.pair_prompt
    encoded = [
        await asyncio.to_thread(encode_cut_pair, tokenizer, query, document, shape, instruction, cut)
        for query, document in pairs
    ]
    params = params if use_activation else replace(params, activation="")
    each = [replace(params, second=second) for _, second in encoded]
    return await pool_all(frontend, [make(ids) for ids, _ in encoded], each, field)


def _compared(one: Pooled, other: Pooled) -> Pooled:
    cosine = sum(a * b for a, b in zip(one.values, other.values, strict=True))
    tokens, cached = one.prompt_tokens + other.prompt_tokens, one.cached_tokens + other.cached_tokens
    return Pooled(array("f", [cosine]), tokens, cached)
