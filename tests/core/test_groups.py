"""Cache groups of other kinds: an encoder's entries, a drafter's, and prompts with media."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.errors import RequestError
from penstock.config.media import EncoderInput, MediaSpan
from penstock.core.kv.block_pool import BlockPool
from penstock.core.kv.groups import FullGroup, OptionalGroup, SlidingGroup, manager_of
from penstock.core.kv.node import Node
from penstock.core.policies.naming import media_key
from penstock.core.protocol import EncoderWork, StepPlan
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from tests.core.harness import CROSS, OPTIONAL, SlowMover, expected_tokens, null_engine, request, run


def heard(name: str, digest: str, length: int = 6, **more: object) -> EngineRequest:
    return replace(request(name, [1, 2, 0], **more), encoder=EncoderInput(digest, length))  # type: ignore[arg-type]


def watched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    plans: list[StepPlan] = []
    submit = engine.runner.submit

    def submitted(plan: StepPlan, masks: object = None) -> None:
        plans.append(plan)
        submit(plan, masks)

    monkeypatch.setattr(engine.runner, "submit", submitted)
    return plans


def encoded(plans: list[StepPlan]) -> list[EncoderWork]:
    return [work for plan in plans for work in plan.encoder_work]


@pytest.mark.parametrize("depth", [0, 1])
def test_an_encoders_entries_are_computed_once_and_shared(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=3, depth=depth)
    plans = watched(engine, monkeypatch)
    asked = [heard("a", "x"), heard("b", "x"), heard("c", "y"), heard("d", "x", n=2, temperature=1.0)]
    collector = run(engine, *asked)
    for one in asked:
        for index in range(one.sampling.n):
            assert collector.tokens[one.request_id, index] == expected_tokens(one, index, 3)
    assert [work.digest for work in encoded(plans)] == ["x", "y"]
    assert all(work.group == 1 and work.length == 6 and len(work.blocks) == 2 for work in encoded(plans))


@pytest.mark.parametrize("prompt", [[1], [1, 2, 0]])
def test_an_encoders_entries_are_computed_for_who_waits_for_its_partner(prompt: list[int]) -> None:
    """A step may have encoder work and no tokens: those of a guided sequence wait until both of its pair are there."""
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=3, rows=2)
    more = {"guidance_scale": 1.5, "negative_prompt_ids": (1,)}
    asked = [replace(heard("a", "x", n=3, **more), prompt_ids=tuple(prompt)), heard("b", "y")]
    collector = run(engine, *asked)
    for one in asked:
        for index in range(one.sampling.n):
            assert collector.tokens[one.request_id, index] == expected_tokens(one, index, 3)


def test_prompts_are_not_shared_by_those_who_attend_to_something_else() -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=3)
    run(engine, heard("a", "x"))
    assert run(engine, heard("b", "y")).cached("b") == 0, "keys behind the first cross attention are others"
    assert run(engine, heard("c", "x")).cached("c") > 0


def test_entries_nobody_uses_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 5), vocab_size=3)
    plans = watched(engine, monkeypatch)
    for digest in ("x", "y", "x", "z", "x", "y"):
        run(engine, heard(f"{len(plans)}", digest))
    assert [work.digest for work in encoded(plans)] == ["x", "y", "z", "y"], "x was used last when z came"
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == engine.stats().blocks_cached == 0


def test_who_has_no_room_for_its_entries_waits() -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 5), vocab_size=3)
    asked = [heard(f"r{i}", f"d{i}", length=12, max_tokens=12) for i in range(3)]
    for one in asked:
        engine.add(one)
    engine.step()
    assert len(engine.scheduler.running) == 1
    collector = run(engine)
    assert all((one.request_id, 0) in collector.finished for one in asked)


def test_a_store_full_of_entries_that_nobody_uses_holds_nobody_back() -> None:
    """What was encoded does not grow with its sequence: no room is kept for that, or pairs would wait for ever."""
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 5), vocab_size=3)
    run(engine, heard("a", "x"), heard("b", "y"))
    assert not engine.scheduler.cache.available(1)
    pair = heard("c", "x", guidance_scale=1.5, negative_prompt_ids=(1, 2))
    asked = [pair, heard("d", "y"), request("e", [2])]
    for one in asked:
        engine.add(one)
    engine.step()
    assert len(engine.scheduler.running) == 4
    collector = run(engine)
    assert all(collector.tokens[one.request_id, 0] for one in asked)
    assert run(engine, replace(pair, request_id="f")).tokens["f", 0] == expected_tokens(pair, 0, 3)


def test_owners_do_not_share_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=3)
    plans = watched(engine, monkeypatch)
    run(engine, replace(heard("a", "x"), owner="one"), replace(heard("b", "x"), owner="two"))
    assert len(encoded(plans)) == 2


def test_what_a_failed_step_should_have_encoded_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=3)
    plans = watched(engine, monkeypatch)
    sample = engine.runner.sample
    monkeypatch.setattr(engine.runner, "sample", lambda step: 1 / 0)
    run(engine, heard("a", "x"))
    monkeypatch.setattr(engine.runner, "sample", sample)
    engine.runner._queue.clear()  # type: ignore[attr-defined]
    collector = run(engine, one := heard("b", "x"))
    assert collector.tokens["b", 0] == expected_tokens(one, 0, 3)
    assert [work.digest for work in encoded(plans)] == ["x", "x"]
    engine.scheduler.cache.clear()
    assert engine.stats().blocks_used == 0


def test_more_entries_than_the_cache_has_are_refused() -> None:
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 5))
    with pytest.raises(RequestError, match="KV cache"):
        engine.add(heard("a", "x", length=17))
    with pytest.raises(RequestError, match="no encoder"):
        null_engine().add(heard("a", "x", length=3))


def test_entries_that_are_optional_void_no_hit() -> None:
    """Blocks of the optional group are evicted one by one; the prefix is found without them."""
    engine = null_engine(more_groups=(OPTIONAL,), blocks=(64, 8), vocab_size=3)
    first = [1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 1]
    run(engine, request("a", first, max_tokens=2))
    run(engine, request("b", [0, *first, *first[:8]], max_tokens=2))  # needs most of the optional group's blocks
    collector = run(engine, one := request("c", first, max_tokens=2))
    assert collector.cached("c") == 12
    assert collector.tokens["c", 0] == expected_tokens(one, 0, 3)


def test_what_each_kind_needs_of_a_prefix() -> None:
    pool = BlockPool(8)
    nodes = [Node(None, (), (), 1)]
    for index, block in enumerate((3, 0, 5), 1):
        nodes.append(Node(nodes[-1], index, (1, 2, 3, 4), 1))
        nodes[-1].blocks[0] = block
    full, sliding, optional = FullGroup(0, pool, 4), SlidingGroup(0, pool, 4, 5), OptionalGroup(0, pool, 4)
    assert [group.first_needed(12) for group in (full, sliding, optional)] == [0, 8, 12]
    assert [group.attach(nodes[1:], 12).blocks for group in (sliding, optional)] == [[0, 0, 5], [0, 0, 5]]
    assert [group.attach(nodes[1:], 12).live_from for group in (full, sliding, optional)] == [0, 2, 2]
    assert (full.peak_blocks(40, 4), sliding.peak_blocks(40, 4)) == (10, 3)
    with pytest.raises(ValueError, match="has no blocks"):
        manager_of(CacheGroup(CacheKind.STATE, None, (0,), 0), 0, pool, 4)


def shown(name: str, *media: MediaSpan, prompt: int = 16, **more: object) -> EngineRequest:
    return replace(request(name, [1] * prompt, **more), media=media)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [5, 6, 7, 64])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_no_chunk_ends_inside_a_medium(
    budget: int, windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = null_engine(windows, budget=budget, vocab_size=3)
    plans = watched(engine, monkeypatch)
    spans = (MediaSpan("x", 1, 5), MediaSpan("y", 7, 4))
    run(engine, shown("a", *spans), shown("b", prompt=9))
    ends = {span.start + len(span.tokens) for plan in plans for span in plan.scheduled if span.slot == 0}
    assert not any(span.start < end < span.end for end in ends for span in spans)


def test_media_are_told_apart_by_digest_and_shared_as_a_whole() -> None:
    engine = null_engine(vocab_size=3)
    x = MediaSpan("x", 2, 7)
    run(engine, shown("a", x))
    assert run(engine, shown("b", x)).cached("b") == 15
    assert run(engine, shown("c", replace(x, digest="y"))).cached("c") == 2
    assert run(engine, shown("d", x, prompt=10)).cached("d") == 9
    keys = {media_key(digest, index) for digest in ("x", "y", "xy") for index in range(300)}
    assert len(keys) == 900 and min(keys) > 2**40


@pytest.mark.parametrize("spans", [[(9, 8)], [(2, 0)], [(4, 3), (6, 2)], [(8, 2), (2, 3)]])
def test_media_lie_in_the_prompt_in_order_and_apart(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(RequestError, match="a medium is said to lie"):
        null_engine().add(shown("a", *(MediaSpan("x", *span) for span in spans)))


def test_the_encoder_is_asked_for_placeholders_when_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(budget=16, vocab_size=3)
    plans = watched(engine, monkeypatch)
    spans = (MediaSpan("x", 1, 9), MediaSpan("y", 12, 3))
    run(engine, shown("a", *spans))
    works = [(index, work) for index, plan in enumerate(plans) for work in plan.encoder_work]
    assert [(work.digest, work.start, work.length, work.group) for _, work in works] == [
        ("x", 1, 9, None),
        ("y", 12, 3, None),
    ]
    for index, work in works:
        (span,) = plans[index].scheduled
        assert span.slot == work.slot and span.start <= work.start < work.start + work.length
        assert work.start + work.length <= span.start + len(span.tokens)
    run(engine, shown("b", *spans))
    assert len(encoded(plans)) == 2, "what is cached is not encoded again"


def test_a_medium_larger_than_a_step_is_refused() -> None:
    with pytest.raises(RequestError, match="takes 9 tokens, but a step computes at most 8"):
        null_engine(budget=8).add(shown("a", MediaSpan("x", 2, 9)))


def test_what_a_failed_step_was_to_encode_for_who_still_loads_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    engine = null_engine(more_groups=(CROSS,), blocks=(64, 9), vocab_size=50, mover=mover, places=32)
    prompt, heard = list(range(1, 15)), EncoderInput("audio", 6)
    run(engine, replace(request("below", prompt), encoder=heard))
    while engine.prepare():
        pass
    engine.scheduler.cache.tree.clear()
    engine.scheduler.cache.cross.clear()
    mover.fates = (0, 16, 0)  # no load ends
    asked = replace(request("loads", [*prompt, 3]), encoder=heard)
    engine.add(asked)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "submit", None)
        engine.step()
    assert engine.scheduler.waiting and engine.scheduler.cache.cross.idle == 0
    mover.fates = (0, 0, 0)
    assert run(engine).tokens["loads", 0] == expected_tokens(asked, 0)
