"""Which ranks have which experts of a layer, what would be better for a measured load, and how to get there.

Each rank has as many places, and a place holds one expert. All have the same table, which changes between steps. After
the load balancing of DeepSeek-V3 (arXiv:2412.19437, section 3.4): the busiest experts are had several times, and
copies are dealt by load.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.parallel.ranks import Ranks

Holdings = list[list[int]]  # of every rank, the experts in its places
_SWAPS = 8  # by which a placement is improved at most


class Move(NamedTuple):
    """A place of a rank gets what a place of another one holds."""

    from_rank: int
    from_place: int
    to_rank: int
    to_place: int


class _Exchange(NamedTuple):
    """Of the experts in a place of a busy rank and in one of another, and what the busy one's load loses by it."""

    mine: int
    theirs: int
    less: float


Moves = tuple[Move, ...]  # at once: no rank gives two experts, and none gets two


def places_of(experts: int, ranks: int, redundant: int) -> int:
    """Places of each rank for so many experts, and so many copies more."""
    return min(experts, -(-(experts + redundant) // ranks))


def first_holdings(experts: int, ranks: int, redundant: int) -> Holdings:
    """What ranks begin with: the run each would have alone, and the experts behind it for copies."""
    places = places_of(experts, ranks, redundant)
    starts = (min(Ranks(rank, ranks).run(experts)[0], experts - places) for rank in range(ranks))
    return [[*range(start, start + places)] for start in starts]


class ExpertTable:
    """One rank's table of a layer's experts; implements `kernels.shared_ops.ExpertPlaces`.

    Attributes:
        ranks: whose.
        holdings: what all have.
        table, counts: as ExpertPlaces. Written in place, between steps.
    """

    def __init__(self, ranks: Ranks, experts: int, redundant: int) -> None:
        self.ranks = ranks
        self.holdings = first_holdings(experts, ranks.count, redundant)
        self.table: npt.NDArray[np.int32] = np.zeros(3 * experts + 1, np.int32)
        self.counts: npt.NDArray[np.int64] = np.zeros(experts, np.int64)
        self._write()

    def apply(self, moves: Moves) -> None:
        """Says what is had after these moves, which all ranks make."""
        self.holdings = after(self.holdings, moves)
        self._write()

    def _write(self) -> None:
        rows = self.table[:-1].reshape(-1, 3)
        own = self.holdings[self.ranks.rank]
        for expert in range(len(rows)):
            holders = [rank for rank, held in enumerate(self.holdings) if expert in held]
            mine = self.ranks.rank in holders
            rows[expert] = (
                own.index(expert) if mine else -1,
                len(holders),
                holders.index(self.ranks.rank) if mine else 0,
            )
        self.table[-1] += 1


def after(holdings: Sequence[Sequence[int]], moves: Moves) -> Holdings:
    """What ranks have after moves that are made at once."""
    new = [[*held] for held in holdings]
    for move in moves:
        new[move.to_rank][move.to_place] = holdings[move.from_rank][move.from_place]
    return new


def rank_loads(holdings: Sequence[Sequence[int]], loads: Sequence[float]) -> list[float]:
    """What each rank computes of the experts' loads, which those that have an expert share evenly."""
    held = [set(one) for one in holdings]
    holders = [sum(expert in one for one in held) for expert in range(len(loads))]
    return [sum(loads[expert] / holders[expert] for expert in one) for one in held]


def placed(loads: Sequence[float], ranks: int, places: int) -> Holdings:
    """A placement under which ranks have about equal loads.

    Places that are left once each expert has one go to copies of those of which a copy has the largest load, or, where
    that is better, some of them to copies of the lightest. Then the heaviest is dealt first, to the rank with the least
    load that has a place left, and a few exchanges follow.
    """
    left = ranks * places - len(loads)
    found = (_dealt(loads, ranks, places, busy) for busy in sorted({left, left // 2, left // 4, 0}, reverse=True))
    return min(found, key=lambda holdings: max(rank_loads(holdings, loads)))


def _dealt(loads: Sequence[float], ranks: int, places: int, busy: int) -> Holdings:
    """As `placed`, with so many copies of the busiest."""
    copies = _copies(loads, ranks, ranks * places - len(loads), busy)
    dealt: Holdings = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    weights = [load / count for load, count in zip(loads, copies, strict=True)]
    for expert in sorted(range(len(loads)), key=lambda expert: (-weights[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(ranks) if len(dealt[rank]) < places and expert not in dealt[rank]]
            rank = min(free, key=lambda rank: (sums[rank], rank)) if free else _make_room(expert, dealt, sums, weights)
            dealt[rank].append(expert)
            sums[rank] += weights[expert]
    _improve(dealt, sums, weights)
    return dealt


def _copies(loads: Sequence[float], ranks: int, left: int, busy: int) -> list[int]:
    """How often each expert is had: once, more often so many times where a copy's load is the largest, and beyond that
    where it is the least."""
    copies = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(busy):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / copies[expert], expert))
    for expert in sorted(range(len(loads)), key=lambda expert: (loads[expert], expert)):
        more = min(ranks - copies[expert], left - busy)
        copies[expert] += more
        busy += more
    return copies


def _make_room(expert: int, dealt: Holdings, sums: list[float], weights: Sequence[float]) -> int:
    """A rank without that expert, of which another has taken one: all with a place left have it already."""
    room = max(len(held) for held in dealt)
    taker = min(range(len(dealt)), key=lambda rank: (len(dealt[rank]), rank))
    giver = next(rank for rank, held in enumerate(dealt) if len(held) == room and expert not in held)
    given = next(one for one in reversed(dealt[giver]) if one not in dealt[taker])
    dealt[giver].remove(given)
    dealt[taker].append(given)
    sums[giver] -= weights[given]
    sums[taker] += weights[given]
    return giver


def _improve(dealt: Holdings, sums: list[float], weights: Sequence[float]) -> None:
    """Exchanges experts of the busiest rank for lighter ones, as long as that brings its load and another's closer."""
    for _ in range(_SWAPS):
        busy = max(range(len(dealt)), key=lambda rank: sums[rank])
        best: tuple[int, _Exchange] | None = None
        least = sums[busy] * (1 - 1e-9)
        for other in range(len(dealt)):
            if other == busy:
                continue
            found = _exchange(dealt[busy], dealt[other], weights, sums[busy] - sums[other])
            if found is not None and (high := max(sums[busy] - found.less, sums[other] + found.less)) < least:
                best, least = (other, found), high
        if best is None:
            return
        other, way = best
        mine = dealt[busy][way.mine]
        dealt[busy][way.mine] = dealt[other][way.theirs]
        dealt[other][way.theirs] = mine
        sums[busy] -= way.less
        sums[other] += way.less


def _exchange(busy: Sequence[int], other: Sequence[int], weights: Sequence[float], gap: float) -> _Exchange | None:
    """That which halves the gap of two ranks' loads best; None where there is none."""
    mine = [place for place, expert in enumerate(busy) if expert not in other]
    theirs = [place for place, expert in enumerate(other) if expert not in busy]
    if not mine or not theirs:
        return None
    heavy: npt.NDArray[Any] = np.array([weights[busy[place]] for place in mine])
    light: npt.NDArray[Any] = np.array([weights[other[place]] for place in theirs])
    less = heavy[:, None] - light
    row, column = divmod(int(np.abs(less - gap / 2).argmin()), len(theirs))
    return _Exchange(mine[row], theirs[column], float(less[row, column]))


def moves_to(holdings: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> Iterator[Moves]:
    """How ranks come from what they have to a placement, as sets, of as many places: moves after each of which every
    expert is somewhere.

    Ranks are alike, so each takes of the target's parts one that is much as what it has. Experts that are had too often
    are overwritten by copies of those that are not often enough; the rest is exchanged, two and two.
    """
    wanted = [{*part} for part in _matched(holdings, target)]
    now = [[*held] for held in holdings]
    while (step := _copied(now, wanted) or _exchanged(now, wanted)) is not None:
        for moves in step:
            now = after(now, moves)
            yield moves


def _copied(now: Holdings, wanted: Sequence[set[int]]) -> list[Moves] | None:
    """Moves by which one expert more is had as often as is wanted; None where all are."""
    size = 1 + max(map(max, wanted))
    often = np.bincount([expert for held in now for expert in held], minlength=size)
    often -= np.bincount([expert for part in wanted for expert in part], minlength=size)
    if not often.any():
        return None
    expert = int(often.argmin())
    source = next((rank, held.index(expert)) for rank, held in enumerate(now) if expert in held)
    spare = [(rank, place) for rank, held in enumerate(now) for place, one in enumerate(held) if often[one] > 0]
    direct = [at for at in spare if expert not in now[at[0]]]
    if direct:
        rank, place = min(direct, key=lambda at: (expert not in wanted[at[0]], now[at[0]][at[1]] in wanted[at[0]], at))
        return [(Move(*source, rank, place),)]
    # All with a place to spare have it: such a place takes what another rank then makes room with.
    rank, place = spare[0]
    other = next(number for number, held in enumerate(now) if expert not in held)
    given = next(at for at, one in enumerate(now[other]) if one not in now[rank])
    return [(Move(other, given, rank, place),), (Move(*source, other, given),)]


def _exchanged(now: Holdings, wanted: Sequence[set[int]]) -> list[Moves] | None:
    """An exchange after which one place more holds what is wanted of its rank; None where all do."""
    wrong = [_wrong(held, part) for held, part in zip(now, wanted, strict=True)]
    for rank, held in enumerate(now):
        missing = wanted[rank].difference(held)
        found = [
            (held[mine] in there, held[mine] not in wanted[other], other, theirs, mine)
            for other, there in enumerate(now)
            for theirs in wrong[other]
            if there[theirs] in missing
            for mine in wrong[rank]
        ]
        if found:
            *_, other, theirs, mine = min(found)
            return [(Move(rank, mine, other, theirs), Move(other, theirs, rank, mine))]
    return None


def _wrong(held: Sequence[int], wanted: set[int]) -> list[int]:
    """Places that hold what is not wanted of a rank, or what it has in another one too."""
    return [place for place, one in enumerate(held) if one not in wanted or one in held[:place]]


def _matched(holdings: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The parts of a target in the order of the ranks that have most of them already."""
    pairs = sorted(
        (-len(set(held).intersection(part)), rank, index)
        for rank, held in enumerate(holdings)
        for index, part in enumerate(target)
    )
    found: dict[int, Sequence[int]] = {}
    used: set[int] = set()
    for _, rank, index in pairs:
        if rank not in found and index not in used:
            found[rank] = target[index]
            used.add(index)
    return [found[rank] for rank in range(len(holdings))]
