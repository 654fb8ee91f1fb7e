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
from penstock.core.policies.pace import Pace
from penstock.core.request import EngineRequest

_ANSWERS = 64  # whose lengths tell how long the next ones will be
_FIRST_GUESS = 128  # tokens of an answer, before the first has ended
_FORGET = 1 / 32  # of what is known of prompts, with each one


@dataclass(frozen=True, slots=True)
class Work:
    """What a request is expected to cost: prompt tokens that must be computed, tokens that will be generated."""

    prompt: float
    output: float


@dataclass(slots=True)
class _Load:
    """What waits: requests and the work expected of them, and calls that have not made theirs yet."""

    requests: int = 0
    prompt: float = 0.0
    output: float = 0.0
    arriving: int = 0

    def add(self, work: Work, sign: int) -> None:
        self.requests += sign
        self.prompt = self.prompt + sign * work.prompt if self.requests else 0.0
        self.output = self.output + sign * work.output if self.requests else 0.0


class Waiting:
    """Requests that wait for their first token.

    Seconds of work are expected, not asked for: answers mostly end long before their max_tokens, and much of a prompt
    may be cached. A call is judged by what waits before it, so that one alone is taken however large it is. While too
    much waits, those are refused who have their share of it already: nobody is refused for another owner's backlog.
    """

    def __init__(self, most_seconds: float | None, processes: int = 1) -> None:
        """`most_seconds` of work may wait, None for any; each of so many `processes` has its share of all bounds."""
        self.tokens = 0
        self.pace: Pace | None = None
        self._most_seconds = None if most_seconds is None else most_seconds / processes
        self._processes = processes
        self._all = _Load()
        self._owners: dict[str, _Load] = {}  # of those who have something waiting
        self._mean = Work(0.0, 0.0)
        self._lengths: deque[float] = deque(maxlen=_ANSWERS)
        self.computed_tokens = 0  # of prompts, which were not cached
        self._computed = 1.0  # share of a prompt that was not cached
        self._promised_until = 0.0

    @property
    def requests(self) -> int:
        """How many wait."""
        return self._all.requests

    def seconds(self) -> float:
        """How long the engine will be busy with what waits; 0 as long as nobody knows how fast it is."""
        return self._seconds(self._all)

    def left(self, live: int) -> Work:
        """What is expected to be computed yet of so many live requests: all of those that wait, and of each other one
        half an answer.
        """
        lengths = self._lengths or (_FIRST_GUESS,)
        return Work(self._all.prompt, self._all.output + (live - self.requests) * sum(lengths) / len(lengths) / 2)

    @contextmanager
    def arriving(self, owner: str) -> Iterator[None]:
        """Counts a call whose requests are made meanwhile; raises OverloadedError as `check_room`."""
        self.check_room(owner)
        with self._changing(owner) as load:
            self._all.arriving += 1
            load.arriving += 1
        try:
            yield
        finally:
            with self._changing(owner) as load:
                self._all.arriving -= 1
                load.arriving -= 1

    def check_room(self, owner: str) -> None:
        """Raises OverloadedError while more seconds of work wait than may, a fair share of them this owner's."""
        most = self._most_seconds
        if most is None or (seconds := self.seconds()) < most:
            return
        own = self._owners.get(owner)
        if own is None or self._seconds(own) < most / len(self._owners):
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
        if self.requests >= limits.MAX_QUEUED_REQUESTS // self._processes:
            raise OverloadedError(
                f"{self.requests} requests wait already, the most allowed; retry later.", retry_after=self._promise()
            )
        most_tokens = limits.MAX_QUEUED_TOKENS // (self._processes if self.tokens else 1)  # a share is for several
        if self.tokens + tokens > most_tokens:
            raise OverloadedError(
                f"{self.tokens} prompt tokens wait already; {tokens} more would exceed the limit of "
                f"{most_tokens}; retry later.",
                retry_after=self._promise(),
            )
        work = Work(len(request.prompt_ids) * self._computed, self._expected_output(request))
        self.tokens += tokens
        self._count(request.owner, work, 1)
        self._mean = Work(
            self._mean.prompt + _FORGET * (work.prompt - self._mean.prompt),
            self._mean.output + _FORGET * (work.output - self._mean.output),
        )
        return work

    def enter_again(self, request: EngineRequest, work: Work, generated: int) -> Work:
        """Counts a request that had begun and waits again, whatever waits: it was taken before. What it has generated
        is computed with its prompt.
        """
        left = Work(work.prompt + generated, max(0.0, work.output - generated))
        self.tokens += len(request.prompt_ids) * request.sampling.n
        self._count(request.owner, left, 1)
        return left

    def leave(self, request: EngineRequest, work: Work) -> None:
        """A request waits no longer."""
        self.tokens -= len(request.prompt_ids) * request.sampling.n
        self._count(request.owner, work, -1)

    def cached(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learns how much of a prompt had to be computed."""
        self.computed_tokens += prompt_tokens - cached_tokens
        self._computed += _FORGET * ((prompt_tokens - cached_tokens) / prompt_tokens - self._computed)

    def answered(self, tokens: int, *, whole: bool) -> None:
        """Learns the length of a sequence's answer; one that is not whole tells only that it would have been longer."""
        mean = sum(self._lengths) / len(self._lengths) if self._lengths else _FIRST_GUESS
        self._lengths.append(tokens if whole else max(tokens, mean))

    def _seconds(self, load: _Load) -> float:
        if self.pace is None:
            return 0.0
        prompt, output = load.arriving * self._mean.prompt, load.arriving * self._mean.output
        return self.pace.seconds(load.prompt + prompt, load.output + output)

    def _count(self, owner: str, work: Work, sign: int) -> None:
        self._all.add(work, sign)
        with self._changing(owner) as load:
            load.add(work, sign)

    @contextmanager
    def _changing(self, owner: str) -> Iterator[_Load]:
        """What an owner has waiting, to be changed; one who has nothing any more is forgotten."""
        load = self._owners.setdefault(owner, _Load())
        yield load
        if not load.requests and not load.arriving:
            del self._owners[owner]

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
