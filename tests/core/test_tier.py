"""What leaves the device for a lower tier and comes back: late, not at all, or never."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.kv.node import Node
from penstock.core.policies.bounded_tier import BoundedTier
from penstock.core.protocol import CacheOpKind, StepPlan
from penstock.engine.loop import Engine
from tests.core.harness import Collector, SlowMover, expected_tokens, null_engine, request, run

FIRST = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 1]
SECOND = [2, 2, 0, 0, 1, 0, 1, 0, 2, 1, 2, 0, 1]


def tiered(mover: SlowMover, windows: tuple[int | None, ...] = (None,), blocks: int = 16, **more: Any) -> Engine:
    return null_engine(windows, blocks=blocks, vocab_size=3, mover=mover, places=more.pop("places", 160), **more)


def answered(engine: Engine, *prompts: list[int]) -> Collector:
    asked = [request(f"r{id(prompt)}", prompt, max_tokens=5) for prompt in prompts]
    collector = run(engine, *asked)
    for one in asked:
        assert collector.tokens[one.request_id, 0] == expected_tokens(one, 0, 3)
    return collector


def evicted(engine: Engine) -> None:
    """Fills the device with another prompt, so that what was there goes below."""
    answered(engine, FIRST)
    for index in range(9):
        answered(engine, [10 + index, *SECOND])


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("latest", [0, 3])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_was_evicted_is_loaded(windows: tuple[int | None, ...], latest: int, depth: int) -> None:
    mover = SlowMover(latest=latest)
    engine = tiered(mover, windows, depth=depth)
    evicted(engine)
    assert mover.ended["save whole"] > 0
    collector = answered(engine, list(FIRST))
    assert mover.ended["load whole"] > 0
    assert collector.outputs[0].cached_tokens == 12
    engine.scheduler.cache.transfers.tier.check_integrity()  # type: ignore[attr-defined]


def test_without_a_tier_what_is_evicted_is_gone() -> None:
    engine = null_engine(blocks=16, vocab_size=3)
    evicted(engine)
    assert answered(engine, list(FIRST)).outputs[0].cached_tokens == 0


def test_a_load_that_fails_is_computed_instead_and_not_tried_again() -> None:
    mover = SlowMover()
    engine = tiered(mover)
    evicted(engine)
    mover._fates = (16, 0, 0)
    answered(engine, list(FIRST))
    assert engine.stats().failed_loads > 0
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == engine.stats().blocks_cached == 0


def test_a_save_that_fails_leaves_nothing_below() -> None:
    engine = tiered(SlowMover(failing=16))
    evicted(engine)
    assert answered(engine, list(FIRST)).outputs[0].cached_tokens == 0
    assert not list(engine.scheduler.cache.tree.copies_below())


def test_saves_that_never_end_take_no_room_from_requests() -> None:
    mover = SlowMover(lost=16)
    engine = tiered(mover)
    evicted(engine)
    answered(engine, list(range(3)) * 6)
    assert not any(mover.ended.values())
    mover.hurry()
    answered(engine, list(FIRST))
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == 0


def test_what_a_cancelled_request_was_loading_is_kept_until_the_load_has_ended() -> None:
    mover = SlowMover()
    engine = tiered(mover)
    evicted(engine)
    mover._fates = (0, 16, 0)
    engine.add(request("a", FIRST, max_tokens=5))
    for _ in range(3):
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.running[0].loading
    engine.cancel("a")
    engine.step()
    engine.scheduler.check_integrity()
    assert engine.stats().blocks_used > 0, "a load may still write there"
    mover.hurry()
    answered(engine, SECOND)
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == 0


def test_two_who_want_the_same_load_it_once() -> None:
    mover = SlowMover(latest=3)
    engine = tiered(mover)
    evicted(engine)
    before = mover.ended["load whole"]
    answered(engine, list(FIRST), list(FIRST))
    assert 0 < mover.ended["load whole"] - before <= 3


def test_a_plan_may_bring_loads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered(SlowMover(latest=2))
    evicted(engine)
    plans: list[StepPlan] = []
    submit = engine.runner.submit
    monkeypatch.setattr(engine.runner, "submit", lambda plan, masks=None: (plans.append(plan), submit(plan, masks)))
    answered(engine, list(FIRST))
    assert any(op.kind is CacheOpKind.LOAD and op.transfer and op.place for op in plans[0].cache_ops)
    assert not plans[0].scheduled


def test_a_full_tier_gives_up_what_was_used_least_recently_and_nothing_that_is_read() -> None:
    dropped: list[Node] = []
    tier = BoundedTier(2, 2, lambda node, group: dropped.append(node))
    nodes = [Node(None, index, (), 1) for index in range(4)]
    first, second = tier.offer(nodes[0], 0), tier.offer(nodes[1], 0)
    assert first and second and tier.offer(nodes[2], 0) is None, "no more are written at a time"
    for place, node in ((first, nodes[0]), (second, nodes[1])):
        tier.stored(place, node, 0)
        node.below[0] = place
    tier.open(second)
    tier.open(first)
    tier.close(first)
    third = tier.offer(nodes[2], 0)
    assert third == first and dropped == [nodes[0]], "the other place is being read"
    tier.free(second)
    tier.stored(third, nodes[2], 0)
    nodes[2].below[0] = third
    tier.check_integrity()
    fourth = tier.offer(nodes[3], 0)
    assert fourth == third, "a place that is read is not written to, wanted or not"
    tier.close(second)
    tier.check_integrity()
