"""Where copies of blocks lie: a place for each, and what it is a copy of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Protocol

from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.pieces import Bytes


class StoreError(Exception):
    """A copy cannot be had; the message is a clause that says why."""


class GivenUp(Exception):
    """A save was given up before it was written: what it would have kept may be another block's."""


def always() -> bool:
    """Nobody gives it up."""
    return True


class Store(Protocol):
    """Copies by place. Called by several threads, but for no place by two at once."""

    def describe(self, place: int, entry: Entry) -> None:
        """What will be written at a place."""

    def forget(self, place: int) -> None:
        """The copy at a place is not wanted any more."""

    def entry(self, place: int) -> Entry:
        """What was described last. Raises KeyError where that is nothing."""

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        """Keeps a block.

        Args:
            place, entry: where, and what it is.
            parts: its bytes, which may change once it is given up.
            settled: asked once, when the bytes have been read or summed up, whether it has not been given up till then.

        Raises:
            GivenUp: it was given up, and nothing was written.
            StoreError, OSError: it cannot.
        """

    def read(self, place: int, entry: Entry) -> Bytes:
        """What was written, checked; valid until this thread reads again.

        Raises:
            StoreError, OSError: it is not there, or not that.
        """

    def found(self) -> Iterator[tuple[int, Entry]]:
        """What is there from before."""

    def close(self) -> None:
        """Nothing is read or written any more."""


class Described:
    """What places hold, as the tier told it."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}

    def describe(self, place: int, entry: Entry) -> None:
        self._entries[place] = entry

    def forget(self, place: int) -> None:
        self._entries.pop(place, None)

    def entry(self, place: int) -> Entry:
        return self._entries[place]


class RamStore(Described):
    """Copies in the host's memory, which end with the process."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        self._lock = Lock()

    def forget(self, place: int) -> None:
        with self._lock:
            super().forget(place)
            self._kept.pop(place, None)

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        data = b"".join(parts)
        if not settled():
            raise GivenUp
        with self._lock:
            if self._entries.get(place) is entry:  # else the place was given to another after a step failed
                self._kept[place] = entry.digest, data

    def read(self, place: int, entry: Entry) -> Bytes:
        digest, data = self._kept.get(place, (b"", b""))
        if digest != entry.digest:
            raise StoreError("there is another block at its place")
        return data

    def found(self) -> Iterator[tuple[int, Entry]]:
        return iter(())

    def close(self) -> None:
        self._kept.clear()


class RamBefore:
    """A store in front of which the blocks that were used last stay in memory, so many bytes of them."""

    def __init__(self, store: Store, most: int) -> None:
        self._store = store
        self._most = most
        self._lock = Lock()
        self._kept: OrderedDict[int, tuple[bytes, bytes]] = OrderedDict()
        self._size = 0

    def describe(self, place: int, entry: Entry) -> None:
        self._store.describe(place, entry)

    def entry(self, place: int) -> Entry:
        return self._store.entry(place)

    def found(self) -> Iterator[tuple[int, Entry]]:
        return self._store.found()

    def forget(self, place: int) -> None:
        self._drop(place)
        self._store.forget(place)

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        data = b"".join(parts)
        self._store.write(place, entry, (data,), settled)
        self._keep(place, entry, data)

    def read(self, place: int, entry: Entry) -> Bytes:
        with self._lock:
            digest, data = self._kept.get(place, (b"", b""))
            if digest == entry.digest:
                self._kept.move_to_end(place)
                return data
        data = bytes(self._store.read(place, entry))
        self._keep(place, entry, data)
        return data

    def close(self) -> None:
        self._kept.clear()
        self._store.close()

    def _keep(self, place: int, entry: Entry, data: bytes) -> None:
        with self._lock:
            _, old = self._kept.pop(place, (b"", b""))  # two may have read it at the same time
            self._size -= len(old)
            self._kept[place] = entry.digest, data
            self._size += len(data)
            while self._size > self._most:
                _, (_, oldest) = self._kept.popitem(last=False)
                self._size -= len(oldest)

    def _drop(self, place: int) -> None:
        with self._lock:
            _, data = self._kept.pop(place, (b"", b""))
            self._size -= len(data)
