"""Threads that carry blocks between the device's memory and a store, loads before saves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import PriorityQueue
from threading import Condition, Thread

from penstock.core.policies.bounded_tier import Entry
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.runtime.mover import NOTHING, Ended, Mover
from penstock.transfer.pieces import Bytes, Pieces
from penstock.transfer.store import GivenUp, Store, StoreError

log = logging.getLogger(__name__)
_QUIET_S = 60.0  # between two words on what fails
_CLOSING_S = 10.0  # a transfer that has begun may take so long at the end


def _nothing() -> Sequence[Bytes]:
    return ()


@dataclass(order=True, slots=True)
class _Job:
    rank: tuple[int, int]
    op: CacheOp | None = field(compare=False, default=None)
    entry: Entry | None = field(compare=False, default=None)
    read: Callable[[], Sequence[Bytes]] = field(compare=False, default=_nothing)
    life: int = field(compare=False, default=0)


class Carrier(Mover):
    """Carries blocks in threads.

    What a save reads may be overwritten once it was given up: then nothing of it is kept, since a copy counts beyond
    this process. What a load brings is read and checked aside, and put into the device's memory only while somebody may
    still want it.
    """

    def __init__(self, pieces: Pieces, store: Store, threads: int = 2) -> None:
        self._pieces = pieces
        self._store = store
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers = count()
        self._changed = Condition()
        self._life = 0  # how often all was ended
        self._finished: list[int] = []
        self._failed: list[int] = []
        self._under_way = 0
        self._waiting: set[int] = set()  # what may still be given up: loads that have not begun, saves not yet written
        self._told = float("-inf")
        self._threads = [Thread(target=self._work, name=f"kv-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, op: CacheOp) -> None:
        if op.kind is CacheOpKind.CANCEL:
            self._cancel(op.transfer)
            return
        try:
            entry = self._store.entry(op.place)
        except KeyError:  # another's load of the same copy has found it damaged since
            with self._changed:
                self._under_way += 1
                self._end(op.transfer, failed=True)
            return
        read = self._pieces.reading(op.group, op.source) if op.kind is CacheOpKind.SAVE else _nothing
        with self._changed:
            self._under_way += 1
            self._waiting.add(op.transfer)
        rank = (int(op.kind is CacheOpKind.SAVE), next(self._numbers))
        self._jobs.put(_Job(rank, op, entry, read, self._life))

    def ended(self, wait: float = 0.0) -> Ended:
        if not (self._under_way or self._finished):
            return NOTHING
        with self._changed:
            if wait and self._under_way and not self._finished:
                self._changed.wait(wait)
            if not self._finished:
                return NOTHING
            ended = Ended(tuple(self._finished), tuple(self._failed))
            self._finished.clear()
            self._failed.clear()
        return ended

    def abort(self) -> None:
        with self._changed:
            self._life += 1
            self._under_way = 0
            self._waiting.clear()
            self._finished.clear()
            self._failed.clear()

    def _cancel(self, transfer: int) -> None:
        """What may still be given up ends now, without being done: its block is wanted for something else."""
        with self._changed:
            if transfer in self._waiting:
                self._waiting.remove(transfer)
                self._end(transfer, failed=False)

    def _end(self, transfer: int, *, failed: bool) -> None:
        self._under_way -= 1
        self._finished.append(transfer)
        if failed:
            self._failed.append(transfer)
        self._changed.notify_all()

    def _wanted(self, job: _Job, op: CacheOp) -> bool:
        """Whether a job has not been given up."""
        return job.life == self._life and op.transfer in self._waiting

    def _settled(self, job: _Job, op: CacheOp) -> bool:
        """Whether a job is still wanted, which it is then to its end."""
        with self._changed:
            wanted = self._wanted(job, op)
            if wanted:
                self._waiting.remove(op.transfer)
        return wanted

    def close(self) -> None:
        self.abort()
        for _ in self._threads:
            self._jobs.put(_Job((-1, next(self._numbers))))
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the store below does not answer; its files stay open as long as this process")
            return  # a file's number may be another's once it is closed, and the thread goes on to write there
        self._store.close()

    def _work(self) -> None:
        while (job := self._jobs.get()).op is not None and job.entry is not None:
            if not (self._settled(job, job.op) if job.op.kind is CacheOpKind.LOAD else self._wanted(job, job.op)):
                continue
            try:
                failed = not self._carried(job, job.op, job.entry)
            except GivenUp:  # which was told then
                continue
            with self._changed:
                if job.life == self._life:
                    self._waiting.discard(job.op.transfer)
                    self._end(job.op.transfer, failed=failed)

    def _carried(self, job: _Job, op: CacheOp, entry: Entry) -> bool:
        try:
            if op.kind is CacheOpKind.SAVE:
                self._store.write(op.place, entry, job.read(), partial(self._settled, job, op))
                return True
            data = self._store.read(op.place, entry)
            if len(data) != self._pieces.sizes[op.group]:
                raise StoreError(f"it has {len(data)} bytes instead of {self._pieces.sizes[op.group]}")
            write = self._pieces.writing(op.group, op.target, data)
        except GivenUp:
            raise
        except (StoreError, OSError) as error:
            self._tell(op, error)
            return False
        except Exception:
            log.exception("a block could not be moved")
            return False
        with self._changed:  # which keeps `abort` waiting, after which the block may be another's
            if job.life == self._life:
                write()
        return True

    def _tell(self, op: CacheOp, error: Exception) -> None:
        now = time.monotonic()
        if now - self._told > _QUIET_S:
            self._told = now
            what = "kept below" if op.kind is CacheOpKind.SAVE else "loaded from below: it is computed again"
            log.warning("a block of the KV cache cannot be %s: %s (told once a minute)", what, error)
