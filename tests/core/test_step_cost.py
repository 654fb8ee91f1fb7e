"""What steps cost is learned from what they have cost."""

from __future__ import annotations

import random

import pytest

from penstock.core.policies.least_squares import ForgettingFit
from penstock.core.policies.step_cost import LearnedStepCost, StepShape, UnknownStepCost
from penstock.core.protocol import ScheduledTokens, StepPlan, StepTimings


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


def test_before_there_is_a_fit_a_step_costs_what_the_last_one_did() -> None:
    shape = StepShape(0, 3, 100, 3)
    cost = LearnedStepCost()
    assert cost.estimate(shape) is None and cost.with_drafts(shape, 4) is None
    cost.learn(StepPlan(0, scheduled=(ScheduledTokens(0, 7, (1,) * 50, 50, 0, True, ()),)), StepTimings(0.0, 9.0, 0.0))
    assert cost.estimate(shape) is None  # the first may have made what later ones have
    cost.learn(plan_with(3, 0), StepTimings(0.0, 0.01, 0.0))
    found, prices = cost.estimate(shape), cost.with_drafts(shape, 2)
    assert found is not None and found.seconds == pytest.approx(0.01)
    assert prices is not None
    more = prices.expected
    assert more[0] == pytest.approx(0.01) and 0.01 < more[1] < more[2] < 0.015


def plan_with(rows: int, drafts: int, context: int = 200) -> StepPlan:
    spans = (
        ScheduledTokens(
            slot, context, (1,) * (1 + (drafts if slot == 0 else 0)), 0, drafts if slot == 0 else 0, True, ()
        )
        for slot in range(rows)
    )
    return StepPlan(0, scheduled=tuple(spans))


def test_a_number_of_tokens_may_cost_more_than_the_sum_says() -> None:
    """Steps of up to four tokens cost the same, and those of up to eight twice that."""
    dice, cost = random.Random(4), LearnedStepCost()

    def seconds(tokens: int, context: int) -> float:
        return 0.01 * -(-tokens // 4) + 1e-6 * context

    for turn in range(600):
        drafts, context = dice.choice((0, 1, 3, 4, 7)), 100 + turn
        cost.learn(
            plan_with(1, drafts, context), StepTimings(0.0, seconds(1 + drafts, context) * dice.uniform(0.95, 1.05))
        )
    prices = cost.with_drafts(StepShape(0, 1, 701, 1), 7)
    assert prices is not None and prices.seen
    found = prices.expected
    assert prices.least[5] == pytest.approx(found[4]) and prices.least[7] == found[7]  # five drafts were not seen
    for drafts in (0, 1, 3, 4, 7):
        assert found[drafts] == pytest.approx(seconds(1 + drafts, 701), rel=0.08)
    assert found[3] < found[5] < 1.1 * found[7]  # between what was seen
    told = cost.estimate(StepShape(0, 1, 704, 1, 3))
    assert told is not None and told.seconds == pytest.approx(found[3], rel=0.01)


def test_one_step_that_was_held_up_is_no_price() -> None:
    cost = LearnedStepCost()
    for _ in range(100):
        cost.learn(plan_with(1, 0), StepTimings(0.0, 0.01))
    for drafts, seconds in ((2, 0.012), (3, 5.0)):
        cost.learn(plan_with(1, drafts), StepTimings(0.0, seconds))
    found = cost.with_drafts(StepShape(0, 1, 201, 1), 3)
    assert found is not None and found.expected[3] < 0.03


def test_what_is_learned_does_not_wear_out() -> None:
    """Late answers count more and more: before that is too much, all are made smaller."""
    fit = ForgettingFit(2, 8)
    for number in range(5000):
        fit.add((1.0, float(number % 7)), 3.0 + 2.0 * (number % 7))
    assert fit.costs() == pytest.approx([3.0, 2.0], rel=0.01)
    assert fit._counts < 1e31


def test_the_null_form_tells_nothing() -> None:
    unknown = UnknownStepCost()
    unknown.learn(StepPlan(0), StepTimings())
    assert unknown.estimate(StepShape(10, 1, 100, 2)) is None and unknown.with_drafts(StepShape(0, 1, 9, 1), 2) is None


def test_a_plans_shape() -> None:
    spans = (ScheduledTokens(0, 10, (1, 2, 3), 2, 0, True, ()), ScheduledTokens(1, 5, (1, 2), 0, 1, True, ()))
    assert StepShape.of(StepPlan(0, scheduled=spans)) == StepShape(2, generated=2, context=20, rows=2, drafts=1)


def test_steps_without_drafts_have_prices_of_their_own() -> None:
    """They are run in a shorter way: a step of as many tokens with drafts among them is no sign of what they take."""
    cost = LearnedStepCost()
    for turn in range(300):  # one sequence that is drafted for, four that are not
        rows, drafts = (1, turn % 4) if turn % 3 else (4, 0)
        cost.learn(plan_with(rows, drafts), StepTimings(0.0, (0.0010 if drafts else 0.0004) + 0.0001 * (rows + drafts)))
    four, one = cost.with_drafts(StepShape(0, 4, 804, 4), 3), cost.with_drafts(StepShape(0, 1, 201, 1), 3)
    assert four is not None and one is not None
    assert four.expected[0] == pytest.approx(0.0008, rel=0.1)
    assert one.expected[0] == pytest.approx(0.0005, rel=0.1)
    assert one.expected[3] == pytest.approx(0.0014, rel=0.1)
    assert four.seen
    unmet = LearnedStepCost()
    for turn in range(300):
        unmet.learn(plan_with(1, turn % 4), StepTimings(0.0, 0.001 + 0.0001 * (turn % 4)))
    four, one = unmet.with_drafts(StepShape(0, 4, 804, 4), 3), unmet.with_drafts(StepShape(0, 1, 201, 1), 3)
    assert four is not None and one is not None
    assert one.seen and not four.seen  # so that one without is made now and then
