"""What a store that engines share is to this one: values by name, and a rest for it after it has failed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import Final, Protocol, TypeVar

from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.pieces import Bytes
from penstock.transfer.sealing import Sealing
from penstock.transfer.store import StoreError

CONNECT_S: Final = 2.0  # to begin with a store
ANSWER_S: Final = 5.0  # between two pieces of an answer
WHOLE_ANSWER_S: Final = 10.0  # a store that takes longer for one is as good as gone
_FIRST_REST_S: Final = 1.0
_LONGEST_REST_S: Final = 30.0
_MAGIC: Final = b"PNSTKS01"
_HEAD: Final = struct.Struct("<8sQI16s28x")
_T = TypeVar("_T")


class Remote(Protocol):
    """Values by name. Called by several threads. An OSError says that the store cannot be reached."""

    def check(self) -> None:
        """Raises StoreError if the store refuses this client, OSError."""

    def get(self, name: str) -> Bytes:
        """A value. Raises StoreError if there is none, OSError."""

    def put(self, name: str, value: Bytes) -> None:
        """Keeps a value. Raises StoreError if the store refuses it, OSError."""

    def leading(self, rows: Sequence[Sequence[str]]) -> int:
        """How many of the first rows have all their names there; a guess is allowed. Raises StoreError, OSError."""

    def held(self, names: Sequence[str]) -> Sequence[bool]:
        """Which names are there. Raises StoreError, OSError."""

    def remove(self, name: str) -> None:
        """There is to be no such value. Raises StoreError, OSError."""

    def interrupt(self) -> None:
        """Has calls that wait for the store end with an OSError, as far as they do not end by themselves."""

    def close(self) -> None:
        """Ends all connections."""


def whole_rows(rows: Sequence[Sequence[str]], held: Sequence[bool]) -> list[bool]:
    """Which rows have all their names there."""
    there = iter(held)
    return [sum(next(there) for _ in row) == len(row) for row in rows]


def leading_rows(rows: Sequence[Sequence[str]], held: Callable[[Sequence[str]], Sequence[bool]]) -> int:
    """How many of the first rows have all their names there, as `held` tells of each."""
    whole = whole_rows(rows, held([name for row in rows for name in row]))
    return whole.index(False) if False in whole else len(whole)


class Rests:
    """Asks a store nothing for a while after it has failed, twice as long each time, half a minute at most."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._until = float("-inf")
        self._rest = _FIRST_REST_S

    @property
    def resting(self) -> bool:
        """Whether nothing is asked now."""
        return monotonic() < self._until

    def ask(self, call: Callable[[], _T]) -> _T:
        """What a call gives. Raises StoreError while nothing is asked, or what the call raises."""
        if self.resting:
            raise StoreError("the store did not answer a moment ago")
        try:
            answer = call()
        except OSError:
            with self._lock:
                if not self.resting:  # else another thread's call has failed with this one
                    self._until = monotonic() + self._rest
                    self._rest = min(_LONGEST_REST_S, 2 * self._rest)
            raise
        self._rest = _FIRST_REST_S
        return answer


def packed(name: str, entry: Entry, data: Bytes, sealing: Sealing) -> bytes:
    """A block as it is kept: 64 bytes of magic, length, checksum that begins with the name, digest; then the block."""
    parts = sealing.seal([data], name.encode())
    sum_ = zlib.crc32(name.encode())
    for part in parts:
        sum_ = zlib.crc32(part, sum_)
    return b"".join([_HEAD.pack(_MAGIC, sum(map(len, parts)), sum_, entry.digest), *parts])


def unpacked(name: str, entry: Entry, value: Bytes, size: int, sealing: Sealing) -> Bytes:
    """The block of so many bytes in a value. Raises StoreError if it is not that."""
    view = memoryview(value)
    if len(view) != _HEAD.size + size + sealing.overhead:
        raise StoreError(f"it has {len(view)} bytes instead of {_HEAD.size + size + sealing.overhead}")
    magic, length, sum_, digest = _HEAD.unpack_from(view)
    body = view[_HEAD.size :]
    if (magic, length, digest) != (_MAGIC, len(body), entry.digest):
        raise StoreError("there is another block under its name")
    if zlib.crc32(body, zlib.crc32(name.encode())) != sum_:
        raise StoreError("it is damaged")
    try:
        return sealing.unseal(body, name.encode())
    except ValueError as error:
        raise StoreError(str(error)) from None
