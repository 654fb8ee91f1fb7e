"""A file of places of equal size a group, in each of which a copy of a block may lie.

A place begins with a head of 64 bytes: a magic, the length of what follows, its CRC-32 that begins with the entry's
digest, and that digest. So a copy that was written halfway, damaged, or is another block's than the index says is
never taken for what it is not.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import get_ident
from typing import Final

from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.pieces import Bytes
from penstock.transfer.sealing import PLAIN, Sealing
from penstock.transfer.store import GivenUp, StoreError, always

MAGIC: Final = b"PNSTKV01"
_HEAD: Final = struct.Struct("<8sQI16s28x")
_PAGE: Final = 4096
_REST_S: Final = 30.0
_WRITTEN: Final = os.O_RDWR | os.O_CREAT
_MOST_PARTS: Final = 512  # buffers of one system call


def place_bytes(size: int) -> int:
    """What so many bytes of a block take on disk."""
    return -(-(size + _HEAD.size) // _PAGE) * _PAGE


class Rest:
    """Nothing is written for a while after a write that failed: most likely the disk is full."""

    def __init__(self) -> None:
        self._until = 0.0

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises StoreError while it rests; an OSError within begins a rest."""
        if time.monotonic() < self._until:
            raise StoreError("the disk was full a moment ago")
        try:
            yield
        except OSError:
            self._until = time.monotonic() + _REST_S
            raise


class PlacesFile:
    """Reads and writes copies. Called by several threads, but for no place by two at once."""

    def __init__(
        self,
        path: Path,
        sizes: Sequence[int],
        places: Sequence[range],
        *,
        read_only: bool = False,
        sealing: Sealing = PLAIN,
    ) -> None:
        """Opens it, and makes it where it is not there, unless `read_only`. Raises OSError.

        Args:
            path: where it is.
            sizes: bytes of a block, by group.
            places: their numbers, by group.
            read_only: nothing is written.
            sealing: how blocks are written.
        """
        self._sizes, self._ranges = tuple(size + sealing.overhead for size in sizes), tuple(places)
        self._sealing = sealing
        self._buffers: dict[int, dict[int, bytearray]] = {}  # by thread and size
        # One place of each group after the other, then the next of each: with more room all stay where they are.
        self._starts = list(accumulate(map(place_bytes, self._sizes), initial=0))
        end = self._starts[-1] * max(map(len, places), default=0)
        how = os.O_RDONLY | os.O_NONBLOCK if read_only else _WRITTEN
        self._file = os.open(path, how | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not read_only and os.fstat(self._file).st_size > end:  # of an engine that was given more room
            os.ftruncate(self._file, end)

    def has(self, place: int, group: int) -> bool:
        """Whether this is a place of a group."""
        return 0 <= group < len(self._ranges) and place in self._ranges[group]

    def holds(self, place: int, entry: Entry) -> bool:
        """Whether a copy of this is at a place, by its head alone: it may be damaged."""
        if not self.has(place, entry.group):
            return False
        try:
            head = os.pread(self._file, _HEAD.size, self._place(entry.group, place))
        except OSError:
            return False
        if len(head) < _HEAD.size:
            return False
        magic, length, _, digest = _HEAD.unpack(head)
        return (magic, length, digest) == (MAGIC, self._sizes[entry.group], entry.digest)

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        """Keeps a block, if `settled` says after its sum was made that its bytes were nobody else's meanwhile.

        Raises:
            StoreError, GivenUp, OSError: it has another size; it was given up; it cannot be written.
        """
        parts = self._sealing.seal(list(parts), _name(entry))
        length, sum_ = 0, zlib.crc32(entry.digest)
        for part in parts:
            length += len(part)
            sum_ = zlib.crc32(part, sum_)
        if length != self._sizes[entry.group]:
            raise StoreError(f"it has {length} bytes instead of {self._sizes[entry.group]}")
        if not settled():  # what changes from here on, the sum tells
            raise GivenUp
        start = self._place(entry.group, place)
        head = _HEAD.pack(MAGIC, length, sum_, entry.digest)
        buffers: list[Bytes] = [head, *parts]
        for first in range(0, len(buffers), _MOST_PARTS):
            start = self._write(buffers[first : first + _MOST_PARTS], start)

    def _write(self, buffers: list[Bytes], start: int) -> int:
        views = [memoryview(one).cast("B") for one in buffers]
        while views:
            count = os.pwritev(self._file, views, start)
            start += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views and count:
                views[0] = views[0][count:]
        return start

    def read(self, place: int, entry: Entry) -> Bytes:
        """What was written, valid until this thread reads again. Raises StoreError if it is not that, OSError."""
        size = self._sizes[entry.group]
        data = self._buffer(_HEAD.size + size)
        view, start = memoryview(data), self._place(entry.group, place)
        done = 0
        while done < len(data):
            count = os.preadv(self._file, [view[done:]], start + done)
            if not count:
                raise StoreError("its file is too short")
            done += count
        magic, length, sum_, digest = _HEAD.unpack_from(data)
        if (magic, length, digest) != (MAGIC, size, entry.digest):
            raise StoreError("there is another block at its place")
        body = view[_HEAD.size :]
        if zlib.crc32(body, zlib.crc32(digest)) != sum_:
            raise StoreError("it is damaged")
        try:
            return self._sealing.unseal(body, _name(entry))
        except ValueError as error:
            raise StoreError(str(error)) from None

    def _buffer(self, size: int) -> bytearray:
        """This thread's own, since fresh memory takes as long as reading into it."""
        buffers = self._buffers.setdefault(get_ident(), {})
        if size not in buffers:
            buffers[size] = bytearray(size)
        return buffers[size]

    @property
    def length(self) -> int:
        """Bytes of the file. Raises OSError."""
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Nothing is read or written any more."""
        os.close(self._file)

    def _place(self, group: int, place: int) -> int:
        return self._ranges[group].index(place) * self._starts[-1] + self._starts[group]


def _name(entry: Entry) -> bytes:
    return entry.digest + entry.group.to_bytes(4, "little")
