"""What steps cost is learned from what they have cost."""

from __future__ import annotations

import random

import pytest

from penstock.core.policies.step_cost import LearnedStepCost, StepShape, UnknownStepCost
from penstock.core.protocol import ScheduledTokens, StepPlan, StepTimings
from tests.core.harness import null_engine, request, run


def plan_of(random_: random.Random) -> StepPlan:
    spans = []
    for slot in range(random_.randint(1, 8)):
        prompt = random_.choice([0, 0, 0, random_.randint(1, 60)])
        generated = 0 if prompt else random_.randint(1, 3)
        drafts = 0 if prompt else random_.choice([0, random_.randint(1, 6)])
        tokens = (1,) * (prompt + generated + drafts)
        spans.append(ScheduledTokens(slot, random_.randint(0, 2000), tokens, prompt, drafts, True, ()))
    return StepPlan(0, scheduled=tuple(spans))


def true_seconds(shape: StepShape) -> float:
    return (
        0.004
        + 0.0002 * shape.prompt
        + 0.0005 * shape.generated
        + 1e-7 * shape.context
        + 0.0001 * shape.rows
        + (0.0003 * shape.drafts)
    )


def test_costs_are_found_and_so_is_their_error() -> None:
    random_ = random.Random(1)
    cost = LearnedStepCost()
    for _ in range(400):
        plan = plan_of(random_)
        seconds = true_seconds(StepShape.of(plan)) * random_.uniform(0.95, 1.05)
        cost.learn(plan, StepTimings(0.1 * seconds, 0.7 * seconds, 0.2 * seconds))
    for _ in range(20):
        shape = StepShape.of(plan_of(random_))
        found = cost.estimate(shape)
        assert found is not None
        assert found.seconds == pytest.approx(true_seconds(shape), rel=0.06)
        assert 0.0001 < found.error < 0.001


def test_nothing_is_told_before_it_is_known() -> None:
    shape = StepShape(10, 1, 100, 2)
    cost = LearnedStepCost()
    for _ in range(20):
        cost.learn(plan_of(random.Random(2)), StepTimings(0.0, 0.01, 0.0))
    assert cost.estimate(shape) is None
    unknown = UnknownStepCost()
    unknown.learn(StepPlan(0), StepTimings())
    assert unknown.estimate(shape) is None


def test_a_plans_shape() -> None:
    spans = (ScheduledTokens(0, 10, (1, 2, 3), 2, 0, True, ()), ScheduledTokens(1, 5, (1, 2), 0, 1, True, ()))
    assert StepShape.of(StepPlan(0, scheduled=spans)) == StepShape(2, generated=2, context=20, rows=2, drafts=1)


def test_an_engine_teaches_whoever_asks() -> None:
    engine = null_engine()
    engine.step_cost = cost = LearnedStepCost()
    sample = engine.runner.sample
    engine.runner.sample = lambda step: sample(step)._replace(timings=StepTimings(0.0, 0.003, 0.0))  # type: ignore[method-assign]
    run(engine, *(request(f"r{i}", range(5 + i), max_tokens=60) for i in range(8)))
    found = cost.estimate(StepShape(0, 8, 100, 8))
    assert found is not None and found.seconds == pytest.approx(0.003, rel=0.01)
