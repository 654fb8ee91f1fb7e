"""Copies in a store that engines share, behind this engine's own: by content, found by whoever has the same prefix.

Blocks are sent in threads of their own, from a queue of bounded bytes, so that a slow store holds up neither steps nor
what lies nearer. What the queue has no room for is not sent: it is computed again where it is not kept nearer.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Full, Queue
from threading import Condition, Event, Lock, Thread, get_ident
from typing import Final, Protocol, TypeVar

from penstock.core.policies.bounded_tier import Entry
from penstock.core.policies.shared_tier import Search
from penstock.transfer.pieces import Bytes
from penstock.transfer.remote import WHOLE_ANSWER_S, Remote, Rests, packed, unpacked
from penstock.transfer.sealing import Sealing
from penstock.transfer.store import Described, GivenUp, Store, StoreError, always

log = logging.getLogger(__name__)
_THREADS: Final = 2  # that send, and as many that search
_MOST_OTHERS: Final = 512  # blocks that are asked for copies in the groups that not all need
_MOST_SEARCHES: Final = 64  # that wait
MOST_QUEUED: Final = 256 << 20  # bytes
_SPOILT_S: Final = 60.0  # for so long nobody is told of a copy that could not be had
_MOST_SPOILT: Final = 65_536
_CLOSING_S: Final = 3.0
_WATCHED_S: Final = 1.0
_QUIET_S: Final = 60.0  # between two words on what fails
_T = TypeVar("_T")


def _name(stem: str, digest: bytes, group: int) -> str:
    return f"{stem}:{digest.hex()}:{group}"


class Nearer(Store, Protocol):
    """An engine's own copies on disk."""

    def holds(self, place: int, entry: Entry) -> bool:
        """Whether its copy of this lies at a place, if it is whole."""


class SharedStore(Described):
    """Called by several threads, but for no place by two at once."""

    def __init__(
        self, remote: Remote, stems: Sequence[str], sizes: Sequence[int], essential: Sequence[int],
        nearer: Nearer | None, sealing: Sealing, most_queued: int | None = None,
    ) -> None:  # fmt: skip
        """Starts its threads.

        Args:
            remote: the store.
            stems: what names begin with: all that the numbers in a block depend on. The first is of what is read and
                written here, the others are of other ranks' shares, without which a block is not there.
            sizes: bytes of a block, by group.
            essential: groups without which a block is of no use.
            nearer: the engine's own copies, if it has a disk for them.
            sealing: how blocks are kept.
            most_queued: bytes that may wait to be sent; MOST_QUEUED without it.
        """
        super().__init__()
        self._remote = remote
        self._stems = tuple(stems)
        self._most_queued = MOST_QUEUED if most_queued is None else most_queued
        self._sizes = tuple(sizes)
        self._essential = tuple(essential)
        self._nearer = nearer
        self._sealing = sealing
        self._rests = Rests()
        self._unsent: dict[str, tuple[Entry, bytes]] = {}  # those on their way too
        self._next_names: deque[str] = deque()
        self._queued = 0
        self._changed = Condition()
        self._ends = False
        self._spoilt: OrderedDict[str, float] = OrderedDict()
        self._spoilt_lock = Lock()
        self._searches: Queue[Search | None] = Queue(_MOST_SEARCHES)
        self._told = float("-inf")
        self._calls: dict[int, float] = {}  # by thread, since when it waits for the store
        self._ended = Event()
        for work, name in ((self._send_all, "send"), (self._search_all, "search")):
            for number in range(_THREADS):
                Thread(target=work, name=f"kv-{name}-{number}", daemon=True).start()
        Thread(target=self._watch, name="kv-watch", daemon=True).start()

    def name(self, digest: bytes, group: int) -> str:
        """What a block is kept under."""
        return _name(self._stems[0], digest, group)

    def _names(self, digest: bytes, group: int) -> list[str]:
        """What all shares of a block are kept under."""
        return [_name(stem, digest, group) for stem in self._stems]

    @property
    def unsent(self) -> int:
        """Bytes of blocks that are to be sent yet."""
        return self._queued

    # -- as a store ---------------------------------------------------------------------------------------------------

    def describe(self, place: int, entry: Entry) -> None:
        super().describe(place, entry)
        if self._nearer is not None:
            self._nearer.describe(place, entry)

    def forget(self, place: int) -> None:
        super().forget(place)
        if self._nearer is not None:
            self._nearer.forget(place)

    def found(self) -> Iterator[tuple[int, Entry]]:
        for place, entry in self._nearer.found() if self._nearer is not None else ():
            super().describe(place, entry)
            yield place, entry

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        data = b"".join(parts)
        if self._nearer is not None:
            self._nearer.write(place, entry, (data,), settled)
        elif not settled():
            raise GivenUp
        if not self._send_later(entry, data) and self._nearer is None:
            raise StoreError("the store takes blocks more slowly than they are computed, or not at all")

    def read(self, place: int, entry: Entry) -> Bytes:
        if self._nearer is not None and self._nearer.holds(place, entry):
            try:
                return self._nearer.read(place, entry)
            except (StoreError, OSError) as error:  # which the shared store may heal
                self._tell("a block on disk cannot be used", error)
        name = self.name(entry.digest, entry.group)
        with self._changed:
            unsent = self._unsent.get(name)
        if unsent is not None:
            return unsent[1]
        try:
            value = self._asked(partial(self._remote.get, name))
        except (StoreError, OSError):
            self._spoil(name)
            raise
        try:
            data = unpacked(name, entry, value, self._sizes[entry.group], self._sealing)
        except StoreError:
            self._spoil(name)
            self._remove(name)
            raise
        if self._nearer is not None:
            self._keep_nearer(self._nearer, place, entry, data)
        return data

    def _keep_nearer(self, nearer: Nearer, place: int, entry: Entry, data: Bytes) -> None:
        try:
            nearer.write(place, entry, (data,))
        except (StoreError, OSError) as error:
            self._tell("a block of the shared store cannot be kept nearer", error)

    def close(self) -> None:
        """Sends what is queued, as far as that takes no longer than a few seconds."""
        until = time.monotonic() + _CLOSING_S
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            while self._queued and not self._rests.resting and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._next_names.clear()
        self._ended.set()
        for _ in range(_THREADS):
            with suppress(Full):
                self._searches.put_nowait(None)
        self._remote.close()
        if self._nearer is not None:
            self._nearer.close()

    # -- what is sent -------------------------------------------------------------------------------------------------

    def _send_later(self, entry: Entry, data: bytes) -> bool:
        """Queues a block, unless there is no room or the store does not answer."""
        name = self.name(entry.digest, entry.group)
        with self._changed:
            if self._rests.resting or self._queued + len(data) > max(self._most_queued, len(data)):
                return False
            if name not in self._unsent:
                self._unsent[name] = entry, data
                self._next_names.append(name)
                self._queued += len(data)
                self._changed.notify_all()
        return True

    def _next(self) -> tuple[str, tuple[Entry, bytes]] | None:
        """Waits for something to send; None at the end."""
        with self._changed:
            while not (self._next_names or self._ends):
                self._changed.wait()
            if not self._next_names:
                return None
            name = self._next_names.popleft()
            return name, self._unsent[name]

    def _send_all(self) -> None:
        while (sent := self._next()) is not None:
            name, (entry, data) = sent
            try:
                value = packed(name, entry, data, self._sealing)
                self._asked(partial(self._remote.put, name, value))
                with self._spoilt_lock:
                    self._spoilt.pop(name, None)
            except (StoreError, OSError) as error:
                self._tell("a block of the KV cache cannot be sent to the shared store", error)
            except Exception:
                log.exception("a block could not be sent")
            finally:
                with self._changed:
                    self._unsent.pop(name, None)
                    self._queued -= len(data)
                    self._changed.notify_all()

    # -- what others have sent ----------------------------------------------------------------------------------------

    def seek(self, search: Search) -> bool:
        """Begins a search for a chain of blocks; False where it cannot be done now."""
        if self._rests.resting or self._ends:
            return False
        try:
            self._searches.put_nowait(search)
        except Full:
            return False
        return True

    def _search_all(self) -> None:
        while (search := self._searches.get()) is not None and not self._ends:
            try:
                self._asked(partial(self._search, search))
            except (StoreError, OSError) as error:
                self._tell("the shared store cannot be asked for a prefix", error)
            except Exception:
                log.exception("a prefix could not be looked up")
            finally:
                search.end()

    def _search(self, search: Search) -> None:
        """Answers with the blocks from the first on that have all they need, and their copies in other groups."""
        digests = search.chain.digests()
        rows = [[name for group in self._essential for name in self._names(digest, group)] for digest in digests]
        spoilt = self._spoilt_names()
        usable = (
            next((n for n, row in enumerate(rows) if not spoilt.isdisjoint(row)), len(rows)) if spoilt else len(rows)
        )
        count = self._remote.leading(rows[:usable]) if self._essential else usable
        others = [group for group in range(len(self._sizes)) if group not in self._essential]
        last = range(max(0, count - _MOST_OTHERS), count)  # windows and states are wanted near the end
        names = [name for number in last for group in others for name in self._names(digests[number], group)]
        held = dict(zip(names, self._remote.held(names) if names else (), strict=True))
        search.digests = digests
        search.groups = [
            (
                *self._essential,
                *(group for group in others if all(held.get(name, False) for name in self._names(digest, group))),
            )
            for digest in digests[:count]
        ]

    def _spoil(self, name: str) -> None:
        with self._spoilt_lock:
            self._spoilt[name] = time.monotonic()
            self._spoilt.move_to_end(name)
            while len(self._spoilt) > _MOST_SPOILT:
                self._spoilt.popitem(last=False)

    def _spoilt_names(self) -> set[str]:
        """Copies that could not be had a moment ago."""
        oldest = time.monotonic() - _SPOILT_S
        with self._spoilt_lock:
            while self._spoilt and next(iter(self._spoilt.values())) < oldest:
                self._spoilt.popitem(last=False)
            return set(self._spoilt)

    def _remove(self, name: str) -> None:
        with suppress(StoreError, OSError):
            self._asked(partial(self._remote.remove, name))

    def _asked(self, call: Callable[[], _T]) -> _T:
        """What a call of the store gives. Raises what it does, StoreError while nothing is asked."""
        self._calls[get_ident()] = time.monotonic()
        try:
            return self._rests.ask(call)
        finally:
            del self._calls[get_ident()]

    def _watch(self) -> None:
        """Ends what the store takes too long for, however slowly it goes on to answer."""
        while not self._ended.wait(_WATCHED_S):
            if min(list(self._calls.values()), default=float("inf")) < time.monotonic() - WHOLE_ANSWER_S:
                self._remote.interrupt()

    def _tell(self, what: str, error: Exception) -> None:
        now = time.monotonic()
        if now - self._told > _QUIET_S:
            self._told = now
            log.warning("%s: %s (told once a minute)", what, error)
