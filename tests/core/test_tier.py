"""What leaves the device for a lower tier and comes back: late, not at all, or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.kv.node import Namespace, Node
from penstock.core.policies import bounded_tier
from penstock.core.policies.bounded_tier import BoundedTier, Entry, NoCatalog, restored
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
    mover.fates = (16, 0, 0)
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


@pytest.mark.parametrize("checkpoints", [None, 6])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_what_lies_below_comes_up_while_who_asked_waits(
    windows: tuple[int | None, ...], checkpoints: int | None
) -> None:
    mover = SlowMover(latest=2)
    engine = tiered(mover, windows, rows=1, blocks=20, checkpoints=checkpoints)
    evicted(engine)
    before = mover.ended["load whole"]
    running, waiting = request("running", [7], max_tokens=12), request("waiting", FIRST, max_tokens=5)
    engine.add(running)
    engine.step()
    engine.add(waiting)
    collector = Collector()
    while ("running", 0) not in collector.finished:
        collector.take(engine.step())
        engine.scheduler.check_integrity()
    assert mover.ended["load whole"] > before, "it is there"
    assert engine.scheduler.waiting[0].request is waiting
    before = mover.ended["load whole"]
    rest = run(engine)
    assert mover.ended["load whole"] == before and rest.outputs[0].cached_tokens == 12
    assert rest.tokens["waiting", 0] == expected_tokens(waiting, 0, 3)


def test_what_comes_up_for_a_request_that_has_gone_leaves_nothing() -> None:
    mover = SlowMover()
    engine = tiered(mover, rows=1, blocks=20)
    evicted(engine)
    mover.fates = (0, 16, 0)
    engine.add(request("running", [7], max_tokens=8))
    engine.step()
    engine.add(request("waiting", FIRST, max_tokens=5))
    engine.step()
    assert engine.scheduler.cache.transfers.ahead()
    engine.cancel("waiting")
    run(engine)
    mover.hurry()
    answered(engine, SECOND)
    assert not engine.scheduler.cache.transfers.ahead()
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == 0


def test_what_a_cancelled_request_was_loading_is_kept_until_the_load_has_ended() -> None:
    mover = SlowMover()
    engine = tiered(mover)
    evicted(engine)
    mover.fates = (0, 16, 0)
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


def stored(tier: BoundedTier, node: Node) -> int:
    """A copy of a node's only block, which has left the device."""
    place = tier.offer(node, 0)
    assert place is not None
    tier.stored(place, node, 0)
    node.below[0] = place
    tier.check_integrity()
    return place


def full_tier(places: int) -> tuple[BoundedTier, list[Node]]:
    dropped: list[Node] = []

    def forget(node: Node, group: int) -> None:
        dropped.append(node)
        del node.below[group]

    return BoundedTier((places,), 2, forget), dropped


def test_a_full_tier_gives_up_what_is_worth_least_and_nothing_that_is_read() -> None:
    tier, dropped = full_tier(2)
    root = Node(None, "", (), 1)
    nodes = [Node(root, (index,), (index,), 1) for index in range(4)]
    nodes[0].uses = 9
    first, second = stored(tier, nodes[0]), stored(tier, nodes[1])
    tier.open(second)
    third = tier.offer(nodes[2], 0)
    assert third == first and dropped == [nodes[0]], "the other place is being read"
    tier.free(second)
    del nodes[1].below[0]
    tier.stored(third, nodes[2], 0)
    nodes[2].below[0] = third
    tier.check_integrity()
    fourth = tier.offer(nodes[3], 0)
    assert fourth == third, "a place that is read is not written to, wanted or not"
    tier.close(second, failed=False)
    tier.check_integrity()


def test_what_is_used_stays_longer() -> None:
    tier, dropped = full_tier(2)
    root = Node(None, "", (), 1)
    often, once, new = (Node(root, (index,), (index,), 1) for index in range(3))
    often.uses = 2
    stored(tier, often), stored(tier, once), stored(tier, new)
    assert dropped == [once]


def test_a_prefix_goes_after_what_it_leads_to() -> None:
    """However long: what is looked at for one that may go is bounded."""
    tier, dropped = full_tier(200)
    chain = [Node(None, "", (), 1)]
    for index in range(200):
        chain.append(Node(chain[-1], (index,), (index,), 1))
        stored(tier, chain[-1])
    other = Node(chain[0], (-1,), (-1,), 1)
    for _ in range(3):
        place = tier.offer(other, 0)
        assert place is not None
        tier.free(place)
    assert dropped == [chain[200]], "one place is enough for all"
    taken = [tier.offer(other, 0) for _ in range(2)]
    assert None not in taken and dropped == [chain[200], chain[199]]


def test_what_is_on_the_device_keeps_its_copy() -> None:
    tier, dropped = full_tier(1)
    root = Node(None, "", (), 1)
    first, second = Node(root, (1,), (1,), 1), Node(root, (2,), (2,), 1)
    stored(tier, first)
    first.blocks[0] = 5
    assert tier.offer(second, 0) is None and not dropped
    first.blocks[0] = 0
    assert tier.offer(second, 0) is not None and dropped == [first]


def test_a_tier_that_is_slower_than_computing_is_not_asked() -> None:
    tier, _ = full_tier(4)
    root = Node(None, "", (), 1)
    node = Node(root, (1,), (1,), 1)
    place = stored(tier, node)
    assert tier.worth(0, [node]), "nobody knows how long computing takes"
    tier.seconds_for = lambda tokens: 1e-9 * tokens
    assert tier.worth(0, [node]), "nobody knows how long loading takes"
    assert tier.open(place) >= 0.5
    tier.close(place, failed=False)
    assert not tier.worth(0, [node])
    tier.seconds_for = lambda tokens: 10.0 * tokens
    assert tier.worth(0, [node])


def test_a_load_that_is_declined_costs_no_other_hit_and_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered(SlowMover())
    evicted(engine)
    tier = engine.scheduler.cache.transfers.tier
    assert isinstance(tier, BoundedTier)
    answered(engine, [*FIRST[:7], 9])  # loads a block, and computes part of the next
    monkeypatch.setattr(tier, "worth", lambda start, nodes: False)
    engine.add(request("a", FIRST, max_tokens=5))
    (waiting,) = engine.scheduler.waiting
    assert all(engine.scheduler.cache.match(waiting, waiting.reusable).reason == "declined" for _ in range(3))
    assert run(engine).outputs[0].cached_tokens == 7
    assert tier.counters.declined == 1


@pytest.mark.parametrize("owner", ["", "somebody"])
def test_a_prefix_is_found_again_by_content_in_another_process(owner: str) -> None:
    """The index of what lies below is kept with it: it is all that another process needs."""
    kept: dict[int, Entry] = {}

    class Kept(NoCatalog):
        def describe(self, place: int, entry: Entry) -> None:
            kept[place] = entry

    mover = SlowMover()
    engines = []
    for _ in range(2):
        engine = tiered(mover, (None, 6))
        cache = engine.scheduler.cache
        tier = BoundedTier((160, 160), 16, cache.tree.forget_below, catalog=Kept())
        cache.transfers.tier = tier
        engines.append((engine, tier))
    (first, _), (second, tier) = engines
    prompts = [FIRST, [*FIRST[:8], 2, 2, 2, 2, 2, 2, 2], SECOND]
    run(first, *(replace(request(f"a{index}", prompt), owner=owner) for index, prompt in enumerate(prompts)))
    while first.prepare():
        pass
    lost = (1000, kept[1]._replace(parent=b"of nobody"))
    assert restored(second.scheduler.cache, tier, [*list(kept.items())[::-1], lost]) == [1000]
    second.scheduler.check_integrity()
    tier.check_integrity()
    for index, (prompt, hit) in enumerate(zip(prompts, (12, 12, 12), strict=True)):
        asked = replace(request(f"b{index}", prompt), owner=owner)
        collector = run(second, asked)
        assert collector.tokens[asked.request_id, 0] == expected_tokens(asked, 0, 3)
        assert collector.outputs[0].cached_tokens == hit
        other = replace(request(f"c{index}", [*prompt, 1]), owner=f"another {index}", cache_salt="salt")
        assert run(second, other).outputs[0].cached_tokens == 0


def entries(owner: str | None, *blocks: tuple[int, ...]) -> list[Entry]:
    """A prefix's copies, the first of an owner, None for everybody."""
    tree = tiered(SlowMover()).scheduler.cache.tree
    node, made = None, []
    for block in blocks:
        namespace = Namespace("", None if owner is None or node else ("", owner))
        node = tree.restore(node, namespace, block)
        made.append(bounded_tier.entry_of(node, 0))
    return made


def test_what_is_found_again_is_what_its_digest_says_and_everything_once() -> None:
    """A prefix of one owner stays theirs beside the same one of everybody; what is there twice is there once."""
    stem, mine = (5, 5, 5, 5), (6, 6, 6, 6)
    own, public = entries("me", stem, mine), entries(None, stem)
    forged = [own[0]._replace(key=mine), own[0]._replace(key=()), own[1]._replace(parent=public[0].digest)]
    engine = tiered(SlowMover())
    cache = engine.scheduler.cache
    tier = BoundedTier((20,), 2, cache.tree.forget_below)
    found = list(enumerate([*own, *public, own[0], *public, *forged[:2]], 1))
    assert restored(cache, tier, found) == [4, 5, 6, 7]
    engine.scheduler.check_integrity()
    tier.check_integrity()
    wanted = [*stem, *mine]
    found_by = {who: cache.tree.match(Namespace("", ("", who)), wanted, 8).reach for who in ("me", "you")}
    assert found_by == {"me": 4, "you": 4}, "what is everybody's stands before what is one's own"
    assert [node.key for node in tier.ends(9)] == [stem, mine], "what was made last comes first"
    second = tiered(SlowMover()).scheduler.cache
    tier = BoundedTier((20,), 2, second.tree.forget_below)
    assert restored(second, tier, list(enumerate([*public, forged[2]], 1))) == [2]
    second.tree.check_integrity()


def test_all_that_is_computed_is_copied() -> None:
    mover = SlowMover(latest=2)
    engine = tiered(mover)
    answered(engine, FIRST)
    while engine.prepare():
        pass
    assert mover.ended["save whole"] == (len(FIRST) + 4) // 4
    assert not engine.scheduler.cache.transfers.owed


def test_nothing_waits_for_a_save_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover(lost=16)
    engine = tiered(mover)
    answered(engine, FIRST)
    transfers = engine.scheduler.cache.transfers
    assert transfers.owed
    for _ in range(20):
        engine.prepare()
    monkeypatch.setattr("penstock.core.kv.transfers._HANGS_S", 0.0)
    assert not transfers.owed and not engine.prepare()
    mover.hurry()
    answered(engine, SECOND)
    assert not list(transfers.blocks()) and len(list(engine.scheduler.cache.tree.copies_below())) >= 6


def test_who_waits_too_long_for_a_load_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_tier, "_PATIENCE", 0.0)
    mover = SlowMover(lost=16)
    engine = tiered(SlowMover())
    evicted(engine)
    engine.runner._mover = mover  # type: ignore[attr-defined]
    collector = answered(engine, list(FIRST))
    assert (collector.outputs[0].cached_tokens, collector.outputs[0].missed) == (0, "load_late")
    assert not mover.ended["load whole"]
    engine.scheduler.check_integrity()


def test_a_state_is_not_copied_once_the_copy_behind_it_that_kept_its_node_has_gone() -> None:
    tree = tiered(SlowMover(), (7,), checkpoints=4).scheduler.cache.tree
    space = Namespace("", ("", "me"))
    node = tree.restore(None, space, (1, 2, 0, 1))
    child = tree.restore(node, space, (2, 2, 1, 0))
    tier = BoundedTier((2, 1), 4, tree.forget_below)
    assert tier.adopt(child, 1)
    assert tier.offer(node, 1) is None and node.parent is None
    tier.check_integrity()
    assert tier.copies == 0
