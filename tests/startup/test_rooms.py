"""What several machines' memory allows: no machine is asked for more than it has, and none could have more."""

from __future__ import annotations

import random

import pytest

from penstock.parallel.stages import Work, deal
from penstock.startup.rooms import Room, Share, common_room, compared, measured_speed, rooms_of_stages


@pytest.mark.parametrize("seed", range(100))
def test_the_fullest_machine_is_just_full(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    parts = [chance.randint(1, 10) for _ in range(count)]
    weights = [chance.randint(0, 1000) for _ in range(count)]
    step = chance.randint(0, 300)
    shares = [
        Share(Room(2 * (weight + step) + chance.randint(1, 5000)), weight, part / sum(parts))
        for weight, part in zip(weights, parts, strict=True)
    ]
    kept = common_room(shares, sum(weights), step) - sum(weights) - step
    used = [share.weights + step + share.kept * kept for share in shares]
    assert all(use <= share.room.memory + 1e-6 for use, share in zip(used, shares, strict=True))
    full = max(use - share.room.memory for use, share in zip(used, shares, strict=True))
    assert full > -1 or sum(used) + (1 - count) * step > sum(share.room.memory for share in shares) - 1


def test_a_machine_without_room_for_its_weights_leaves_none() -> None:
    shares = [Share(Room(1000), 100, 0.5), Share(Room(90), 100, 0.5)]
    assert common_room(shares, 200, 10) < 200 + 10


def test_a_machine_whose_layers_keep_nothing_bounds_no_cache() -> None:
    shares = [Share(Room(1000), 100, 1.0), Share(Room(150), 100, 0.0)]
    assert common_room(shares[:1], 200, 10) == 1000
    assert common_room(shares, 200, 10) == 200 + 10 + 890
    assert common_room([shares[0], Share(Room(109), 100, 0.0)], 200, 10) == 200 + 10 - 1


def test_what_one_machine_has_alone_is_its_own() -> None:
    """A draft model with the one that leads: 10 and 20, 4 of weights each, 2 of drafts leave 4 a machine."""
    shares = [Share(Room(10), 4, 0.5, own=2), Share(Room(20), 4, 0.5)]
    assert common_room(shares, 8, 0) == 8 + 2 + 8


def test_machines_about_as_fast_count_as_equal() -> None:
    others = [Room(1, 80.0), Room(1, 130.0), Room(1, 60.0), Room(1, 200.0)]
    assert [room.speed for room in compared(Room(1, 100.0), others)] == [100.0, 100.0, 100.0, 60.0, 200.0]


def test_stages_of_one_machine_share_it() -> None:
    assert rooms_of_stages([], 4) == ()
    assert rooms_of_stages([Room(900, 6.0), Room(5, 1.0)], 4) == (Room(300, 2.0),) * 3 + (Room(5, 1.0),)


def test_a_machine_of_twice_the_speed_gets_twice_the_layers() -> None:
    assert deal(Work([1.0] * 12), 2, (), (2.0, 1.0)) == (8, 4)
    assert deal(Work([1.0] * 12, last=4.0), 2, (), (1.0, 1.0)) == (8, 4)
    assert deal(Work([1.0] * 12, sizes=[1] * 12), 2, (5, 20), (2.0, 1.0)) == (5, 7)


def test_speed_is_measured() -> None:
    assert measured_speed(1) > 1e6
