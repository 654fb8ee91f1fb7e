"""Threads that carry blocks between the device's memory and a store, loads before saves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from queue import Empty, PriorityQueue
from threading import Condition, Thread
from typing import Any, NamedTuple

from penstock.core.policies.bounded_tier import Entry
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.runtime.mover import NOTHING, Ended, Mover
from penstock.transfer.pieces import Bytes, Pieces
from penstock.transfer.store import GivenUp, Store, StoreError

log = logging.getLogger(__name__)
_QUIET_S = 60.0  # between two words on what fails
_CLOSING_S = 10.0  # a transfer that has begun may take so long at the end


@dataclass(frozen=True, slots=True)
class _Job:
    """A transfer; `begun` is what the bytes of a save are read by, or what a load is to come after."""

    op: CacheOp
    entry: Entry
    begun: Any


class _Ranked(NamedTuple):
    """Loads come before saves, and the end before all."""

    rank: int
    number: int
    job: _Job | None


class Carrier(Mover):
    """Carries blocks in threads.

    What a save reads may be overwritten once it was given up: then nothing of it is kept, since a copy counts beyond
    this process. What a load brings is read and checked aside, and put into the device's memory only while somebody may
    still want it.
    """

    def __init__(
        self, pieces: Pieces, store: Store, threads: int = 2, tell: Callable[[int, bool], None] | None = None
    ) -> None:
        """`tell` is told at once of each transfer that has ended, and whether it failed, where `ended` is nobody's."""
        self._pieces = pieces
        self._store = store
        self._tell_end = tell or self._collect
        self._jobs: PriorityQueue[_Ranked] = PriorityQueue()
        self._numbers = count()
        self._changed = Condition()
        self._finished: list[int] = []
        self._failed: list[int] = []
        self._under_way: set[int] = set()  # that have not ended
        self._loads: set[int] = set()  # of these
        self._waiting: set[int] = set()  # what may still be given up: loads that have not begun, saves not yet written
        self._told = float("-inf")
        self._threads = [Thread(target=self._work, name=f"kv-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self, op: CacheOp) -> None:
        if op.kind is CacheOpKind.FORGET:  # the tier has told the store itself
            return
        if op.kind is CacheOpKind.CANCEL:
            if op.transfer:
                self._cancel(op.transfer)
            else:
                self.abort()
            return
        entry = self._entry(op)
        if entry is None:
            with self._changed:
                self._under_way.add(op.transfer)
                self._end(op.transfer, failed=True)
            return
        saves = op.kind is CacheOpKind.SAVE
        begun = self._pieces.begin(op.group, op.source) if saves else self._pieces.before(op.group)
        with self._changed:
            self._under_way.add(op.transfer)
            self._waiting.add(op.transfer)
            if not saves:
                self._loads.add(op.transfer)
        self._jobs.put(_Ranked(int(saves), next(self._numbers), _Job(op, entry, begun)))

    def _entry(self, op: CacheOp) -> Entry | None:
        """What lies at its place; None where that is not what was meant: another's load has found it damaged since."""
        try:
            entry = self._store.entry(op.place)
        except KeyError:
            return None
        return entry if op.digest in (b"", entry.digest) else None

    def ended(self, wait: float = 0.0) -> Ended:
        if not (self._under_way or self._finished):
            return NOTHING
        with self._changed:
            if wait:  # for all that is loaded: each time it is told of, a step is planned
                self._changed.wait_for(lambda: not self._loads and (self._finished or not self._under_way), wait)
            if not self._finished:
                return NOTHING
            ended = Ended(tuple(self._finished), tuple(self._failed))
            self._finished.clear()
            self._failed.clear()
        return ended

    def abort(self) -> None:
        with self._changed:
            self._under_way.clear()
            self._waiting.clear()
            self._loads.clear()
            self._finished.clear()
            self._failed.clear()

    def _cancel(self, transfer: int) -> None:
        """What may still be given up ends now, without being done: its block is wanted for something else."""
        with self._changed:
            if transfer in self._waiting:
                self._waiting.remove(transfer)
                self._end(transfer, failed=False)

    def _end(self, transfer: int, *, failed: bool) -> None:
        """Unless it has ended: a save that was given up may fail after that."""
        if transfer not in self._under_way:
            return
        self._under_way.remove(transfer)
        self._loads.discard(transfer)
        self._tell_end(transfer, failed)
        self._changed.notify_all()

    def _collect(self, transfer: int, failed: bool) -> None:
        self._finished.append(transfer)
        if failed:
            self._failed.append(transfer)

    def _settled(self, job: _Job) -> bool:
        """Whether a job is still wanted, which it is then to its end."""
        with self._changed:
            wanted = job.op.transfer in self._waiting
            self._waiting.discard(job.op.transfer)
        return wanted

    def close(self) -> None:
        self.abort()
        for _ in self._threads:
            self._jobs.put(_Ranked(-1, next(self._numbers), None))
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the store below does not answer; its files stay open as long as this process")
            return  # a file's number may be another's once it is closed, and the thread goes on to write there
        self._store.close()

    def _work(self) -> None:
        while (job := self._jobs.get().job) is not None:
            jobs = [job, *self._alike(job.op)]
            (self._load if job.op.kind is CacheOpKind.LOAD else self._save)(job.op.group, jobs)

    def _alike(self, op: CacheOp) -> Sequence[_Job]:
        """More that is to be done, of the same kind and group, as far as it is moved together."""
        found: list[_Job] = []
        others: list[_Ranked] = []
        while max(len(found) + 1, len(others)) < self._pieces.most:
            try:
                ranked = self._jobs.get_nowait()
            except Empty:
                break
            job = ranked.job
            if job is not None and (job.op.kind, job.op.group) == (op.kind, op.group):
                found.append(job)
            else:
                others.append(ranked)
        for ranked in others:
            self._jobs.put(ranked)
        return found

    def _load(self, group: int, jobs: Sequence[_Job]) -> None:
        whole: list[_Job] = []
        for job in jobs:
            if self._settled(job):
                if self._done(job, partial(self._fetch, job, len(whole))):
                    whole.append(job)
                else:
                    self._finish([job], failed=True)
        if whole:
            self._finish(whole, failed=not self._done(whole[0], partial(self._place, group, whole)))

    def _fetch(self, job: _Job, place: int) -> None:
        op, size = job.op, self._pieces.sizes[job.op.group]
        data = self._store.read(op.place, job.entry)
        if len(data) != size:
            raise StoreError(f"it has {len(data)} bytes instead of {size}")
        self._pieces.put(place, op.group, data)

    def _place(self, group: int, jobs: Sequence[_Job]) -> None:
        self._pieces.lift(group, [job.begun for job in jobs])
        with self._changed:  # which keeps `abort` waiting, after which the block may be another's
            targets = {place: job.op.target for place, job in enumerate(jobs) if job.op.transfer in self._under_way}
            if targets:
                self._pieces.write(group, targets)

    def _save(self, group: int, jobs: Sequence[_Job]) -> None:
        wanted = [job for job in jobs if job.op.transfer in self._waiting]
        begun = [job.begun for job in wanted]
        read: list[Sequence[Bytes]] = []
        if wanted and not self._done(wanted[0], lambda: read.extend(self._pieces.read(group, begun))):
            self._finish(wanted, failed=True)
            return
        for job, parts in zip(wanted, read, strict=True):
            with suppress(GivenUp):  # which was told then
                self._finish([job], failed=not self._done(job, partial(self._write, job, parts)))

    def _write(self, job: _Job, parts: Sequence[Bytes]) -> None:
        self._store.write(job.op.place, job.entry, parts, partial(self._settled, job))

    def _finish(self, jobs: Sequence[_Job], *, failed: bool) -> None:
        with self._changed:
            for job in jobs:
                self._waiting.discard(job.op.transfer)
                self._end(job.op.transfer, failed=failed)

    def _done(self, job: _Job, work: Callable[[], None]) -> bool:
        """Whether what is done for a job goes well.

        Raises:
            GivenUp: it was given up.
        """
        try:
            work()
        except GivenUp:
            raise
        except (StoreError, OSError) as error:
            self._tell(job.op, error)
            return False
        except Exception:
            log.exception("a block could not be moved")
            return False
        return True

    def _tell(self, op: CacheOp, error: Exception) -> None:
        now = time.monotonic()
        if now - self._told > _QUIET_S:
            self._told = now
            what = "kept below" if op.kind is CacheOpKind.SAVE else "loaded from below: it is computed again"
            log.warning("a block of the KV cache cannot be %s: %s (told once a minute)", what, error)
