"""The best of several sampled answers: more sequences run than are given."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import check_mode
from penstock.engine.api import Delta
from penstock.engine.frontend import Frontend
from penstock.engine.generation import TextGeneration


class BestOf:
    """An answer of the `n` sequences with the highest mean log-probability a token, of all that ran, the best first.

    Attributes as those of a TextGeneration.
    """

    def __init__(self, generation: TextGeneration, request: GenerationRequest) -> None:
        """`generation` runs with log-probabilities; `request` is what the client asked for."""
        self.prompt_ids = generation.prompt_ids
        self._generation = generation
        self._n = request.sampling.n
        self._logprobs = request.sampling.logprobs is not None
        self._ready: deque[Delta] | None = None
        self._told: list[int] = []  # its sequences that are given, the best first

    @property
    def missed(self) -> str:
        return self._generation.missed

    @property
    def cached_tokens(self) -> int:
        return self._generation.cached_tokens

    @property
    def queue_seconds(self) -> float | None:
        return self._generation.queue_seconds

    @property
    def drafts(self) -> dict[int, tuple[int, int]]:
        drafts = self._generation.drafts
        return {index: drafts[told] for index, told in enumerate(self._told) if told in drafts}

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self._ready is None:
            self._ready = await self._chosen()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Cancels what still runs; safe to call twice and after the end."""
        await self._generation.aclose()

    async def _chosen(self) -> deque[Delta]:
        sequences: dict[int, list[Delta]] = {}
        async for delta in self._generation:
            sequences.setdefault(delta.index, []).append(delta)
        prompt_logprobs = tuple(entry for delta in sequences.get(0, ()) for entry in delta.prompt_logprobs)
        ranked = sorted(sequences.values(), key=_mean, reverse=True)[: self._n]
        self._told = [sequence[0].index for sequence in ranked]
        return deque(
            replace(
                delta,
                index=index,
                logprobs=delta.logprobs if self._logprobs else (),
                prompt_logprobs=prompt_logprobs if index == 0 and delta is sequence[0] else (),
            )
            for index, sequence in enumerate(ranked)
            for delta in sequence
        )


def _mean(sequence: list[Delta]) -> float:
    """Of a sequence's tokens; one that failed comes first, so that the failure is told."""
    if sequence[-1].error is not None:
        return float("inf")
    entries = [entry.logprob for delta in sequence for entry in delta.logprobs]
    return sum(entries) / max(1, len(entries))


async def best_of(frontend: Frontend, request: GenerationRequest, sequences: int) -> BestOf:
    """Starts `sequences` sequences, of which `request.sampling.n` are given.

    Raises:
        RequestError: as Frontend.generate; also for fewer sequences than are to be given.
    """
    sampling = request.sampling
    if sequences < sampling.n:
        raise ParameterError("best_of", sequences, f"at least n ({sampling.n})")
    check_mode(frontend.info.logprobs_mode, "best_of")
    more = replace(sampling, n=sequences, logprobs=sampling.logprobs or 0)
    return BestOf(await frontend.generate(replace(request, sampling=more)), request)
