"""Recurrent models: prefixes are had where a state was kept, on the null runner, whose answers come from states."""

from __future__ import annotations

import pytest

from penstock.core.kv.node import Node
from penstock.core.policies.checkpoints import Checkpoints
from penstock.core.protocol import CacheOpKind
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from tests.core.harness import Collector, SlowMover, expected_tokens, null_engine, request, run

PROMPT = list(range(1, 31))  # seven blocks of four tokens, and two tokens


def answered(engine: Engine, *asked: EngineRequest) -> Collector:
    collector = run(engine, *asked)
    for one in asked:
        for sequence in range(one.sampling.n):
            assert collector.tokens[one.request_id, sequence] == expected_tokens(one, sequence), (
                one.request_id,
                sequence,
            )
    return collector


def cached(engine: Engine, name: str, prompt: list[int]) -> int:
    return answered(engine, request(name, prompt)).cached(name)


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_whole_block_of_a_prompt_is_kept(depth: int) -> None:
    engine = null_engine(checkpoints=4, depth=depth)
    assert cached(engine, "a", PROMPT) == 0
    assert cached(engine, "again", PROMPT) == 28
    assert cached(engine, "longer", [*PROMPT[:28], 45, 46, 47, 48, 49]) == 28
    assert cached(engine, "shorter", PROMPT[:20]) == 0  # there is no state before the last block
    assert engine.stats().prefix_hits == 56
    assert ("no_checkpoint", 1) in engine.stats().miss_reasons


def test_an_answer_can_be_continued_from_its_end() -> None:
    engine = null_engine(checkpoints=4)
    asked = request("a", PROMPT)
    said = answered(engine, asked).tokens["a", 0]
    known = [*PROMPT, *said]
    assert cached(engine, "next turn", [*known, 7, 8, 9]) == len(known) - 1  # the last token was never computed
    partial = [*known[:-1], 7, 8]
    assert cached(engine, "another", partial) == len(known) - 1


def test_where_prompts_part_a_state_is_kept_the_second_time() -> None:
    engine = null_engine(checkpoints=8)
    first, second, third = ([*PROMPT[:17], *([end] * 9)] for end in (41, 42, 43))
    assert [cached(engine, name, prompt) for name, prompt in (("1", first), ("2", second), ("3", third))] == [0, 0, 16]


@pytest.mark.parametrize("depth", [0, 1])
def test_sequences_wait_for_the_state_and_go_on_from_it(depth: int) -> None:
    engine = null_engine(checkpoints=4, depth=depth)
    collector = answered(engine, request("a", PROMPT, n=3, temperature=1.0, seed=3))
    assert [collector.cached("a", sequence) for sequence in range(3)] == [0, 28, 28]


def test_a_prefix_in_flight_without_a_state_to_come_is_not_waited_for() -> None:
    engine = null_engine(checkpoints=4)
    collector = answered(engine, request("a", PROMPT), request("b", [*PROMPT[:17], 40, 41, 42, 43, 44]))
    assert collector.cached("b") == 0
    assert not engine.stats().held_back


def test_a_preempted_sequence_goes_on_from_its_own_state() -> None:
    engine = null_engine(checkpoints=2)
    asked = request("a", PROMPT, max_tokens=20)
    engine.add(asked)
    collector = Collector()
    for _ in range(9):
        collector.take(engine.step())
    computed = engine.scheduler.running[0].computed
    assert engine.scheduler.preempt("a") == 1
    collector.take(engine.step())
    assert engine.scheduler.running[0].committed > computed - 1
    while engine.has_work:
        collector.take(engine.step())
        engine.scheduler.check_integrity()
    assert collector.tokens["a", 0] == expected_tokens(asked)


@pytest.mark.parametrize("checkpoints", [0, 1])
def test_few_slots_change_no_answer(checkpoints: int) -> None:
    engine = null_engine(checkpoints=checkpoints)
    prompts = [[stem] * 9 + PROMPT[:9] for stem in (31, 32, 33)]
    for turn in range(2):
        answered(engine, *(request(f"{turn}.{i}", prompt, n=2) for i, prompt in enumerate(prompts)))
    assert checkpoints or not engine.stats().prefix_hits


def test_what_is_used_least_recently_goes_first() -> None:
    engine = null_engine(checkpoints=4)  # a request keeps two: of its prompt's last block and of its end
    a, b, c = ([stem] * 9 for stem in (31, 32, 33))
    assert [cached(engine, name, prompt) for name, prompt in (("a", a), ("b", b), ("a again", a))] == [0, 0, 8]
    assert [cached(engine, name, prompt) for name, prompt in (("c", c), ("a still", a), ("b gone", b))] == [0, 8, 0]


def test_states_are_copied_by_operations_of_plans() -> None:
    engine = null_engine(checkpoints=4, rows=2)
    engine.add(request("a", PROMPT, max_tokens=3))
    kinds = []
    while engine.has_work:
        plan = engine.scheduler.plan()
        assert plan is not None
        kinds += [(op.kind, op.group, op.source, op.target, op.num_tokens) for op in plan.cache_ops]
        engine.runner.submit(plan)
        engine.scheduler.commit(engine.runner.sample(plan.step))
        engine.scheduler.take_outputs()
    assert kinds == [(CacheOpKind.CHECKPOINT, 1, 0, 2, 28)]
    engine.add(request("b", PROMPT, max_tokens=3))
    plan = engine.scheduler.plan()
    assert plan is not None
    found = [(op.kind, op.group, op.source, op.num_tokens) for op in plan.cache_ops]
    assert found == [(CacheOpKind.CHECKPOINT, 1, 0, 32), (CacheOpKind.COPY, 1, 2, 28)]  # the end of "a" comes first
    assert plan.cache_ops[1].target == plan.scheduled[0].slot


def test_a_failed_step_forgets_what_it_may_not_have_copied() -> None:
    engine = null_engine(checkpoints=4)
    assert cached(engine, "a", PROMPT) == 0
    sample, engine.runner.sample = engine.runner.sample, lambda step, masks=None: 1 / 0  # type: ignore[assignment]
    engine.add(request("b", PROMPT))
    assert engine.step()[0].error
    engine.runner.sample = sample  # type: ignore[method-assign]
    assert cached(engine, "c", PROMPT) == 0
    assert cached(engine, "d", PROMPT) == 28


def test_slots() -> None:
    slots, (a, b, c) = Checkpoints(3, 2), (Node(None, 0, (), 1) for _ in range(3))
    for node, slot in ((a, 3), (b, 4)):
        node.filled = True
        assert slots.give(node) == slot
    slots.check_integrity()
    slots.touch(3)
    c.filled = True
    assert slots.give(c) == 4 and b.state is None and a.state == 3
    slots.drop(a)
    slots.drop(a)
    slots.check_integrity()
    slots.clear()
    assert c.state is None
    slots.check_integrity()
    assert Checkpoints(3, 0).give(a) is None


def test_a_load_that_a_step_ends_leaves_no_state_that_nobody_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    engine = null_engine(checkpoints=8, mover=mover, places=32)
    answered(engine, request("below", PROMPT))
    while engine.prepare():
        pass
    engine.scheduler.cache.tree.clear()
    assert cached(engine, "on the device", PROMPT[:14]) == 0
    mover.fates = (0, 16, 0)  # no load ends
    engine.add(request("loads", [*PROMPT, 3]))
    engine.step()
    assert engine.scheduler.cache.transfers.loading
    engine.add(request("other", [40, 41]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "submit", None)
        engine.step()
    mover.fates = (0, 0, 0)
    assert run(engine).tokens["loads", 0] == expected_tokens(request("loads", [*PROMPT, 3]), 0)
    answered(engine, request("found", [*PROMPT[:12], 45, 46]))


def test_a_loaded_state_that_a_failed_step_was_to_copy_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    mover = SlowMover()
    engine = null_engine(checkpoints=8, mover=mover, places=32, policy="priority", budget=8)
    answered(engine, request("below", PROMPT))
    while engine.prepare():
        pass
    engine.scheduler.cache.tree.clear()
    mover.fates = (0, 16, 0)  # no load ends
    engine.add(request("loads", [*PROMPT, 3]))
    engine.step()
    engine.add(request("first", list(range(1, 60)), priority=-1))  # takes all tokens of every step
    engine.step()
    mover.hurry()
    engine.step()
    (loads,) = (one for one in engine.scheduler.running if one.request.request_id == "loads")
    assert (loads.loading, loads.computed, loads.introduced) == (False, 28, False)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "sample", None)
        assert [one.request_id for one in engine.step() if one.error] == ["first"]
    assert run(engine).tokens["loads", 0] == expected_tokens(request("loads", [*PROMPT, 3]), 0)
