"""Who has which experts: tables, placements by load against all there are, and ways from one to another."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.parallel.experts import (
    ExpertTable,
    Holdings,
    after,
    first_holdings,
    moves_to,
    placed,
    places_of,
    rank_loads,
)
from penstock.parallel.ranks import Ranks


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(8, 2, 0), (8, 3, 0), (7, 4, 3), (4, 2, 9), (128, 8, 16)])
def test_ranks_begin_with_their_run_and_copies_of_those_behind_it(experts: int, ranks: int, redundant: int) -> None:
    holdings = first_holdings(experts, ranks, redundant)
    places = places_of(experts, ranks, redundant)
    assert places <= experts and places * ranks >= min(experts + redundant, ranks * places)
    for rank, held in enumerate(holdings):
        first, end = Ranks(rank, ranks).run(experts)
        assert (
            len(held) == places and held == sorted(set(held)) and {*range(first, end)} <= {*held} <= {*range(experts)}
        )


def test_the_tables_of_all_ranks_give_each_token_to_one() -> None:
    dice = random.Random(1)
    for _ in range(50):
        count, experts = dice.randint(2, 5), dice.randint(5, 12)
        redundant = dice.choice((0, 3))
        tables = [ExpertTable(Ranks(rank, count), experts, redundant) for rank in range(count)]
        target = placed([dice.random() for _ in range(experts)], count, len(tables[0].holdings[0]))
        for moves in [(), *moves_to(tables[0].holdings, target)]:
            for table in tables:
                table.apply(moves)
            assert len({int(table.table[-1]) for table in tables}) == 1
            for token, expert in itertools.product(range(6), range(experts)):
                rows = [table.table[3 * expert : 3 * expert + 3].tolist() for table in tables]
                own = [rank for rank, (place, of, which) in enumerate(rows) if place >= 0 and token % of == which]
                assert len(own) == 1
                assert tables[own[0]].holdings[own[0]][rows[own[0]][0]] == expert


def best_of(loads: list[float], ranks: int, places: int) -> float:
    """The least load of the busiest rank, of all placements there are."""
    best = float("inf")

    def deal(expert: int, held: list[list[int]]) -> None:
        nonlocal best
        if expert == len(loads):
            best = min(best, max(rank_loads(held, loads)))
            return
        for count in range(1, ranks + 1):
            for holders in itertools.combinations(range(ranks), count):
                if all(len(held[rank]) < places for rank in holders):
                    deal(expert + 1, [[*own, expert] if rank in holders else own for rank, own in enumerate(held)])

    deal(0, [[] for _ in range(ranks)])
    return best


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(6, 2, 0), (6, 3, 0), (5, 2, 1), (5, 2, 3), (4, 3, 2)])
def test_placements_are_close_to_the_best_there_is(experts: int, ranks: int, redundant: int) -> None:
    dice = random.Random(experts * 100 + ranks)
    ratios = []
    for _ in range(12):
        loads = [dice.choice((1.0, 2.0, dice.random() * 10, 30.0)) for _ in range(experts)]
        places = places_of(experts, ranks, redundant)
        found = placed(loads, ranks, places)
        assert {expert for held in found for expert in held} == {*range(experts)}
        assert all(len({*held}) == len(held) == places for held in found)
        ratios.append(max(rank_loads(found, loads)) / best_of(loads, ranks, places))
    assert max(ratios) < 1.34 and sum(ratios) / len(ratios) < 1.06


def check_way(holdings: Holdings, target: Holdings) -> None:
    now = holdings
    experts = {expert for held in now for expert in held}
    ways = [*moves_to(holdings, target)]
    for moves in ways:
        assert len({move.from_rank for move in moves}) == len(moves) == len({move.to_rank for move in moves})
        assert all(move.from_rank != move.to_rank for move in moves)
        now = after(now, moves)
        assert {expert for held in now for expert in held} == experts
    assert sorted(map(sorted, now)) == sorted(map(sorted, target))
    assert len(ways) <= 2 * sum(map(len, target))


def test_each_placement_can_be_reached_from_each_and_no_expert_is_ever_lost() -> None:
    dice = random.Random(2)
    for _ in range(400):
        ranks, experts = dice.randint(2, 5), dice.randint(5, 16)
        places = places_of(experts, ranks, dice.choice((0, 0, 1, 4, 30)))
        first, second = (placed([dice.random() ** 6 for _ in range(experts)], ranks, places) for _ in range(2))
        check_way(first, second)
    same = placed([5.0, 4.0, 3.0, 2.0, 1.0, 1.0], 2, 3)
    assert [*moves_to([*reversed(same)], same)] == []


def test_a_busy_rank_gets_rid_of_its_load() -> None:
    loads = [100.0, 90.0, 80.0, 70.0, 1.0, 1.0, 1.0, 1.0]
    before = first_holdings(8, 2, 0)
    assert max(rank_loads(before, loads)) == 340
    assert max(rank_loads(placed(loads, 2, 4), loads)) == 172
    alone = [1000.0, *[1.0] * 7]
    assert max(rank_loads(placed(alone, 2, 4), alone)) >= 1000
    assert max(rank_loads(placed(alone, 2, places_of(8, 2, 2)), alone)) < 510  # a copy of the busiest
