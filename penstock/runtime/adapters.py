"""The adapters of an engine: read beside its steps, kept in memory while they are used, and put into slots."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from penstock.config.adapters import MOST_ADAPTERS, AdapterUse
from penstock.config.errors import CheckpointError, ParameterError, PenstockError, RequestError
from penstock.core.request import EngineRequest

if TYPE_CHECKING:
    from penstock.kernels.adapters import AdapterSlots, LowRank

Loaded: TypeAlias = "tuple[tuple[AdapterSlots, LowRank], ...]"
"""An adapter, ready for a slot: what each projection's slot is to hold."""
_READ_S = 1.0  # between two looks at what is being read
_log = logging.getLogger(__name__)


class OtherRooms(Protocol):
    """Rooms of other ranks, which are to hold what this one does."""

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """These are going to be placed: they may be read meanwhile."""

    def place(self, slot: int, use: AdapterUse) -> None:
        """A slot holds this one from the next step on."""


class AdapterRoom:
    """Belongs to the thread of its engine. The null form has no loader, and takes no request with adapters.

    Attributes:
        others: what follows this one; None where there is nobody.
        fill: has a slot, which held the first, hold the second from the next step on.
    """

    def __init__(self, load: Callable[[AdapterUse], Loaded] | None = None, slots: int = 0, most_bytes: int = 0) -> None:
        """`load` reads an adapter, in a thread of its own; what is in no slot goes where all take `most_bytes`."""
        self._load = load
        self._slots, self._most_bytes = slots, most_bytes
        self._waiting: dict[str, EngineRequest] = {}
        self._loading: dict[str, Future[Loaded]] = {}
        self._loaded: dict[str, Loaded] = {}  # used least recently first
        self._placed: dict[int, tuple[str, Loaded]] = {}  # by slot
        self._lent: dict[int, str] = {}  # by slot, what it is to hold
        self._asked: set[str] = set()  # what is read for a sequence that was queued already
        self._failed: dict[str, PenstockError] = {}  # of those
        self._pinned: dict[str, None] = {}  # used least recently first
        self._thread: ThreadPoolExecutor | None = None
        self.others: OtherRooms | None = None
        self.fill: Callable[[int, Loaded, Loaded], None] = fill
        self._left = False  # somebody has gone who waited: what nobody else waits for need not be read

    # -- requests, before they are queued

    @property
    def pending(self) -> bool:
        """Whether requests wait for their adapters, or what was read for others is to be looked at."""
        return bool(self._waiting or self._loading)

    @property
    def waiting(self) -> Iterable[str]:
        """Requests that wait for their adapters."""
        return self._waiting.keys()

    def add(self, request: EngineRequest) -> bool:
        """Whether a request has to wait for its adapters, until `ready` returns it.

        Raises:
            RequestError: this engine takes no adapters, or not so many of them.
        """
        if not request.adapters:
            return False
        if self._load is None:
            raise RequestError("This engine takes no adapters; start it with --enable-lora.", param="model")
        if len(request.adapters) > (most := min(self._slots, MOST_ADAPTERS)):
            raise ParameterError("adapters", f"{len(request.adapters)} adapters", f"at most {most} of a request")
        lacks = self._lacks(request)
        if lacks:
            self._waiting[request.request_id] = request
        return lacks

    def _lacks(self, request: EngineRequest) -> bool:
        """Whether not all of a request's adapters are here; the others are being read then."""
        return self._begin(request.adapters)

    def _begin(self, uses: tuple[AdapterUse, ...]) -> bool:
        """Begins to read those that are not here; whether there are such."""
        missing = [use for use in uses if self._used(use.digest) is None]
        if missing and self.others is not None:
            self.others.read(uses)
        for use in uses:
            self._pinned.pop(use.digest, None)
            if use.pinned:
                self._pinned[use.digest] = None
        for use in missing:
            if use.digest not in self._loading:
                self._thread = self._thread or ThreadPoolExecutor(1, "penstock-adapters")
                self._loading[use.digest] = self._thread.submit(self._read, use)
        return bool(missing)

    def ready(self) -> list[tuple[EngineRequest, RequestError | None]]:
        """Requests whose adapters have been read, and refused ones with the reason."""
        failed: dict[str, RequestError] = {}
        if self._left:
            self._left = False
            wanted = {use.digest for request in self._waiting.values() for use in request.adapters} | self._asked
            unread = [digest for digest, job in self._loading.items() if digest not in wanted and job.cancel()]
            for digest in unread:
                del self._loading[digest]
        for digest, loading in [(digest, job) for digest, job in self._loading.items() if job.done()]:
            del self._loading[digest]
            try:
                self._loaded[digest] = loading.result()
            except PenstockError as error:
                failed[digest] = RequestError(str(error), param="model", code="adapter_unusable")
                if digest in self._asked:
                    self._failed[digest] = error
        found: list[tuple[EngineRequest, RequestError | None]] = []
        for request in list(self._waiting.values()):
            digests = [use.digest for use in request.adapters]
            refusal = next((failed[digest] for digest in digests if digest in failed), None)
            if refusal is None and (not self._loading.keys().isdisjoint(digests) or self._lacks(request)):
                continue
            del self._waiting[request.request_id]
            found.append((request, refusal))
        oldest = next(iter(self._waiting.values()), None)
        kept = [request for request, refusal in found if refusal is None] + ([] if oldest is None else [oldest])
        self._forget({use.digest for request in kept for use in request.adapters} | self._asked)
        return found

    def wait(self, seconds: float) -> None:
        """Sleeps until an adapter was read, at most so long; not at all if none is."""
        if self._loading:
            wait(self._loading.values(), seconds, FIRST_COMPLETED)

    def cancel(self, request_id: str) -> bool:
        """Forgets a request that waits for its adapters; whether it did."""
        left = self._waiting.pop(request_id, None) is not None
        self._left = self._left or left
        return left

    # -- sequences in the queue, as `core.policies.adapters.AdapterFiles`

    def here(self, uses: tuple[AdapterUse, ...]) -> bool:
        """Whether all are in memory, or cannot be read."""
        return all(use.digest in self._failed or self._used(use.digest) is not None for use in uses)

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """Begins to read those that are not, which stay until others are asked for."""
        self._asked, self._failed = {use.digest for use in uses}, {}
        self._begin(uses)

    def lend(self, placed: tuple[tuple[int, AdapterUse], ...]) -> None:
        """They stay until other ones get their slots."""
        self._lent.update((slot, use.digest) for slot, use in placed)

    # -- slots, between steps

    def place(self, wanted: tuple[tuple[int, AdapterUse], ...]) -> None:
        """Has slots hold these adapters, which are in memory; never reads a file.

        Raises:
            CheckpointError: one could not be read again.
        """
        for slot, use in wanted:
            held = self._placed.get(slot)
            if held is not None and held[0] == use.digest:
                continue
            loaded = self._used(use.digest)
            if loaded is None:
                name = Path(use.path).name
                raise self._failed.get(use.digest) or CheckpointError(f"the adapter {name} is not in memory any more.")
            before = () if held is None else held[1]
            self._placed[slot] = "", (*before, *loaded)  # neither, should this fail in the middle
            self.fill(slot, before, loaded)
            self._placed[slot] = use.digest, loaded
            if self.others is not None:
                self.others.place(slot, use)

    def place_read(self, slot: int, use: AdapterUse) -> None:
        """As `place`, of one; waits until it is read, and reads it if nobody has asked for that.

        Raises:
            CheckpointError: it cannot be read.
        """
        while not self.here((use,)):
            if use.digest not in self._loading:
                self.read((use,))
            self.wait(_READ_S)
            self.ready()
        try:
            self.place(((slot, use),))
        finally:
            self._failed.pop(use.digest, None)  # the next time it is read again

    def unsettle(self) -> None:
        """What slots hold is to be placed again: not all who follow may have done it."""
        self._placed = {slot: ("", loaded) for slot, (_, loaded) in self._placed.items()}

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _read(self, use: AdapterUse) -> Loaded:
        """Raises CheckpointError for what cannot be read or is too large; clients learn no path by it."""
        assert self._load is not None
        path = Path(use.path)
        try:
            return self._load(replace(use, path=str(path)))  # as paths are written, which errors name
        except PenstockError as error:
            raise CheckpointError(str(error).replace(str(path), path.name)) from error
        except Exception as error:  # whatever its files have done to who reads them: the engine goes on
            _log.exception("the adapter %s cannot be read", path)
            raise CheckpointError(f"the adapter {path.name} cannot be read; the server's log says why.") from error

    def _used(self, digest: str) -> Loaded | None:
        found = self._loaded.pop(digest, None)
        if found is None:
            found = next((loaded for known, loaded in self._placed.values() if known == digest), None)
        if found is not None:
            self._loaded[digest] = found
        return found

    def _forget(self, kept: Collection[str]) -> None:
        """Has memory hold no more than it may, but for what somebody has waited for, which is not to be read again."""
        held = {**self._loaded, **dict(self._placed.values())}
        left = self._most_bytes - sum(map(_bytes, held.values()))
        placed = {digest for digest, _ in self._placed.values()} | set(self._lent.values())
        gone = [digest for digest in self._loaded if digest not in placed and digest not in kept]
        for digest in sorted(gone, key=self._pinned.__contains__):  # those that are pinned last
            if left >= 0:
                break
            left += _bytes(self._loaded.pop(digest))
        self._pinned = {digest: None for digest in self._pinned if digest in self._loaded or digest in self._loading}


class FollowingRoom:
    """A room that places what it is told to, in its turn; implements OtherRooms."""

    def __init__(self, room: AdapterRoom) -> None:
        self._room = room

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """As OtherRooms."""
        self._room.read(uses)

    def place(self, slot: int, use: AdapterUse) -> None:
        """As OtherRooms. Raises CheckpointError if it cannot be read."""
        self._room.place_read(slot, use)


class LateFills:
    """What a room has placed, and who computes with it fills slots with in its turn; implements OtherRooms."""

    def __init__(self, room: AdapterRoom) -> None:
        self._waiting: deque[tuple[int, Loaded, Loaded]] = deque()
        room.fill = lambda slot, before, loaded: self._waiting.append((slot, before, loaded))

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """As OtherRooms: the room has read them."""

    def place(self, slot: int, use: AdapterUse) -> None:
        """As OtherRooms."""
        fill(*self._waiting.popleft())


def fill(slot: int, before: Loaded, loaded: Loaded) -> None:
    """Has a slot hold what was loaded instead of what it held before."""
    filled = {id(slots) for slots, _ in loaded}
    for slots, _ in before:
        if id(slots) not in filled:
            slots.clear(slot)
    for slots, entry in loaded:
        slots.put(slot, entry)


def _bytes(loaded: Loaded) -> int:
    return sum(entry.nbytes for _, entry in loaded)
