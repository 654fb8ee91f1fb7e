"""Which degrees of parallelism are tried with which models: every pair of values that makes sense, at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MOST_RANKS = 8


class Degrees(NamedTuple):
    """One case: processes of each kind, and whether experts move."""

    tp: int
    pp: int
    ep: bool

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}{'-ep' if self.ep else ''}"


CHOICES: Mapping[str, tuple[int, ...]] = {"tp": (1, 2, 3, 4), "pp": (1, 2, 3), "ep": (0, 1)}


class Case(NamedTuple):
    model: str
    degrees: Degrees


def _possible(models: Mapping[str, bool]) -> Iterator[Case]:
    """Of models by whether they have experts; one process alone is what all are compared with."""
    for model, experts in models.items():
        for tp, pp, ep in itertools.product(*CHOICES.values()):
            if 1 < tp * pp <= MOST_RANKS and (not ep or (experts and tp > 1 and pp == 1)):
                yield Case(model, Degrees(tp, pp, bool(ep)))


def _pairs(case: Case) -> set[tuple[str, object, str, object]]:
    values = {"model": case.model, **case.degrees._asdict()}
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(values, 2)}


def covering(models: Mapping[str, bool]) -> list[Case]:
    """As few cases as a greedy search finds that have every pair of values which any possible case has."""
    cases = list(_possible(models))
    missing = set().union(*map(_pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(_pairs(case) & missing), -case.degrees.tp * case.degrees.pp))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen
