"""Texts that are read as one, and embedded each from its own tokens (late chunking, arXiv:2409.04701)."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.config.errors import RequestError
from penstock.config.generation import GenerationRequest
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.engine.frontend import Frontend
from penstock.engine.pooling import Pooled, pool
from penstock.text.cut import apart


async def late_chunks(
    frontend: Frontend, requests: Sequence[GenerationRequest], params: PoolingParams, field: str
) -> list[Pooled]:
    """One vector a text, the mean of its tokens' states in the sequence of all texts.

    Args:
        frontend: of the model.
        requests: the texts.
        params: of a vector; its kind does not count.
        field: stands for the texts in messages.

    Raises:
        RequestError: all together are longer than the context, or the model's vectors are not made of states alone.
    """
    first = await frontend.tokenize(requests[0])
    before, _, after = apart(first, len(first) + 1, frontend.around(requests[0]))
    texts = [await frontend.tokenize(replace(request, add_special_tokens=False)) for request in requests]
    ids = (*before, *itertools.chain.from_iterable(texts), *after)
    whole = replace(requests[0], prompt=None, prompt_ids=ids, truncation=None)
    each_token = replace(params, kind=PoolingKind.ALL, normalize=False)
    result = await pool(frontend, whole, each_token, field)
    size = frontend.text.pooling.size if params.dimensions is None else params.dimensions
    if len(result.values) != size * len(ids):
        told = "late_chunking is not possible: this model's vectors pass dense layers behind the pooling. Leave it out."
        raise RequestError(told, param="late_chunking", code="invalid_value")
    lengths = [len(text) for text in texts]
    means = await asyncio.to_thread(_means, result, size, len(before), lengths, params.normalize)
    around = len(before) + len(after)
    counts = [length + (around if place == 0 else 0) for place, length in enumerate(lengths)]
    cached = [result.cached_tokens if place == 0 else 0 for place in range(len(texts))]
    return [Pooled(*told) for told in zip(means, counts, cached, strict=True)]


def _means(result: Pooled, size: int, start: int, lengths: Sequence[int], normalize: bool) -> list[array[float]]:
    """The mean of each run of states, of a length of one where that is asked."""
    states = np.frombuffer(result.values, np.float32).reshape(-1, size)
    made = []
    for length in lengths:
        mean = states[start : start + length].astype(np.float64).mean(axis=0)
        if normalize:
            mean /= max(float(np.linalg.norm(mean)), 1e-12)
        made.append(array("f", mean.astype(np.float32).tobytes()))
        start += length
    return made
