"""Engines of one machine deal out its cores among those that have work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from penstock.config import cores as module
from penstock.config.cores import AllCores, CoreBoard, CoreShare, part_of


@pytest.mark.parametrize(
    ("cores", "parts"),
    [(1, [1]), (1, [1, 1]), (2, [2]), (2, [1, 1]), (3, [2, 1]), (8, [3, 3, 2]), (2, [1, 1, 1, 1, 1])],
)
def test_parts_are_even_and_nobody_has_none(cores: int, parts: list[int]) -> None:
    assert [part_of(cores, len(parts), rank) for rank in range(len(parts))] == parts


@pytest.fixture
def board() -> Iterator[CoreBoard]:
    with closing(CoreBoard()) as made:
        yield made


class Engine:
    """An engine of four threads."""

    def __init__(self, board: CoreBoard) -> None:
        self.threads = 4
        place = board.take()
        assert place is not None
        self.place = place
        self.share = CoreShare(os.dup(board.file), place, 4, self.use)

    def use(self, threads: int) -> None:
        self.threads = threads

    def close(self) -> None:
        self.share.close()


def test_cores_go_to_those_that_have_work(board: CoreBoard) -> None:
    with ExitStack() as ends:
        first, second, third = (ends.enter_context(closing(Engine(board))) for _ in range(3))
        first.share.work()
        assert first.threads == 4
        second.share.work()
        first.share.work()
        assert (first.threads, second.threads, third.threads) == (2, 2, 4)
        third.share.work()
        first.share.work()
        second.share.work()
        assert (first.threads, second.threads, third.threads) == (2, 1, 1)
        first.share.rest()
        second.share.work()
        third.share.work()
        assert (second.threads, third.threads) == (2, 2)
        board.clear(second.place)  # it was killed in a step
        third.share.work()
        assert third.threads == 4


def test_a_place_is_taken_once_and_given_back(board: CoreBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PLACES", 2)
    assert [board.take() for _ in range(3)] == [0, 1, None]
    board.give_back(0)
    assert board.take() == 0


def test_one_alone_shares_with_nobody() -> None:
    alone = AllCores()
    alone.work()
    alone.rest()
    alone.close()
