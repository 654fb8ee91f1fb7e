"""Blocks that several ranks move, each its share of them: told in order, and over when all have said so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Condition
from typing import TYPE_CHECKING, Protocol

from penstock.config.errors import EngineDeadError
from penstock.core.protocol import NULL_BLOCK, CacheOp, CacheOpKind
from penstock.runtime.mover import NOTHING, Ended, Mover

if TYPE_CHECKING:
    from penstock.runtime.ranks import messages
    from penstock.runtime.ranks.alarm import Alarm


class OtherShares(Protocol):
    """The other ranks' memory, as the one that leads sees it.

    Attributes:
        alarm: rung where one of them has ended.
        kv_sizes: bytes that each of them keeps of a block, by cache group, a recurrent state behind them.
        layout: which part of the model each rank has, in words.
    """

    alarm: Alarm
    kv_sizes: list[tuple[int, ...]]
    layout: str

    def keep(self, asked: list[messages.KeepShare]) -> None:
        """Has each of them keep its share of copies as it is asked to.

        Raises:
            PenstockError: one cannot; it is named.
        """

    def gather(self, own: Callable[[Callable[[int, bool], None]], Mover], digest_of: Callable[[int], bytes]) -> Mover:
        """The mover of all ranks, of which `own`, given who is to be told of ends, makes this one's.

        `digest_of` a place tells what it is a copy of, KeyError if of nothing.
        """


class GatheredMover(Mover):
    """A transfer is over when it is in every rank, and did what it should if it did in all: no share counts alone."""

    def __init__(
        self, count: int, tell: Callable[[CacheOp], None], digest_of: Callable[[int], bytes], own: Callable[[], None]
    ) -> None:
        """`tell` has all of `count` ranks begin an operation, this one too, whose mover `own` closes."""
        self._count = count
        self._tell = tell
        self._digest_of = digest_of
        self._close_own = own
        self._left: dict[int, int] = {}  # ranks in which a transfer has not ended
        self._broken: set[int] = set()  # transfers that have failed in one
        self._loads: set[int] = set()
        self._finished: list[int] = []
        self._failed: list[int] = []
        self._forgotten: list[int] = []
        self._changed = Condition()

    def forget(self, place: int) -> None:
        """The copy at a place is not wanted any more: the others are told ahead of what they are told next."""
        self._forgotten.append(place)

    def start(self, op: CacheOp) -> None:
        self._tell_forgotten()
        if op.kind is CacheOpKind.CANCEL:
            self._tell(op)
            return
        try:
            digest = self._digest_of(op.place)
        except KeyError:  # another's load of the same copy has found it damaged since
            with self._changed:
                self._end(op.transfer, failed=True)
            return
        with self._changed:
            self._left[op.transfer] = self._count
            if op.kind is CacheOpKind.LOAD:
                self._loads.add(op.transfer)
        self._tell(replace(op, digest=digest))

    def note(self, transfer: int, failed: bool) -> None:
        """A transfer has ended in one rank. From any thread."""
        with self._changed:
            if transfer not in self._left:  # it was given up with all others
                return
            self._left[transfer] -= 1
            if failed:
                self._broken.add(transfer)
            if not self._left[transfer]:
                del self._left[transfer]
                self._end(transfer, failed=transfer in self._broken)

    def _end(self, transfer: int, *, failed: bool) -> None:
        self._loads.discard(transfer)
        self._broken.discard(transfer)
        self._finished.append(transfer)
        if failed:
            self._failed.append(transfer)
        self._changed.notify_all()

    def ended(self, wait: float = 0.0) -> Ended:
        self._tell_forgotten()
        if not (self._left or self._finished):
            return NOTHING
        with self._changed:
            if wait:  # for all that is loaded: each time it is told of, a step is planned
                self._changed.wait_for(lambda: not self._loads and (self._finished or not self._left), wait)
            ended = Ended(tuple(self._finished), tuple(self._failed))
            self._finished.clear()
            self._failed.clear()
        return ended

    def abort(self) -> None:
        with self._changed:
            open_ones = bool(self._left)
            for collection in (self._left, self._broken, self._loads, self._finished, self._failed):
                collection.clear()
        if open_ones:
            with suppress(EngineDeadError):  # whose ranks have ended
                self._tell(CacheOp(CacheOpKind.CANCEL, 0, NULL_BLOCK, NULL_BLOCK, 0))

    def close(self) -> None:
        self.abort()
        self._close_own()

    def _tell_forgotten(self) -> None:
        while self._forgotten:
            place = self._forgotten.pop()
            self._tell(CacheOp(CacheOpKind.FORGET, 0, NULL_BLOCK, NULL_BLOCK, 0, place=place))
