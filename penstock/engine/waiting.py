"""What waits for an engine, in requests, in tokens and in seconds of work, and how much may."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.config import limits
from penstock.config.errors import OverloadedError
from penstock.core.pace import Pace
from penstock.core.request import EngineRequest

_ANSWERS = 64  # whose lengths tell how long the next ones will be
_FIRST_GUESS = 128  # tokens of an answer, before the first has ended
_FORGET = 1 / 32  # of what is known of prompts, with each one


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is expected to cost: prompt tokens that must be computed, tokens that will be generated."""

    prompt: float
    output: float


class Waiting:
    """Requests that wait for their first token.

    Seconds of work are expected, not asked for: answers mostly end long before their max_tokens, and much of a prompt
    may be cached. A call is judged by what waits before it, so that one alone is taken however large it is.
    """

    def __init__(self, most_seconds: float | None) -> None:
        """`most_seconds` of work may wait, None for any."""
        self.requests = 0
        self.tokens = 0
        self.pace: Pace | None = None
        self._most_seconds = most_seconds
        self._prompt = self._output = 0.0
        self._arriving = 0
        self._mean = Work(0.0, 0.0)
        self._lengths: deque[int] = deque(maxlen=_ANSWERS)
        self._computed = 1.0  # share of a prompt that was not cached
        self._promised_until = 0.0

    def seconds(self) -> float:
        """How long the engine will be busy with what waits; 0 as long as nobody knows how fast it is."""
        if self.pace is None:
            return 0.0
        coming = self._arriving
        return self.pace.seconds(self._prompt + coming * self._mean.prompt, self._output + coming * self._mean.output)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Counts a call whose requests are made meanwhile; raises OverloadedError as `check_room`."""
        self.check_room()
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def check_room(self) -> None:
        """Raises OverloadedError while more seconds of work wait than may."""
        most = self._most_seconds
        if most is None or (seconds := self.seconds()) < most:
            return
        raise OverloadedError(
            f"The server is busy: {seconds:.0f} s of work wait already, at most {most:g} s may; retry later.",
            retry_after=self._promise(),
        )

    def enter(self, request: EngineRequest) -> Work:
        """Counts a request that begins to wait, and says what it is expected to cost.

        Raises:
            OverloadedError: too many requests or prompt tokens wait already.
        """
        tokens = len(request.prompt_ids) * request.sampling.n
        if self.requests >= limits.MAX_QUEUED_REQUESTS:
            raise OverloadedError(
                f"{self.requests} requests wait already, the most allowed; retry later.", retry_after=self._promise()
            )
        if self.tokens + tokens > limits.MAX_QUEUED_TOKENS:
            raise OverloadedError(
                f"{self.tokens} prompt tokens wait already; {tokens} more would exceed the limit of "
                f"{limits.MAX_QUEUED_TOKENS}; retry later.",
                retry_after=self._promise(),
            )
        work = Work(len(request.prompt_ids) * self._computed, self._expected_output(request))
        self.requests += 1
        self.tokens += tokens
        self._prompt += work.prompt
        self._output += work.output
        self._mean = Work(
            self._mean.prompt + _FORGET * (work.prompt - self._mean.prompt),
            self._mean.output + _FORGET * (work.output - self._mean.output),
        )
        return work

    def leave(self, request: EngineRequest, work: Work) -> None:
        """A request waits no longer."""
        self.requests -= 1
        self.tokens -= len(request.prompt_ids) * request.sampling.n
        self._prompt = self._prompt - work.prompt if self.requests else 0.0
        self._output = self._output - work.output if self.requests else 0.0

    def cached(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learns how much of a prompt had to be computed."""
        self._computed += _FORGET * ((prompt_tokens - cached_tokens) / prompt_tokens - self._computed)

    def answered(self, tokens: int) -> None:
        """Learns the length of a branch's answer."""
        self._lengths.append(tokens)

    def _expected_output(self, request: EngineRequest) -> float:
        most = request.sampling.max_tokens or 1
        lengths = self._lengths or (_FIRST_GUESS,)
        return request.sampling.n * sum(min(length, most) for length in lengths) / len(lengths)

    def _promise(self) -> int:
        """Seconds after which there will be room for one more, behind those who were told the same before."""
        if self.pace is None:
            return 1
        now, most = time.monotonic(), min(self._most_seconds or math.inf, limits.MAX_QUEUE_SECONDS)
        first = now + max(0.0, self.seconds() - most)
        own = self.pace.seconds(self._mean.prompt, self._mean.output)
        self._promised_until = min(max(first, self._promised_until) + own, now + max(most, first - now))
        return max(1, math.ceil(self._promised_until - now))
