"""Has experts change places where ranks are busy unevenly: decided by the rank that leads, a little between two steps.

Every rank routes every token, so the one that leads has counted what all experts compute. Each so many steps it looks
at one layer after the other, and where a placement is known under which the busiest rank has clearly less to do, it
has experts brought there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from penstock.parallel.experts import Moves, moves_to, placed, rank_loads
from penstock.runtime.ranks import messages

if TYPE_CHECKING:
    from penstock.runtime.ranks.experts import ExpertShelf
    from penstock.runtime.ranks.lead import Followers

PART: Final = 4 << 20  # bytes that a rank is brought between two steps: about two milliseconds
WORTH: Final = 1.1  # by how much less the busiest rank is to have, since the next loads are not quite these
LEAST: Final = 8  # tokens of an expert, on average, of which a layer's load is known
log = logging.getLogger(__name__)
_Command = messages.PassExperts | messages.PutExperts


class ExpertBalancer:
    """Looks after the experts of all ranks."""

    def __init__(self, followers: Followers, shelf: ExpertShelf, interval: int) -> None:
        """`shelf` of the rank that leads; it looks whether experts are well placed each `interval` steps."""
        self._followers, self._shelf = followers, shelf
        self._interval = interval
        self._steps = 0
        self._work: Iterator[_Command | None] | None = None

    def between_steps(self) -> None:
        """To be called ahead of each step: does a little of what there is to do."""
        self._steps += 1
        if self._work is None:
            if self._steps < self._interval:
                return
            self._steps, self._work = 0, self._look()
        brought = 0
        while brought < PART:
            command = next(self._work, None)
            if command is None:
                break
            self._followers.tell(command)
            self._shelf.obey(command)
            brought += command.end - command.begin if isinstance(command, messages.PassExperts) else 0

    def _look(self) -> Iterator[_Command | None]:
        """What is to be told, layer by layer; None where it is enough for now."""
        before, since = 0.0, 0.0
        moved = 0
        for index, layer in enumerate(self._shelf.layers):
            table = layer.table
            loads = table.counts.tolist()
            table.counts //= 2  # what was long ago counts less
            now = max(rank_loads(table.holdings, loads))
            target = placed(loads, len(table.holdings), len(table.holdings[0]))
            then = max(rank_loads(target, loads))
            before, since = before + now, since + now
            if sum(loads) < LEAST * len(loads) or now < WORTH * then:
                yield None
                continue
            since += then - now
            for moves in moves_to(table.holdings, target):
                moved += len(moves)
                yield from self._bring(index, layer.pieces, moves)
        self._work = None
        if moved:
            log.info(
                "%d experts have changed places: the busiest ranks have %.0f %% of what they had to compute",
                moved,
                100 * since / before,
            )

    def _bring(self, index: int, pieces: tuple[int, ...], moves: Moves) -> Iterator[_Command]:
        for piece, size in enumerate(pieces):
            for begin in range(0, size, PART):
                yield messages.PassExperts(index, piece, begin, min(begin + PART, size), moves)
        yield messages.PutExperts(index, moves)
