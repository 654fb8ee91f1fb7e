"""Every pair of what speculation meets, in cells that each have one of every kind: the answers of no speculation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from tests.engine.speculation_cells import Cell, Workshop, cells, covering, every_cell

_RANDOM = 60
"""Cells at random in every run of the tests; `python -m tests.engine.speculation_cells 2000` tries more."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("models"))
    yield made
    made.close()


def test_every_possible_pair_is_covered() -> None:
    def pairs(cells: list[Cell]) -> set[object]:
        return {pair for cell in cells for pair in combinations(enumerate(cell), 2)}

    assert pairs(covering()) == pairs(every_cell())
    assert len(covering()) < 80


@pytest.mark.parametrize("cell", covering(), ids=" ".join)
def test_answers_of_a_covering_set(workshop: Workshop, cell: Cell) -> None:
    workshop.check(cell)


@pytest.mark.slow
def test_answers_of_random_cells(workshop: Workshop) -> None:
    for cell in cells(_RANDOM, 18):
        workshop.check(cell)
