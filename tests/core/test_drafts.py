"""Drafts: what is accepted, what is taken back, and that answers are those without drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.constraint import Thinking
from penstock.core.protocol import Proposal, SlotResult, StepPlan, StepResult
from penstock.core.request import EngineRequest, FinishReason
from tests.core.harness import Guesser, expected_tokens, null_engine, request, run


def drafted(name: str, prompt: list[int], **more: object) -> EngineRequest:
    return replace(request(name, prompt, **more), speculate=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("right", [0, 5, 8])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (6,)])
@pytest.mark.parametrize("depth", [0, 1])
def test_answers_are_those_without_drafts(windows: tuple[int | None, ...], right: int, depth: int) -> None:
    engine = null_engine(windows, drafter=Guesser(4, right), depth=depth, vocab_size=3)
    asked = [drafted(f"r{i}", [1, 2, i], max_tokens=30, temperature=1.0, seed=i) for i in range(3)]
    collector = run(engine, *asked)
    for one in asked:
        assert collector.tokens[one.request_id, 0] == expected_tokens(one, 0, 3)
    stats = engine.stats()
    assert stats.drafted_tokens > 30
    assert stats.accepted_tokens == stats.drafted_tokens if right == 8 else stats.accepted_tokens < stats.drafted_tokens


def test_drafts_of_one_take_no_tokens_from_another() -> None:
    """A step of 16 tokens for four sequences, each of which would fill it: all advance in every step."""
    engine = null_engine(drafter=Guesser(12, 8), vocab_size=3, budget=16, blocks=128)
    for name in "abcd":
        engine.add(drafted(name, [1, 2], max_tokens=60))
    engine.step()
    for _ in range(8):
        told = {output.request_id for output in engine.step()}
        assert told == set("abcd")
    assert engine.stats().accepted_tokens > 0


def test_right_drafts_save_steps() -> None:
    steps = []
    for right in (0, 8):
        engine = null_engine(drafter=Guesser(3, right), vocab_size=3)
        run(engine, drafted("a", [1, 2], max_tokens=40))
        steps.append(engine.stats().steps)
    assert steps[0] == 40 and steps[1] < 25


@pytest.mark.parametrize("checkpoints", [0, 2, 12])
def test_recurrent_states_go_on_from_the_accepted_draft(checkpoints: int) -> None:
    """With too few slots for states there are no drafts, and the answer is the same."""
    engine = null_engine(drafter=Guesser(3, 5), vocab_size=3, checkpoints=checkpoints)
    collector = run(engine, one := drafted("a", [1, 2, 0, 1, 1], max_tokens=40))
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)
    assert (engine.stats().accepted_tokens > 0) == (checkpoints > 1)


def test_an_answer_ends_at_a_stop_token_among_accepted_drafts() -> None:
    engine = null_engine(drafter=Guesser(4, 8), vocab_size=3)
    one = drafted("a", [1, 2, 2], max_tokens=40, stop_ids=(2,), temperature=1.0)
    collector = run(engine, one)
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)
    assert collector.finished["a", 0] is FinishReason.STOP


def test_drafts_go_no_further_than_an_answer_may() -> None:
    engine = null_engine(drafter=Guesser(4, 8), vocab_size=3, max_model_len=12)
    collector = run(engine, one := drafted("a", [1, 2], max_tokens=10))
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)
    assert collector.finished["a", 0] is FinishReason.LENGTH


def test_nobody_is_preempted_for_drafts() -> None:
    engine = null_engine(blocks=13, block_size=2, drafter=Guesser(4, 8), vocab_size=3, rows=2)
    asked = [drafted(f"r{i}", [1, i], max_tokens=10) for i in range(2)]
    collector = run(engine, *asked)
    assert all(collector.tokens[one.request_id, 0] == expected_tokens(one, 0, 3) for one in asked)
    assert engine.stats().preemptions == 0 and engine.stats().drafted_tokens > 0


def test_what_a_runner_accepts_must_have_been_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(drafter=Guesser(4, 8), vocab_size=3)
    sample = engine.runner.sample

    def wrong(step: int) -> StepResult:
        result = sample(step)
        rows = tuple(row._replace(tokens=(0, *row.tokens)) if len(row.tokens) > 1 else row for row in result.results)
        return result._replace(results=rows)

    monkeypatch.setattr(engine.runner, "sample", wrong)
    collector = run(engine, drafted("a", [1, 2], max_tokens=40))
    assert collector.finished["a", 0] is FinishReason.ERROR
    assert "drafts" in (collector.outputs[-1].error or "")
    assert engine.stats().blocks_used == 0


def test_of_a_tree_of_drafts_its_first_chain_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(vocab_size=3)
    engine.add(one := drafted("a", [1, 2], max_tokens=8))
    engine.step()
    plans: list[StepPlan] = []
    sample, submit = engine.runner.sample, engine.runner.submit

    def proposing(step: int) -> StepResult:
        result = sample(step)
        return result._replace(proposals=(Proposal(0, (1, 0, 2), parents=(-1, 0, 0)),))

    def submitted(plan: StepPlan, masks: object = None) -> None:
        plans.append(plan)
        submit(plan, masks)

    monkeypatch.setattr(engine.runner, "sample", proposing)
    monkeypatch.setattr(engine.runner, "submit", submitted)
    collector = run(engine)
    assert next(span.tokens[1:] for plan in plans for span in plan.scheduled if span.draft_tokens) == (1, 0)
    assert collector.tokens["a", 0] == expected_tokens(one, 0, 3)[1:]


def test_a_result_without_a_token_is_an_error_with_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine(drafter=Guesser(4, 8), vocab_size=3)
    sample = engine.runner.sample
    monkeypatch.setattr(
        engine.runner,
        "sample",
        lambda step: sample(step)._replace(results=(SlotResult(0),)) if step > 2 else sample(step),
    )
    assert run(engine, drafted("a", [1, 2], max_tokens=40)).finished["a", 0] is FinishReason.ERROR
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("right", [0, 5, 8])
@pytest.mark.parametrize("budget", [3, 7])
def test_drafts_go_with_tokens_that_are_forced(right: int, budget: int) -> None:
    """The end of the reasoning comes where it would without drafts, also in the middle of them."""
    thinking = Thinking((1, 0, 2), (), budget)
    engine = null_engine(drafter=Guesser(4, right), vocab_size=3)
    asked = [drafted(f"r{i}", [1, 2, i], max_tokens=30, temperature=1.0, seed=i, thinking=thinking) for i in range(3)]
    collector = run(engine, *asked)
    for one in asked:
        assert collector.tokens[one.request_id, 0] == expected_tokens(one, 0, 3)
    assert engine.stats().drafted_tokens > 30
    assert right == 0 or engine.stats().accepted_tokens > 10
