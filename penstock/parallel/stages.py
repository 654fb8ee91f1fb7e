"""Deals a model's layers to the stages of a pipeline, so that the one with the most work has as little as can be.

The slowest stage sets the pace of all. Its share is found exactly, by dynamic programming over where each stage ends:
stages x layers^2 comparisons, which are a few thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from penstock.config.errors import ConfigError

_Join = Callable[[float, float], float]
"""The value of stages so far and the cost of one more: their value together."""


@dataclass(frozen=True, slots=True)
class Work:
    """What there is to deal.

    Attributes:
        costs: of each layer: seconds, or bytes that a step reads.
        first, last: what the first stage has besides, the embedding, and the last one, final norm and head.
        sizes: bytes of each layer in memory.
        first_size, last_size: likewise.
        cuts: layers at which a stage may begin; None for all.
    """

    costs: Sequence[float]
    first: float = 0.0
    last: float = 0.0
    sizes: Sequence[int] = ()
    first_size: int = 0
    last_size: int = 0
    cuts: Collection[int] | None = None


def deal(work: Work, stages: int, limits: Sequence[int] = (), speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """How many layers each stage gets, in order; every stage gets one at least.

    Of the ways with the least largest stage the one whose stages differ least (sum of squares).

    Args:
        work: to be dealt.
        stages: number of stages.
        limits: bytes that each stage has room for; () for enough.
        speeds: of the stages, beside each other; () for one and the same.

    Raises:
        ConfigError: there are fewer places to cut than stages need, or no way in which all stages have room.
    """
    layers = len(work.costs)
    places = [0, *sorted(cut for cut in work.cuts if 0 < cut < layers), layers] if work.cuts is not None else None
    places = list(range(layers + 1)) if places is None else places
    if stages > len(places) - 1:
        parts = "layers" if len(places) - 1 == layers else f"parts of {layers} layers that can be told apart"
        raise ConfigError(f"{stages} pipeline stages for {len(places) - 1} {parts}: each needs one at least.")
    ways = _Ways(work, limits, [max(speeds) / speed for speed in speeds] or [1.0] * stages, places)
    least = ways.best(lambda before, cost: max(before, cost), inf)
    if least is None:
        raise ConfigError(
            f"the layers cannot be dealt to {stages} pipeline stages: these have room for {_listed(limits)} bytes, and "
            f"layers, embedding and head take {sum(work.sizes) + work.first_size + work.last_size}."
        )
    most = max(ways.costs(least))
    found = ways.best(lambda before, cost: before + cost * cost, most)
    ends = found or least
    return tuple(end - begin for begin, end in pairwise((0, *ends)))


def _listed(limits: Sequence[int]) -> str:
    return ", ".join(map(str, limits))


class _Ways:
    """Ends of stages at some places, and what stages between two of them cost."""

    def __init__(self, work: Work, limits: Sequence[int], slower: Sequence[float], places: Sequence[int]) -> None:
        self._work, self._stages = work, len(slower)
        self._slower = slower
        self._limits = limits
        self._places = places
        self._costs = list(accumulate(work.costs, initial=0.0))
        self._sizes = list(accumulate(work.sizes or (0,) * len(work.costs), initial=0))

    def costs(self, ends: Sequence[int]) -> list[float]:
        """Of the stages with these ends."""
        return [self._cost(stage, begin, end) for stage, (begin, end) in enumerate(pairwise((0, *ends)))]

    def _cost(self, stage: int, begin: int, end: int) -> float:
        """Of a stage of these layers; infinite where it has no room for them."""
        work = self._work
        is_first, is_last = stage == 0, stage == self._stages - 1
        size = self._sizes[end] - self._sizes[begin] + is_first * work.first_size + is_last * work.last_size
        if self._limits and size > self._limits[stage]:
            return inf
        cost = self._costs[end] - self._costs[begin] + is_first * work.first + is_last * work.last
        return cost * self._slower[stage]

    def best(self, join: _Join, most: float) -> tuple[int, ...] | None:
        """The ends with the least value of `join` over the stages' costs, none above `most`; None for no such ways."""
        places = self._places
        values: list[float] = [0.0, *(inf,) * (len(places) - 1)]  # of the stages so far, by the place where they end
        before: list[list[int]] = []
        for stage in range(self._stages):
            found, chosen = [inf] * len(places), [0] * len(places)
            for end in range(stage + 1, len(places)):
                for begin in range(stage, end):
                    cost = self._cost(stage, places[begin], places[end])
                    if values[begin] < inf and cost < inf and cost <= most * (1 + 1e-12):
                        value = join(values[begin], cost)
                        if value < found[end]:
                            found[end], chosen[end] = value, begin
            values = found
            before.append(chosen)
        if values[-1] == inf:
            return None
        ends, at = [], len(places) - 1
        for chosen in reversed(before):
            ends.append(places[at])
            at = chosen[at]
        return tuple(reversed(ends))


def split_by_hand(said: str, layers: int, stages: int, cuts: Collection[int] | None = None) -> tuple[int, ...]:
    """The layers of each stage as somebody wrote them: "10,12".

    Raises:
        ConfigError: they are no such numbers, too few or too many, or a stage would begin where none can.
    """
    parts = [part.strip() for part in said.split(",")]
    counts = tuple(int(part) for part in parts if part.isdecimal() and len(part) <= 6)
    if len(counts) != len(parts) or min(counts) < 1:
        raise ConfigError(f"the split of the layers is {said!r}; write how many each stage gets, as in 10,12.")
    if len(counts) != stages or sum(counts) != layers:
        raise ConfigError(
            f"the split of the layers is {said!r}: {sum(counts)} layers for {len(counts)} stages, but the model has "
            f"{layers} and there are {stages} stages."
        )
    begins = list(accumulate(counts))[:-1]
    wrong = [begin for begin in begins if cuts is not None and begin not in cuts]
    if wrong:
        allowed = ", ".join(map(str, sorted(cuts or ())))
        raise ConfigError(
            f"no stage can begin at layer {wrong[0]}, as {said!r} says: layers behind it read what one before keeps. "
            f"Allowed beginnings: {allowed}."
        )
    return counts
