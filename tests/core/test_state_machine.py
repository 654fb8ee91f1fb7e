"""Random lives of the engine: any order of requests, cancellations and steps, over all cache shapes."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.core.request import EngineRequest, FinishReason
from tests.core.harness import Collector, expected_tokens, null_engine, request

EXAMPLES, RULES = 330, 60
operations = {"done": 0, "preempted": 0, "hits": 0}
STEMS = tuple(tuple((stem * 7 + i * i) % 3 for i in range(40)) for stem in range(3))


class EngineLife(RuleBasedStateMachine):
    """Every answer equals the one computed without an engine; integrity holds after every operation."""

    @initialize(
        windows=st.sampled_from([(None,), (None, 5), (7,), (None, 9, 3), (4, 6)]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        rows=st.integers(1, 8),
        budget=st.sampled_from([1, 3, 16, 64]),
        spare=st.integers(0, 6),
        caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        depth=st.integers(0, 1),
    )
    def start(
        self, windows: tuple[int | None, ...], block_size: int, rows: int, budget: int, spare: int, caching: bool,
        policy: str, depth: int,
    ) -> None:  # fmt: skip
        self.engine = null_engine(
            windows, blocks=-(-76 // block_size) + 2 + spare, block_size=block_size, rows=rows, budget=budget,
            vocab_size=3, caching=caching, policy=policy, depth=depth,
        )  # fmt: skip
        self.requests: dict[str, EngineRequest] = {}
        self.cancelled: set[str] = set()
        self.collector = Collector()

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 40),
        suffix=st.lists(st.integers(0, 2), max_size=6),
        n=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(1, 28),
        greedy=st.booleans(),
        scored=st.sampled_from([None, None, None, 0]),
        stop=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(
        self, stem: tuple[int, ...], cut: int, suffix: list[int], n: int, max_tokens: int, greedy: bool,
        scored: int | None, stop: bool, priority: int, salt: str,
    ) -> None:  # fmt: skip
        name = f"r{len(self.requests)}"
        asked = request(
            name, (*stem[:cut], *suffix) or (0,), n=n, max_tokens=max_tokens, temperature=0.0 if greedy else 1.0,
            prompt_logprobs=scored, stop_ids=(1,) if stop else (), seed=len(self.requests), priority=priority,
            cache_salt=salt,
        )  # fmt: skip
        self.engine.add(asked)
        self.requests[name] = asked
        self._checked()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.engine.cancel(name)
        self.cancelled.add(name)
        self._checked()

    @rule(steps=st.integers(1, 14))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.collector.take(self.engine.step())
            self._checked()

    def _checked(self) -> None:
        operations["done"] += 1
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(5_000):
            if not self.engine.has_work:
                break
            self.collector.take(self.engine.step())
            self._checked()
        assert not self.engine.has_work, "requests are stuck"
        for name, asked in self.requests.items():
            for branch in range(asked.sampling.n):
                got, truth = self.collector.tokens[name, branch], expected_tokens(asked, branch, 3)
                if self.collector.finished[name, branch] is FinishReason.CANCELLED:
                    assert name in self.cancelled and got == truth[: len(got)]
                else:
                    assert got == truth
        stats = self.engine.stats()
        operations["preempted"] += stats.preemptions
        operations["hits"] += stats.prefix_hits
        self.engine.scheduler.cache.tree.clear()
        while self.engine.scheduler.outstanding:
            self.engine.step()
        self.engine.scheduler.check_integrity()
        assert self.engine.stats().blocks_used == self.engine.stats().blocks_cached == 0, "blocks leaked"


def test_a_hundred_thousand_random_operations() -> None:
    EngineLife.TestCase.settings = settings(
        max_examples=EXAMPLES, stateful_step_count=RULES, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    EngineLife.TestCase().runTest()
    assert operations["done"] >= 100_000, operations
    assert operations["preempted"] > 100 and operations["hits"] > 1_000, operations
