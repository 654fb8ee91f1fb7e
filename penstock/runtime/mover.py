"""Who carries blocks between the device and a lower tier, as the runner sees it."""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.core.protocol import CacheOp, CacheOpKind

MOVES: Final = (CacheOpKind.LOAD, CacheOpKind.SAVE, CacheOpKind.CANCEL, CacheOpKind.FORGET)
"""The cache operations that are a mover's."""


class Ended(NamedTuple):
    """Transfers that have ended, and those of them that did not do what they should."""

    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


NOTHING = Ended()


class Mover:
    """The null form: there is no lower tier."""

    def start(self, op: CacheOp) -> None:
        """Begins a load or a save, or cancels one; its end is told later, be it whole or not.

        Raises:
            ValueError: there is nowhere to go.
        """
        raise ValueError(f"cache operation {op.kind.value} has no tier to go to; served here: copy")

    def ended(self, wait: float = 0.0) -> Ended:
        """What has ended since the last call; waits so many seconds at most if that is nothing yet."""
        return NOTHING

    def abort(self) -> None:
        """Ends all transfers, none of which is told of any more; nothing is written to the device after it."""

    def close(self) -> None:
        """Ends for good."""
