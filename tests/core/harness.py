"""Builds engines on the null runner and says what they must answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.constraint import Thinking
from penstock.config.options import SchedulerOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.policies.dealing import Staged
from penstock.core.protocol import CacheOp, CacheOpKind, NewSequence
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.runtime.null_runner import NullRunner, mix, next_token, shared_prefix
from penstock.structured.manager import StructuredOutputManager


def cache_groups(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    return tuple(
        CacheGroup(CacheKind.FULL if window is None else CacheKind.SLIDING, window, (layer,), 8)
        for layer, window in enumerate(windows)
    )


CROSS = CacheGroup(CacheKind.CROSS, None, (), 8)
OPTIONAL = CacheGroup(CacheKind.FULL, None, (), 8, optional=True)


class Guesser:
    """Proposes up to `most` drafts, each right as often as `right` of 8 times."""

    def __init__(self, most: int, right: int) -> None:
        self._most = most
        self._right = right

    def propose(self, new: NewSequence, generated: int, follow: Callable[[int], list[int]]) -> tuple[int, ...]:
        if not new.speculate:
            return ()
        chance = mix(new.sequence * 1_000 + generated + len(new.prompt_ids))
        drafts = follow(chance % (self._most + 1))
        for index in range(len(drafts)):
            chance = mix(chance)
            if chance % 8 >= self._right:
                drafts[index] = (drafts[index] + 1) % 3
        return tuple(drafts)


class SlowMover:
    """Moves blocks late: what is moved is what lies there when a transfer ends, which may be several steps later.

    Of 16 transfers about `failing` fail and `lost` never end before `hurry` is called.
    """

    def __init__(self, failing: int = 0, lost: int = 0, latest: int = 0) -> None:
        self.fates = (failing, lost, latest)
        self._below: dict[int, list[int]] = {}
        self._moving: list[tuple[int, bool, CacheOp, Callable[[], list[int]]]] = []
        self._step = 0
        self._hurry = False
        self.ended: Counter[str] = Counter()

    def start(self, op: CacheOp, read: Callable[[], list[int]]) -> None:
        failing, lost, latest = self.fates
        fate = mix(op.transfer)
        delay = 10**9 if fate % 16 < lost else mix(fate) % (latest + 1)
        self._moving.append((self._step + delay, mix(fate + 1) % 16 < failing, op, read))

    def finished(self) -> Iterator[tuple[CacheOp, list[int] | None]]:
        self._step += 1
        due = [one for one in self._moving if self._hurry or one[0] < self._step]
        self._moving = [one for one in self._moving if one not in due]
        for _, fails, op, read in due:
            self.ended[f"{op.kind.value} {'failed' if fails else 'whole'}"] += 1
            if op.kind is CacheOpKind.SAVE:
                self._below[op.place] = read() if not fails else [7] * op.num_tokens
            yield op, None if fails else self._below[op.place]

    def abort(self) -> None:
        self._moving.clear()

    def hurry(self) -> None:
        """Nothing is late any more."""
        self._hurry = True


def null_engine(
    windows: Sequence[int | None] = (None,),
    *,
    more_groups: Sequence[CacheGroup] = (),
    drafter: Guesser | None = None,
    mover: SlowMover | None = None,
    places: int = 0,
    blocks: int | Sequence[int] = 64,
    block_size: int = 4,
    rows: int = 8,
    budget: int = 64,
    max_model_len: int = 256,
    vocab_size: int = 50,
    caching: bool = True,
    policy: str = "fcfs",
    depth: int = 0,
    stages: int = 1,
    checkpoints: int | None = None,  # None: not a recurrent model
    **scheduler: Any,
) -> Engine:
    groups = (*cache_groups(windows), *more_groups)
    counts = (blocks,) * len(groups) if isinstance(blocks, int) else tuple(blocks)
    recurrent = checkpoints is not None
    options = SchedulerOptions(
        rows, budget, max_model_len, block_size, counts, caching, policy, depth, recurrent=recurrent,
        checkpoints=checkpoints or 0, stages=stages,
    )  # fmt: skip
    if stages > 1:
        scheduler["dealing"] = Staged(options, 3)
    runner = NullRunner(
        groups, counts, block_size, vocab_size, check=True, recurrent=recurrent, drafter=drafter, mover=mover
    )
    planner = Scheduler(options, groups, **scheduler)
    if places:
        cache = planner.cache
        cache.transfers.tier = BoundedTier((places,) * (len(groups) + recurrent), 16, cache.tree.forget_below)
    return Engine(planner, runner, StructuredOutputManager(vocab_size))


def request(
    name: str, prompt: Sequence[int], *, stop_ids: tuple[int, ...] = (), seed: int = 0, priority: int = 0,
    cache_salt: str = "", thinking: Thinking | None = None, **sampling: Any,
) -> EngineRequest:  # fmt: skip
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    return EngineRequest(name, tuple(prompt), params, stop_ids, seed, priority, cache_salt, thinking=thinking)


def expected_tokens(
    asked: EngineRequest, sequence: int = 0, vocab_size: int = 50, begun: Sequence[int] = ()
) -> list[int]:
    """The answer by definition, after what is `begun` of it: no cache, no batch, no scheduler."""
    new = NewSequence(0, "", sequence, asked.prompt_ids, (), 0, (), asked.sampling, asked.stop_ids, asked.seed)
    prefix = 0
    for token in asked.prompt_ids:
        prefix = mix(prefix ^ (token + 1))
    other = 0
    for token in (*asked.sampling.negative_prompt_ids, *begun):
        other = mix(other ^ (token + 1))
    tokens = list(begun)
    for token in begun:
        prefix = mix(prefix ^ (token + 1))
    while len(tokens) < (asked.sampling.max_tokens or 0):
        forced = forced_tokens(asked.thinking, tokens)
        drawn = shared_prefix(prefix, other, asked.sampling.guidance_scale - 1) if asked.guided else prefix
        tokens.append(forced[0] if forced else next_token(drawn, new, len(tokens), vocab_size))
        if tokens[-1] in asked.stop_ids:
            break
        prefix = mix(prefix ^ (tokens[-1] + 1))
        other = mix(other ^ (tokens[-1] + 1))
    return tokens


def forced_tokens(thinking: Thinking | None, tokens: Sequence[int]) -> tuple[int, ...]:
    """What a budget of reasoning forces after these tokens: the end of it, as far as it is not said yet."""
    if thinking is None or thinking.budget is None or len(tokens) < thinking.budget:
        return ()
    end, said = thinking.end_ids, tuple(tokens)
    if any(said[:count][-len(end) :] == end for count in range(len(end), len(said) + 1)):
        return ()
    cut = said[: thinking.budget]
    begun = next(count for count in range(len(end), -1, -1) if cut[len(cut) - count :] == end[:count])
    return end[begun + len(tokens) - thinking.budget :]


class Collector:
    """Gathers outputs per (request, sequence)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.outputs: list[EngineOutput] = []

    def take(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.sequence)
            assert key not in self.finished, f"{key} speaks after its end"
            self.outputs.append(output)
            self.tokens.setdefault(key, []).extend(output.tokens)
            if output.finish_reason is not None:
                self.finished[key] = output.finish_reason

    def cached(self, name: str, sequence: int = 0) -> int:
        found = [o.cached_tokens for o in self.outputs if (o.request_id, o.sequence) == (name, sequence)]
        return next(c for c in found if c is not None)


def run(engine: Engine, *requests: EngineRequest, most_steps: int = 5_000) -> Collector:
    """Adds the requests at once and steps until nothing is left, checking integrity after every step."""
    collector = Collector()
    for asked in requests:
        engine.add(asked)
    while engine.has_work:
        assert most_steps > 0, "the engine makes no progress"
        most_steps -= 1
        collector.take(engine.step())
        engine.scheduler.check_integrity()
    return collector
