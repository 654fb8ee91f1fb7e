"""Layers dealt to stages: the best there is, by comparison with all ways; what cannot be dealt is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from penstock.config.errors import ConfigError
from penstock.parallel.stages import Work, deal, split_by_hand


def largest(work: Work, counts: Sequence[int], limits: Sequence[int]) -> float:
    """The largest stage's cost, by definition; infinite where one has no room."""
    costs, begin = [], 0
    for stage, count in enumerate(counts):
        first, last = stage == 0, stage == len(counts) - 1
        layers = slice(begin, begin + count)
        size = sum(work.sizes[layers]) + first * work.first_size + last * work.last_size
        cost = sum(work.costs[layers]) + first * work.first + last * work.last
        costs.append(float("inf") if limits and size > limits[stage] else cost)
        begin += count
    return max(costs)


def every_way(work: Work, stages: int) -> list[tuple[int, ...]]:
    layers = len(work.costs)
    places = range(1, layers) if work.cuts is None else sorted(work.cuts)
    return [
        tuple(end - begin for begin, end in pairwise((0, *ends, layers))) for ends in combinations(places, stages - 1)
    ]


@pytest.mark.parametrize("seed", range(200))
def test_no_way_has_a_smaller_largest_stage(seed: int) -> None:
    chance = random.Random(seed)
    layers = chance.randint(1, 9)
    kinds = [chance.randint(1, 20) for _ in range(3)]
    costs = [float(chance.choice(kinds)) for _ in range(layers)]
    sizes = [chance.randint(1, 9) for _ in range(layers)]
    cuts = None if chance.random() < 0.6 else {cut for cut in range(1, layers) if chance.random() < 0.6}
    work = Work(costs, chance.choice([0.0, 5.0]), chance.choice([0.0, 30.0]), sizes, 2, 3, cuts)
    stages = chance.randint(1, layers)
    limits = () if chance.random() < 0.5 else tuple(chance.randint(4, 30) for _ in range(stages))
    ways = every_way(work, stages)
    best = min((largest(work, way, limits) for way in ways), default=float("inf"))
    if best == float("inf"):
        with pytest.raises(ConfigError, match="stages"):
            deal(work, stages, limits)
    else:
        found = deal(work, stages, limits)
        assert found in ways and largest(work, found, limits) == best


def test_stages_differ_no_more_than_they_must() -> None:
    """A heavy head sets the largest stage; the others share the rest evenly all the same."""
    counts = deal(Work([1.0] * 12, last=30.0), 4)
    assert sorted(counts[:3]) == [3, 4, 4] and counts[3] == 1


def test_a_head_as_heavy_as_layers_takes_layers_from_its_stage() -> None:
    assert deal(Work([1.0] * 22, last=4.0), 2) == (13, 9)


def test_many_layers_take_no_time() -> None:
    assert sum(deal(Work([1.0 + index % 7 for index in range(200)], 3.0, 9.0), 8)) == 200


def test_a_split_by_hand() -> None:
    assert split_by_hand("10, 12", 22, 2) == (10, 12)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "write how many"),
        ("10,x", "write how many"),
        ("10,-12", "write how many"),
        ("0,22", "write how many"),
        ("10,11", "21 layers for 2 stages, but the model has 22"),
        ("10,6,6", "22 layers for 3 stages, but the model has 22 and there are 2"),
        ("12,10", "no stage can begin at layer 12"),
        ("1" * 5_000, "write how many"),
    ],
)
def test_what_is_no_split_is_refused(said: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_by_hand(said, 22, 2, range(1, 11))
