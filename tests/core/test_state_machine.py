"""Random lives of the engine: requests, cancellations, preemptions, failures, steps in any order, on any cache shape.

After each operation no block of a plan in flight is free, and none was handed out while the plan was.

An operation is one that hypothesis drew and that had something to act on; what ends a life afterwards is not counted.
The draws are the same in every run; `pytest tests/core/test_state_machine.py --hypothesis-seed=$RANDOM` makes others.
"""

from __future__ import annotations

import logging
from collections import Counter, abc
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from penstock.config.cache_asks import Pin
from penstock.config.cache_spec import CacheGroup
from penstock.config.constraint import Thinking
from penstock.config.errors import RequestError
from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.retention import NO_RETENTION, Retention, TokenRange, kept_for
from penstock.core.kv.allocation import Allocation
from penstock.core.kv.node import Node
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.protocol import StepPlan, StepResult
from penstock.core.request import PUBLIC, EngineOutput, EngineRequest, FinishReason
from penstock.core.sequence import Sequence
from tests.core.harness import (
    CROSS,
    OPTIONAL,
    Collector,
    Guesser,
    SlowMover,
    expected_tokens,
    null_engine,
    request,
    run,
)
from tests.core.ownership import Ownership

LIVES, RULES = 640, 50
STEMS = tuple(tuple((stem * 7 + i * i + stem * i) % 3 for i in range(40)) for stem in range(5))
KINDS = (
    ("step",) * 40
    + ("add",) * 7
    + ("preempt",) * 2
    + ("cancel", "fail", "clear", "evict")
    + ("fork",) * 4
    + ("rewind",) * 5
    + ("unpin",)
)


@dataclass(frozen=True)
class Operation:
    """What to do. `values` are those the kind needs: a request's fields, which request, how to fail."""

    kind: str
    values: tuple[Any, ...] = ()


HINTS = (
    *(NO_RETENTION,) * 4, kept_for(0.0), kept_for(1e6), Retention((TokenRange(0, 5, 90), TokenRange(9, None, 0))),
    Retention((), TokenRange(0, None, 100, 0.001)),
)  # fmt: skip
ADDED = st.tuples(
    st.sampled_from(STEMS),
    st.integers(0, 40),  # tokens of the stem
    st.lists(st.integers(0, 2), max_size=6),
    st.sampled_from([1, 1, 1, 3]),  # n
    st.integers(1, 28),  # max_tokens
    st.booleans(),  # greedy
    st.sampled_from([None, None, None, 0]),  # prompt_logprobs
    st.booleans(),  # stop
    st.integers(0, 2),  # priority
    st.sampled_from(["", "", "s"]),  # cache_salt
    st.sampled_from(["", "", "a", "b"]),  # owner
    st.sampled_from([None, None, 0, 1, 5]),  # budget of reasoning
    st.sampled_from([(2,), (0, 1), (1, 1, 0)]),  # what ends it
    st.sampled_from([None, None, 0]),  # logprobs
    st.booleans(),  # whether drafts may be proposed
    st.sampled_from(["", "x", "y", "z"]),  # what its encoder read, if the model has one
    st.sampled_from([(), (), ((2, 5),), ((0, 1), (4, 3))]),  # media: start, length
    st.sampled_from([(), (), (), (1,), (0, 2, 1, 0, 1)]),  # a negative prompt
    st.sampled_from(HINTS),
    st.sampled_from([None, None, None, None, None, None, 0.0, 1e6]),  # seconds that its prompt is pinned
)
CHOSEN = st.tuples(st.integers(0, 63))
FAILURES = st.tuples(st.sampled_from(["submit", "before", "after"]))
REWOUND = st.tuples(st.integers(0, 63), st.integers(0, 12))
VALUES = {"add": ADDED, "cancel": CHOSEN, "preempt": CHOSEN, "fail": FAILURES, "fork": CHOSEN, "rewind": REWOUND}
VALUES |= {"unpin": CHOSEN}


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(KINDS))
    return Operation(kind, draw(VALUES[kind]) if kind in VALUES else ())


class FailingRunner:
    """A runner whose next submit or sample raises when told so: before anything was computed, or after all was."""

    def __init__(self, runner: Any, ownership: Ownership) -> None:
        self._runner = runner
        self._ownership = ownership
        self.fails = ""

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        self._fail("submit")
        self._ownership.note(plan)
        self._runner.submit(plan, masks)

    def sample(self, step: int) -> StepResult:
        self._fail("before")
        result: StepResult = self._runner.sample(step)
        self._fail("after")
        return result

    def abort(self) -> None:
        self._runner.abort()

    def close(self) -> None:
        self._runner.close()

    def _fail(self, where: str) -> None:
        if self.fails == where:
            self.fails = ""
            raise RuntimeError(f"told to fail: {where}")


class EngineLife(RuleBasedStateMachine):
    """Every answer equals the one computed without an engine; integrity holds after every operation."""

    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        windows=st.sampled_from([(None,), (None, 5), (7,), (None, 9, 3), (4, 6)]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        rows=st.sampled_from([1, 1, 2, 3, 5, 8]),
        budget=st.sampled_from([1, 3, 16, 64]),
        spare=st.sampled_from([0, 1, 2, 4, 6, 8, 16]),
        caching=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
        ahead=st.sampled_from([(0, 1), (0, 1), (1, 1), (1, 1), (1, 2), (2, 3), (3, 4)]),  # plans, stages
        checkpoints=st.sampled_from([None, None, None, None, 0, 1, 3, 12]),
        pinned=st.sampled_from([0, 0, 0, 8, 24]),
        more_groups=st.sampled_from([(), (), (), (CROSS,), (OPTIONAL,), (CROSS, OPTIONAL)]),
        guesses=st.sampled_from([None, (1, 8), (3, 5), (4, 0), (5, 7)]),
        places=st.sampled_from([0, 5, 60, 200]),
        moves=st.tuples(st.sampled_from([0, 1, 4]), st.sampled_from([0, 0, 2]), st.sampled_from([0, 1, 5])),
        preloads=st.sampled_from([0, 1, 2, 2]),
    )
    def start(
        self, windows: tuple[int | None, ...], block_size: int, rows: int, budget: int, spare: int, caching: bool,
        policy: str, ahead: tuple[int, int], checkpoints: int | None, pinned: int, more_groups: tuple[CacheGroup, ...],
        guesses: tuple[int, int] | None, places: int,
        moves: tuple[int, int, int], preloads: int,
    ) -> None:  # fmt: skip
        pinned *= caching
        self.mover = SlowMover(*moves)
        self.crosses = CROSS in more_groups
        self.chunk = budget
        self.forks: dict[str, list[list[int]]] = {}
        self.engine = null_engine(
            windows, blocks=-(-(76 + pinned) // block_size) + 2 + spare, block_size=block_size, rows=rows,
            budget=budget, vocab_size=3, caching=caching, policy=policy, depth=ahead[0], stages=ahead[1],
            checkpoints=checkpoints, more_groups=more_groups, drafter=Guesser(*guesses) if guesses else None,
            mover=self.mover, places=places * caching,
        )  # fmt: skip
        self.recurrent = checkpoints is not None
        self.engine.scheduler.cache.transfers.tier.preloads = preloads
        self._count_preloads()
        if pinned:
            run(self.engine, replace(request("pinned", STEMS[0][:pinned], max_tokens=2), owner=PUBLIC))
            self.counts["pinned prompts"] += 1
        self.pinned = sum(map(len, self.engine.scheduler.cache.tree.pinned))
        self.ownership = Ownership(self.engine.scheduler)
        self.engine.runner = self.runner = FailingRunner(self.engine.runner, self.ownership)  # type: ignore[assignment]
        self.requests: dict[str, EngineRequest] = {}
        self.cancelled: set[str] = set()
        self.collector = Collector()

    def _count_preloads(self) -> None:
        transfers = self.engine.scheduler.cache.transfers
        load = transfers.load

        def counted(sequence: Sequence, allocation: Allocation, nodes: abc.Sequence[Node]) -> None:
            self.counts["loads ahead"] += sequence.slot < 0
            load(sequence, allocation, nodes)

        transfers.load = counted  # type: ignore[method-assign]

    @rule(drawn=st.lists(operations(), min_size=1, max_size=20))
    def live(self, drawn: list[Operation]) -> None:
        for operation in drawn:
            acted = getattr(self, f"_{operation.kind}")(*operation.values)
            self.engine.scheduler.check_integrity()
            self.ownership.check()
            self.counts[operation.kind if acted else "idle"] += 1

    def _add(
        self, stem: tuple[int, ...], cut: int, suffix: list[int], n: int, max_tokens: int, greedy: bool,
        scored: int | None, stop: bool, priority: int, salt: str, owner: str, budget: int | None, end: tuple[int, ...],
        logprobs: int | None, speculate: bool, heard: str, media: tuple[tuple[int, int], ...],
        negative: tuple[int, ...], hint: Retention, pin: float | None,
    ) -> bool:  # fmt: skip
        if negative:
            media, speculate = (), False
        name = f"r{len(self.requests)}"
        asked = request(
            name, (*stem[:cut], *suffix) or (0,), n=n, max_tokens=max_tokens, temperature=0.0 if greedy else 1.0,
            prompt_logprobs=scored, stop_ids=(1,) if stop else (), seed=len(self.requests), priority=priority,
            cache_salt=salt, thinking=None if budget is None else Thinking(end, budget=budget), logprobs=logprobs,
            negative_prompt_ids=negative, guidance_scale=1.5 if negative else 1.0,
        )  # fmt: skip
        spans = [MediaSpan("m", a, b) for a, b in media if a + b <= len(asked.prompt_ids) and b <= self.chunk]
        prompt = list(asked.prompt_ids)
        for span in spans:
            prompt[span.start : span.end] = (index % 3 for index in range(span.length))
        asked = replace(
            asked, prompt_ids=tuple(prompt), owner=owner, speculate=speculate, media=tuple(spans),
            retention=hint, pin=None if pin is None else Pin(name, pin),
            encoder=EncoderInput(heard, 4) if heard and self.crosses else None,
        )  # fmt: skip
        try:
            self.engine.add(asked)
        except RequestError:
            pins = self.engine.scheduler.cache.pins
            assert negative or pin is not None or pins.reserved(0)  # there is no room for two, or beside what is pinned
            return False
        self.counts["pins"] += pin is not None
        self.counts["guided"] += bool(negative)
        self.requests[name] = asked
        self.forks[name] = [[] for _ in range(n)]
        return True

    def _unfinished(self, choice: int) -> str:
        """One of the requests that are queued or running, "" if there are none."""
        scheduler = self.engine.scheduler
        names = sorted({sequence.request.request_id for sequence in (*scheduler.running, *scheduler.waiting)})
        return names[choice % len(names)] if names else ""

    def _cancel(self, choice: int) -> bool:
        name = self._unfinished(choice)
        self.engine.cancel(name)
        self.cancelled.add(name)
        return bool(name)

    def _preempt(self, choice: int) -> bool:
        sequences = self.engine.scheduler.preempt(self._unfinished(choice))
        self.counts["preemptions for memory"] -= sequences
        return sequences > 0

    def _unpin(self, choice: int) -> bool:
        pins = self.engine.scheduler.cache.pins
        held = [request for request, _ in pins.all()]
        if not held:
            return False
        one = held[choice % len(held)]
        assert one.pin is not None
        return pins.drop(one.owner, one.pin.name)

    def _live(self, choice: int) -> Sequence | None:
        """A queued or running sequence of a request under no constraints, whose grammar state would have to follow."""
        every = (*self.engine.scheduler.running, *self.engine.scheduler.waiting)
        live = [one for one in every if not (one.request.constrained or one.follows)]
        live.sort(key=lambda sequence: (sequence.request.request_id, sequence.index))
        return live[choice % len(live)] if live else None

    def _fork(self, choice: int) -> bool:
        self._take(self.engine.scheduler.take_outputs(), failed=False)
        parent = self._live(choice)
        if (
            parent is None
            or parent.partner
            or parent.known == parent.num_prompt
            or len(self.forks[parent.request.request_id]) > 4
        ):
            return False
        name = parent.request.request_id
        child = self.engine.scheduler.fork(name, parent.index)
        assert child == len(self.forks[name])
        self.forks[name].append(list(parent.tokens[parent.num_prompt :]))
        self.collector.tokens[name, child] = list(self.forks[name][child])
        return True

    def _rewind(self, choice: int, back: int) -> bool:
        self._take(self.engine.scheduler.take_outputs(), failed=False)
        sequence = self._live(choice)
        if sequence is None:
            return False
        name = sequence.request.request_id
        begun = len(self.forks[name][sequence.index])
        tokens = max(sequence.num_prompt + begun, len(sequence.tokens) - back)
        running = sequence.allocation is not None
        if tokens == len(sequence.tokens) or not self.engine.scheduler.rewind(name, sequence.index, tokens):
            return False
        self.counts["rewinds in place"] += running and sequence.allocation is not None
        del self.collector.tokens[name, sequence.index][tokens - sequence.num_prompt :]
        return True

    def _clear(self) -> bool:
        cache = self.engine.scheduler.cache
        idle = sum(cache.tree.idle)
        cache.clear()
        return idle > 0

    def _evict(self) -> bool:
        """What is idle leaves the device: what was copied below stays there."""
        tree = self.engine.scheduler.cache.tree
        idle = sum(tree.idle)
        tree.clear()
        return idle > 0

    def _step(self) -> bool:
        works = self.engine.has_work
        self._take(self.engine.step(), failed=False)
        return works

    def _fail(self, where: str) -> bool:
        self.runner.fails = where
        outputs = self.engine.step()
        failed, self.runner.fails = not self.runner.fails, ""
        self._take(outputs, failed=failed)
        return failed

    def _take(self, outputs: list[EngineOutput], *, failed: bool) -> None:
        """Only a step that was told to fail may end a sequence with an error."""
        errors = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
        assert bool(errors) <= failed, errors
        self.counts["errors"] += len(errors)
        self.collector.take(outputs)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.mover.hurry()
        for _ in range(5_000):
            if not self.engine.has_work:
                break
            self._take(self.engine.step(), failed=False)
            self.engine.scheduler.check_integrity()
        assert not self.engine.has_work, "requests are stuck"
        for name, asked in self.requests.items():
            for sequence in range(len(self.forks[name])):
                self._compare(name, asked, sequence)
        self.counts["plans beside one in flight"] += self.ownership.overlapped
        self.counts["plans of other sequences"] += self.ownership.staged
        self.counts["pieces beside one in flight"] += self.ownership.pieces
        stats = self.engine.stats()
        self.counts["preemptions for memory"] += stats.preemptions
        self.counts["hits after checkpoints" if self.recurrent else "hits"] += stats.prefix_hits
        self._finish_saves()
        for kind, number in self.mover.ended.items():
            self.counts[kind] += number
        self.counts["accepted drafts"] += stats.accepted_tokens
        self.counts["refused drafts"] += stats.drafted_tokens - stats.accepted_tokens
        while self._unpin(0):
            self.engine.scheduler.check_integrity()
        self.engine.scheduler.cache.clear()
        self.engine.scheduler.check_integrity()
        assert self.engine.stats().blocks_used == self.pinned, "blocks leaked"
        assert self.engine.stats().blocks_cached == 0, "blocks cannot be evicted"

    def _finish_saves(self) -> None:
        """Has saves that are still on their way end: a last request's steps tell of them."""
        run(self.engine, request("last", (0,), max_tokens=3))
        tier = self.engine.scheduler.cache.transfers.tier
        if isinstance(tier, BoundedTier):
            tier.check_integrity()

    def _compare(self, name: str, asked: EngineRequest, sequence: int) -> None:
        """A whole answer is the true one; what came before a cancellation or a failure is its beginning."""
        got = self.collector.tokens[name, sequence]
        truth = expected_tokens(asked, sequence, 3, self.forks[name][sequence])
        reason = self.collector.finished[name, sequence]
        if reason is FinishReason.CANCELLED:
            assert name in self.cancelled
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR):
            assert got == truth[: len(got)]
        else:
            assert got == truth
            self.counts["whole answers"] += 1


@pytest.mark.timeout(600)
def test_a_hundred_thousand_random_operations(pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "penstock.engine.loop")  # the failures are meant
    EngineLife.counts.clear()
    run_state_machine_as_test(
        EngineLife,
        settings=settings(
            max_examples=LIVES, stateful_step_count=RULES, deadline=None, database=None,
            derandomize=pytestconfig.getoption("--hypothesis-seed") is None, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    counts = EngineLife.counts
    if pytestconfig.getoption("--hypothesis-seed") is not None:
        return  # how often each thing happens differs with the seed
    assert sum(counts[kind] for kind in set(KINDS)) >= 100_000, counts
    assert all(counts[kind] >= 500 for kind in KINDS if kind != "unpin"), counts
    assert counts["accepted drafts"] >= 2_000 and counts["refused drafts"] >= 2_000, counts
    assert counts["rewinds in place"] >= 80, counts
    assert counts["plans of other sequences"] >= 5_000 and counts["pieces beside one in flight"] >= 1_000, counts
    assert counts["save whole"] >= 5_000 and counts["save failed"] >= 500, counts
    assert counts["load whole"] >= 30 and counts["load failed"] >= 3, counts
    assert counts["pins"] >= 200 and counts["unpin"] >= 50, counts
    assert counts["loads ahead"] >= 5, counts
    assert counts["guided"] >= 300 and counts["errors"] >= 500 and counts["preemptions for memory"] >= 100, counts
    assert counts["plans beside one in flight"] >= 5_000, counts
    assert counts["hits after checkpoints"] >= 500 and counts["pinned prompts"] >= 50, counts
    assert counts["hits"] >= 3_000 and counts["whole answers"] >= 5_000, counts
