"""How many drafts are verified follows from what they bring and cost."""

from __future__ import annotations

import random

import pytest

from penstock.config.sampling import SamplingParams
from penstock.core.policies.step_cost import Estimate, LearnedStepCost, StepShape
from penstock.core.protocol import NewSequence, ScheduledTokens, StepPlan, StepTimings
from penstock.runtime.drafters.depths import PricedDepths
from penstock.runtime.drafters.drafter import Draft


class Known:
    """Steps cost what they are said to."""

    def __init__(self, fixed: float, each: float) -> None:
        self.fixed, self.each = fixed, each

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        pass

    def estimate(self, shape: StepShape) -> Estimate | None:
        return Estimate(self.fixed + self.each * (shape.rows + shape.drafts), 0.0)


def new(slot: int) -> NewSequence:
    return NewSequence(slot, f"r{slot}", 0, (1,), (), 0, ((),), SamplingParams(), speculate=8)


def plan_of(rows: int) -> StepPlan:
    return StepPlan(0, scheduled=tuple(ScheduledTokens(slot, 9, (1,), 0, 0, True, ()) for slot in range(rows)))


def lived(
    cost: Known, right: float, rows: int = 1, steps: int = 400, drafting: float | None = None
) -> tuple[float, PricedDepths]:
    """Mean length of what is verified once acceptance is known: each draft is right as often as `right`.

    `drafting`: seconds that a drafter takes for one draft of each row; None for one that takes none.
    """
    dice, depths = random.Random(7), PricedDepths(cost, drafting is not None)
    for slot in range(rows):
        depths.begin(new(slot))
    lengths: list[int] = []
    for step in range(steps):
        depths.step(plan_of(rows))
        wanted = depths.wanted(dict.fromkeys(range(rows), 8))
        deepest = max(wanted.values(), default=0)
        depths.took((drafting or 0.0) * deepest, deepest)
        chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
        taken = {draft.slot: len(draft.tokens) for draft in chosen}
        for slot in range(rows):
            accepted = 0
            while accepted < taken.get(slot, 0) and dice.random() < right:
                accepted += 1
            last = 0 if accepted < taken.get(slot, 0) else int(dice.random() < right)
            depths.take(slot, [1] * accepted + [last])
        if step > steps // 2:
            lengths += [taken.get(slot, 0) for slot in (wanted if drafting is None else range(rows))]
    return sum(lengths) / max(1, len(lengths)), depths


def speed(cost: Known, right: float, rows: int, depth: int, drafting: float = 0.0) -> float:
    """Tokens a second with the same depth for all rows."""
    tokens = rows * sum(right**place for place in range(depth + 1))
    return tokens / (cost.fixed + cost.each * rows * (1 + depth) + drafting * depth)


@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize("right", [0.05, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("cost", [Known(0.02, 0.001), Known(0.02, 0.01), Known(0.0, 0.01)])
def test_the_depth_is_as_good_as_the_best_fixed_one(cost: Known, right: float, rows: int) -> None:
    length, _ = lived(cost, right, rows)
    best = max(speed(cost, right, rows, depth) for depth in range(9))
    assert speed(cost, right, rows, round(length)) >= 0.95 * best


@pytest.mark.parametrize("rows", [1, 8, 48])
@pytest.mark.parametrize("right", [0.05, 0.5, 0.8])
@pytest.mark.parametrize("drafting", [0.002, 0.008, 0.03])
def test_drafts_that_take_time_are_made_where_they_are_worth_it(drafting: float, right: float, rows: int) -> None:
    cost = Known(0.02, 0.001)
    length, _ = lived(cost, right, rows, drafting=drafting)
    best = max(speed(cost, right, rows, depth, drafting) for depth in range(9))
    assert speed(cost, right, rows, round(length), drafting) >= 0.95 * best


def test_a_model_that_drafts_nothing_is_not_run_for_long() -> None:
    """As where each draft is less probable than asked for."""
    depths, runs = PricedDepths(Known(0.02, 0.001), True), 0
    depths.begin(new(0))
    for _ in range(400):
        depths.step(plan_of(1))
        if depths.wanted({0: 8}):
            depths.took(0.01, 0)
            assert depths.chosen([]) == []
            runs += 1
        depths.take(0, [1])
    assert runs <= 60


def test_where_nothing_is_gained_nothing_is_verified_nor_looked_for() -> None:
    length, depths = lived(Known(0.0, 0.01), 0.5, rows=32)
    assert length == 0.0
    looked = 0
    for _ in range(64):
        depths.step(plan_of(32))
        wanted = depths.wanted(dict.fromkeys(range(32), 8))
        depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
        looked += len(wanted)
    assert looked <= 64 * 32 / 8


def test_a_sequence_that_is_wrong_gets_fewer_than_one_that_is_right() -> None:
    dice, depths = random.Random(1), PricedDepths(Known(0.02, 0.004))
    depths.begin(new(0))
    depths.begin(new(1))
    total = {0: 0, 1: 0}
    for _ in range(200):
        depths.step(plan_of(2))
        wanted = depths.wanted({0: 8, 1: 8})
        chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
        for draft in chosen:
            total[draft.slot] += len(draft.tokens)
        for slot, right in ((0, 0.95), (1, 0.05)):
            depths.take(slot, [1 if dice.random() < right else 0 for _ in range(8)])
    assert total[0] > 6 * total[1]


def test_before_a_price_is_known_a_busy_batch_is_not_flooded() -> None:
    """A learned cost that has seen no drafts says that they cost nothing."""
    cost = LearnedStepCost()
    for rows in (1, 64) * 40:
        cost.learn(plan_of(rows), StepTimings(0.0, 0.1 + 0.01 * rows, 0.0))
    depths = PricedDepths(cost)
    for slot in range(64):
        depths.begin(new(slot))
    depths.step(plan_of(64))
    wanted = depths.wanted(dict.fromkeys(range(64), 8))
    chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
    assert sum(len(draft.tokens) for draft in chosen) <= 64


def test_a_price_from_a_busy_time_is_put_right_by_trying() -> None:
    dear = Known(0.0, 0.05)
    length, depths = lived(dear, 0.9, rows=1, steps=200)
    assert length < 1.0
    tried = 0
    for _ in range(256):
        depths.step(plan_of(1))
        chosen = depths.chosen([Draft(0, (1,) * 8)])
        tried += sum(len(draft.tokens) for draft in chosen)
        depths.take(0, [1])
    assert 0 < tried <= 16
