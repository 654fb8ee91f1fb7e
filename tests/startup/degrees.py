"""Which degrees of parallelism are tried with which models: every pair of values that makes sense, at least once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

MOST_RANKS = 8


class Degrees(NamedTuple):
    """One case: processes of each kind, whether experts move, engines, and processes that share contexts."""

    tp: int
    pp: int
    ep: int
    dp: int
    cp: int

    def __str__(self) -> str:
        more = "-ep" * self.ep + f"-dp{self.dp}" * (self.dp > 1) + f"-cp{self.cp}" * (self.cp > 1)
        return f"tp{self.tp}-pp{self.pp}{more}"

    @property
    def processes(self) -> int:
        return self.tp * self.pp * self.dp


CHOICES: Mapping[str, tuple[int, ...]] = {
    "tp": (1, 2, 3, 4),
    "pp": (1, 2, 3),
    "ep": (0, 1),
    "dp": (1, 2),
    "cp": (1, 2, 3),
}


class Traits(NamedTuple):
    """What a model allows: whether it has experts that are dealt, and contexts that several processes would keep."""

    experts: bool = False
    contexts: bool = False


class Case(NamedTuple):
    model: str
    degrees: Degrees


def _possible(models: Mapping[str, Traits]) -> Iterator[Case]:
    """All but one process alone, which they are compared with."""
    for model, traits in models.items():
        for degrees in itertools.starmap(Degrees, itertools.product(*CHOICES.values())):
            experts = not degrees.ep or (traits.experts and degrees.tp > 1 and degrees.pp == 1)
            contexts = degrees.cp == 1 or (traits.contexts and degrees.tp % degrees.cp == 0 and degrees.tp > 1)
            if 1 < degrees.processes <= MOST_RANKS and experts and contexts:
                yield Case(model, degrees)


def _pairs(case: Case) -> set[tuple[str, object, str, object]]:
    values = {"model": case.model, **case.degrees._asdict()}
    return {(a, values[a], b, values[b]) for a, b in itertools.combinations(values, 2)}


def covering(models: Mapping[str, Traits]) -> list[Case]:
    """As few cases as a greedy search finds that have every pair of values which any possible case has."""
    cases = list(_possible(models))
    missing = set().union(*map(_pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(_pairs(case) & missing), -case.degrees.processes))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen
