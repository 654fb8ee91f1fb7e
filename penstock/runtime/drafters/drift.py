"""Whether fewer drafts are accepted than used to be: what is drafted for has changed, or the drafter has gone stale."""

from __future__ import annotations

import logging
from typing import Final

log = logging.getLogger(__name__)

_NOW: Final = 256  # verified proposals after which one counts 1/e
_USUALLY: Final = 8192
_LEAST: Final = 1024  # before anything is said
_FALLEN: Final = 0.7  # of what is usual, below which a line is logged
_RISEN: Final = 0.85  # above which it may be logged again


class Drift:
    """Mean accepted drafts of a verified proposal, now and usually; and how many there were in each place.

    Attributes:
        now, usually: these means; 0 before there are any.
        by_position: proposals whose first draft was right, whose second was too, ….
    """

    def __init__(self) -> None:
        self.now = self.usually = 0.0
        self.by_position: list[int] = []
        self._count = 0
        self._fallen = False

    def add(self, accepted: int) -> None:
        """So many drafts of a proposal were right."""
        self._count += 1
        self.by_position += [0] * (accepted - len(self.by_position))
        for place in range(accepted):
            self.by_position[place] += 1
        self.now += (accepted - self.now) / min(self._count, _NOW)
        self.usually += (accepted - self.usually) / min(self._count, _USUALLY)
        if self._fallen:
            self._fallen = self.now < _RISEN * self.usually
        elif self._count >= _LEAST and self.now < _FALLEN * self.usually:
            self._fallen = True
            log.warning(
                "fewer drafts are accepted than used to be: %.2f of a proposal, of the last %d or so, usually %.2f; "
                "what is asked has changed, or the drafter no longer fits",
                self.now,
                _NOW,
                self.usually,
            )
