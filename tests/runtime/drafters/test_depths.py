"""How many drafts are verified follows from what they bring and cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from penstock.config.sampling import SamplingParams
from penstock.core.policies.step_cost import DraftPrices, Estimate, LearnedStepCost, StepShape
from penstock.core.protocol import NewSequence, ScheduledTokens, SlotResult, StepPlan, StepResult, StepTimings
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.drafters.hidden_states import Tapped, Taps
from penstock.runtime.drafters.lookup import SuffixDrafter
from penstock.runtime.drafters.priced_depths import PricedDepths


class Known:
    """Steps cost what they are said to."""

    def __init__(self, fixed: float, each: float) -> None:
        self.fixed, self.each = fixed, each

    def learn(self, plan: StepPlan, timings: StepTimings) -> None:
        pass

    def estimate(self, shape: StepShape) -> Estimate | None:
        return Estimate(self.fixed + self.each * (shape.rows + shape.drafts), 0.0)

    def with_drafts(self, shape: StepShape, most: int) -> DraftPrices:
        seconds = [self.fixed + self.each * (shape.rows + drafts) for drafts in range(most + 1)]
        return DraftPrices(seconds, seconds, True)


def new(slot: int) -> NewSequence:
    return NewSequence(slot, f"r{slot}", 0, (1,), (), 0, ((),), SamplingParams(), speculate=8)


def plan_of(rows: int, drafts: Mapping[int, int] | None = None, context: int = 9) -> StepPlan:
    lengths = [(slot, (drafts or {}).get(slot, 0)) for slot in range(rows)]
    spans = (ScheduledTokens(slot, context, (1,) * (1 + most), 0, most, True, ()) for slot, most in lengths)
    return StepPlan(0, scheduled=tuple(spans))


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
    taken: dict[int, int] = {}
    for step in range(steps):
        depths.step(plan_of(rows, taken), cost.fixed + cost.each * (rows + sum(taken.values())))
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
        depths.step(plan_of(1), 0.02)
        if depths.wanted({0: 8}):
            depths.took(0.01, 0)
            assert depths.chosen([]) == []
            runs += 1
        depths.take(0, [1])
    assert runs <= 60


def test_where_nothing_is_gained_little_is_tried_and_seldom_looked_for() -> None:
    _, depths = lived(Known(0.0, 0.01), 0.5, rows=32)
    looked = verified = 0
    for _ in range(256):
        depths.step(plan_of(32), 0.32)
        wanted = depths.wanted(dict.fromkeys(range(32), 8))
        depths.took(0.0004 * len(wanted), 8)
        chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
        looked += len(wanted)
        verified += sum(len(draft.tokens) for draft in chosen)
    assert looked <= 256 * 32 / 5
    assert verified * 0.01 <= 0.01 * 256 * 0.32
    assert set(depths.decisions) <= {"acceptance", "resting", "tried"}  # one alone would gain nothing either


def test_it_is_told_when_others_are_the_reason() -> None:
    _, depths = lived(Known(0.02, 0.004), 0.5, rows=32)
    _, alone = lived(Known(0.02, 0.004), 0.5)
    assert depths.decisions["load"] > 10 * depths.decisions["acceptance"]
    assert alone.decisions["verified"] > 300 and not alone.decisions["load"]


def test_a_sequence_that_is_wrong_gets_fewer_than_one_that_is_right() -> None:
    dice, depths = random.Random(1), PricedDepths(Known(0.02, 0.004))
    depths.begin(new(0))
    depths.begin(new(1))
    total = {0: 0, 1: 0}
    for _ in range(200):
        depths.step(plan_of(2), 0.02)
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
    depths.step(plan_of(64), 0.02)
    wanted = depths.wanted(dict.fromkeys(range(64), 8))
    chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
    assert sum(len(draft.tokens) for draft in chosen) <= 64


def served(
    table: Callable[[int], float], right: float, rows: int, drafting: float | None = None, steps: int = 800
) -> tuple[float, PricedDepths]:
    """Tokens a second of all steps, what is learned in them included, where prices are learned from steps that are
    noisy, and now and then held up."""
    dice, cost = random.Random(3), LearnedStepCost()
    depths = PricedDepths(cost, drafting is not None)
    for slot in range(rows):
        depths.begin(new(slot))
    taken: dict[int, int] = {}
    tokens, time = 0, 0.0
    for step in range(steps):
        plan = plan_of(rows, taken, 300 + step)
        seconds = table(rows + sum(taken.values())) * dice.uniform(0.95, 1.05) * (3 if dice.random() < 0.01 else 1)
        time += seconds
        for slot in range(rows):
            accepted, most = 0, taken.get(slot, 0)
            while accepted < most and dice.random() < right:
                accepted += 1
            depths.take(slot, [1] * accepted + [0 if accepted < most else int(dice.random() < right)])
            tokens += accepted + 1
        depths.step(plan, seconds)
        wanted = depths.wanted(dict.fromkeys(range(rows), 8))
        if wanted:
            deepest = max(wanted.values())
            time += (drafting or 0.0) * deepest
            depths.took((drafting or 0.0) * deepest, deepest)
        chosen = depths.chosen([Draft(slot, (1,) * most) for slot, most in wanted.items()])
        cost.learn(plan, StepTimings(0.0, seconds))
        taken = {draft.slot: len(draft.tokens) for draft in chosen}
    return tokens / time, depths


TABLES: Mapping[str, Callable[[int], float]] = {
    "a sum": lambda tokens: 0.015 + 0.0005 * tokens,
    "all in tokens": lambda tokens: 0.004 + 0.012 * tokens,
    "by fours": lambda tokens: 0.008 + 0.008 * -(-tokens // 4),
    "a jump": lambda tokens: 0.02 if tokens == 1 else 0.03 + 0.0002 * tokens,
}


@pytest.mark.parametrize("drafting", [None, 0.004])
@pytest.mark.parametrize("right", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("table", TABLES)
def test_drafts_only_ever_help(table: str, rows: int, right: float, drafting: float | None) -> None:
    """Whatever steps cost. What is learned at first is in it, and what the noise of so few steps is."""
    took = TABLES[table]
    speed, _ = served(took, right, rows, drafting)
    made = drafting or 0.0

    def fixed(depth: int) -> float:
        tokens = rows * sum(right**place for place in range(depth + 1))
        return tokens / (1.02 * took(rows * (1 + depth)) + made * depth)  # 1.02: those that were held up

    assert speed >= 0.95 * fixed(0)
    assert speed >= 0.8 * max(fixed(depth) for depth in range(9))


def test_a_price_from_a_busy_time_is_put_right_by_trying() -> None:
    """Steps with drafts were dear for a while, and are cheap now."""
    dice, cost = random.Random(5), LearnedStepCost()
    depths = PricedDepths(cost)
    depths.begin(new(0))
    taken, verified = 0, list[int]()
    for step in range(6000):
        dear = step < 2000
        seconds = 0.02 + (0.05 if dear else 0.0005) * taken
        plan = plan_of(1, {0: taken}, 300)
        accepted = 0
        while accepted < taken and dice.random() < 0.9:
            accepted += 1
        depths.take(0, [1] * accepted + [int(accepted == taken and dice.random() < 0.9)])
        depths.step(plan, seconds)
        chosen = depths.chosen([Draft(0, (1,) * 8)] if depths.wanted({0: 8}) else [])
        cost.learn(plan, StepTimings(0.0, seconds))
        taken = sum(len(draft.tokens) for draft in chosen)
        verified.append(taken)
    assert sum(verified[1000:2000]) < 60
    assert sum(verified[-500:]) > 500 * 4


def looked_at(right: float, look_s: float, steps: int = 600) -> tuple[float, float, PricedDepths]:
    """Seconds of steps and of looks, where a look takes so many; 0.001 a step, of up to four tokens."""
    dice, depths = random.Random(5), PricedDepths(Known(0.001, 0.0))
    depths.begin(new(0))
    time, looks, taken, step = 0.0, 0.0, 0, 0
    while step < steps:
        depths.step(plan_of(1, {0: taken}), 0.001)
        time, step = time + 0.001, step + 1
        wanted = depths.wanted({0: 3})
        drafts = [Draft(0, (1, 1, 1))] if wanted else []
        if wanted:
            looks += look_s
        chosen = depths.chosen(drafts)
        if wanted:
            depths.took(look_s, 3)
        taken = sum(len(draft.tokens) for draft in chosen)
        skipped = 0 if wanted else depths.rest()
        time, step = time + 0.001 * skipped, step + skipped
        accepted = 0
        while accepted < taken and dice.random() < right:
            accepted += 1
        depths.take(0, [1] * accepted + [0] * (1 + skipped))
    return time, looks, depths


def test_looks_that_bring_nothing_end() -> None:
    """They are dear beside a small model's step: a look takes half as long here."""
    time, looks, _ = looked_at(0.0, 0.0005)
    assert 0.001 <= looks <= 0.012 * time
    time, looks, _ = looked_at(1.0, 0.0005)
    assert looks > 0.3 * time  # where they pay they go on


def test_a_rest_is_as_if_steps_had_been_told_of() -> None:
    _, _, depths = looked_at(0.0, 0.01)
    assert depths.rest() == 64
    assert PricedDepths(Known(0.001, 0.0), drafting_costs=True).rest() == 0


class Heard(NoDrafter):
    """A model that drafts what is never right, and writes down what it is told."""

    most = 4
    taps = Taps(("layers.0.input",))

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.asked, self.clock = 0, 0.0

    def see(self, plan: StepPlan, tapped: Tapped) -> None:
        self.heard.append(("see", plan.step))

    def step(self, plan: StepPlan) -> None:
        self.heard.append(("step", plan.step))

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        self.asked += 1
        self.clock += 0.05  # longer than a step
        return [Draft(slot, (0,) * length) for slot, length in wanted.items()]


def test_a_model_whose_drafts_do_not_pay_rests_until_a_try_can_be_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears of all steps, in their order, and looks at the states of the last ones before it is asked again."""
    drafter, depths = Heard(), PricedDepths(Known(0.02, 0.0), drafting_costs=True)
    drafting = Drafting(depths=depths, most=4)
    drafting.use_tapped(drafter)
    monkeypatch.setattr("penstock.runtime.drafters.drafting.perf_counter", lambda: drafter.clock)
    drafting.add_row(new(0))
    results, looked = (SlotResult(0, (1,)),), []
    for number in range(600):
        plan = plan_of(1)._replace(step=number)
        wants = bool(drafting.looked_at.names)
        looked.append(wants)
        drafting.see(plan, Tapped({}, None) if wants else None)
        drafter.clock += 0.02
        drafting.propose(plan, StepResult(number, results, timings=StepTimings(forward=0.02)), results)
    asked = drafter.asked
    drafting.add_row(new(1))  # an answer in which its drafts may be right
    assert drafting.looked_at.names
    drafting.take(0, (5,))
    assert asked < 20 and depths.decisions["resting"] > 400
    assert [number for what, number in drafter.heard if what == "step"] == list(range(600))
    assert [number for what, number in drafter.heard if what == "see"] == [at for at in range(600) if looked[at]]
    assert 20 < sum(looked) < 300


def test_what_is_drawn_while_nobody_asks_is_told_before_anything_else() -> None:
    """In its order: before forced tokens, before a sequence leaves or comes."""
    drafter, depths = SuffixDrafter(4, 1), PricedDepths(Known(1.0, 0.0))
    drafting = Drafting(drafter, depths)
    drafting.add_row(replace(new(0), prompt_ids=(5, 6, 7)))
    drafting.add_row(replace(new(1), prompt_ids=(8,)))
    depths.took(1e9, 0)  # there is no time for looks

    def drawn(*slots: int, token: int) -> None:
        results = tuple(SlotResult(slot, (token,)) for slot in slots)
        plan = plan_of(2)
        assert drafting.propose(plan, StepResult(0, results), results).proposals == ()

    drawn(0, 1, token=1)
    for token in (2, 3):
        drawn(0, 1, token=token)
    drafting.take(0, (9,))  # forced
    assert drafter._histories[0].ids.tolist() == [5, 6, 7, 1, 2, 3, 9]
    drawn(0, 1, token=4)
    drafting.release_row(1)
    drawn(0, token=5)
    drafting.add_row(replace(new(1), prompt_ids=(8, 8)))
    drawn(0, 1, token=6)
    drafting.take(1, (7,))
    assert drafter._histories[0].ids.tolist() == [5, 6, 7, 1, 2, 3, 9, 4, 5, 6]
    assert drafter._histories[1].ids.tolist() == [8, 8, 6, 7]
    assert depths.decisions == {"loss": 2, "resting": 9}


@pytest.mark.parametrize("most", [None, 3])
def test_drafts_keep_to_what_steps_are_recorded_for(most: int | None) -> None:
    drafting = Drafting(SuffixDrafter(8, 1))
    if most is not None:
        drafting.keep_to(most)
    drafting.add_row(replace(new(0), prompt_ids=(*range(5, 20), 5)))
    results = (SlotResult(0, (6,)),)
    (proposal,) = drafting.propose(plan_of(1), StepResult(0, results), results).proposals
    assert proposal.tokens == tuple(range(7, 15))[:most]
