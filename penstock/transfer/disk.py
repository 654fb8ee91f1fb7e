"""Copies of blocks in a folder: a file of places of equal size a group, and an index beside it.

A place begins with a head of 64 bytes: a magic, the length of what follows, its CRC-32 that begins with the entry's
digest, and that digest. So a copy that was written halfway, damaged, or is another block's than the index says is
never taken for what it is not. Nothing waits for the disk: what a crash loses is computed again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Final

from penstock.config.errors import ConfigError
from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.index import Index
from penstock.transfer.pieces import Bytes
from penstock.transfer.store import Described, GivenUp, StoreError, always

MAGIC: Final = b"PNSTKV01"
_HEAD: Final = struct.Struct("<8sQI16s28x")
_PAGE: Final = 4096
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_PARTS: Final = 512  # buffers of one system call
_LOCK_S: Final = 5.0  # an engine that ends may have the folder so long
_TRIED_EVERY_S: Final = 0.05
_PAUSE_S: Final = 30.0  # without writing, where the disk is full


def place_bytes(size: int) -> int:
    """What a block of so many bytes takes on disk."""
    return -(-(size + _HEAD.size) // _PAGE) * _PAGE


class DiskStore(Described):
    """A folder of copies, which one process has at a time."""

    def __init__(self, folder: Path, sizes: Sequence[int], places: Sequence[range]) -> None:
        """Opens it, and makes it where it is not there.

        Args:
            folder: theirs alone: only this user may enter.
            sizes: bytes of a block, by group.
            places: their numbers, by group.

        Raises:
            ConfigError: it cannot be made or written, or another process has it.
        """
        super().__init__()
        self._sizes = tuple(sizes)
        self._paused_until = 0.0
        self._buffers: dict[int, dict[int, bytearray]] = {}  # by thread and size
        self._starts: list[tuple[int, int]] = []  # by group, the first byte and the bytes of a place
        start = 0
        for size, numbers in zip(sizes, places, strict=True):
            self._starts.append((start - numbers.start * place_bytes(size), place_bytes(size)))
            start += len(numbers) * place_bytes(size)
        self._ranges = tuple(places)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            self._lock = _locked(folder / "lock", _LOCK_S)
            try:
                self._index, self._file = Index(folder / "index"), _opened(folder / "blocks", start)
            except BaseException:
                os.close(self._lock)  # else this process could not try again
                raise
            os.utime(folder)
        except OSError as error:
            raise ConfigError(f"--kv-disk cannot keep blocks in {folder}: {error.strerror or error}.") from None

    def found(self) -> Iterator[tuple[int, Entry]]:
        """What is there from before, as far as it can be a block of this layout."""
        for place, entry in self._index.entries.items():
            if 0 <= entry.group < len(self._ranges) and place in self._ranges[entry.group]:
                self.describe(place, entry)
                yield place, entry
            else:
                self._index.drop(place)

    def forget(self, place: int) -> None:
        super().forget(place)
        self._index.drop(place)  # it may never be written: what is at the place later has another digest

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        if time.monotonic() < self._paused_until:
            raise StoreError("the disk was full a moment ago")
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
        try:
            for first in range(0, len(buffers), _MOST_PARTS):
                start = self._write(buffers[first : first + _MOST_PARTS], start)
            self._index.put(place, entry)
        except OSError:
            self._paused_until = time.monotonic() + _PAUSE_S
            raise

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
        return body

    def _buffer(self, size: int) -> bytearray:
        """This thread's own, since fresh memory takes as long as reading into it."""
        buffers = self._buffers.setdefault(get_ident(), {})
        if size not in buffers:
            buffers[size] = bytearray(size)
        return buffers[size]

    def close(self) -> None:
        self._index.close()
        os.close(self._file)
        os.close(self._lock)

    def _place(self, group: int, place: int) -> int:
        first, size = self._starts[group]
        return first + place * size


def _opened(path: Path, most: int) -> int:
    """The file of blocks, which has so many bytes at most: it may be of an engine that was given more room."""
    handle = os.open(path, _FLAGS, 0o600)
    if os.fstat(handle).st_size > most:
        os.ftruncate(handle, most)
    return handle


def _locked(path: Path, patience: float = 0.0) -> int:
    """A lock that the system takes back from the dead, and that those who are dying have for some seconds yet."""
    handle = os.open(path, _FLAGS, 0o600)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() < until:
                time.sleep(_TRIED_EVERY_S)
                continue
            os.close(handle)
            raise ConfigError(
                f"--kv-disk: another engine keeps blocks in {path.parent}; give each a folder of its own "
                "(--kv-disk-path)."
            ) from None


def remove_others(folder: Path, stem: str) -> list[Path]:
    """Removes the folders beside `folder` that begin with `stem`, of other versions of a model, if nobody has them."""
    removed = []
    for other in folder.parent.glob(f"{stem}-????????????????"):
        if other == folder or not other.is_dir():
            continue
        try:
            os.close(_locked(other / "lock"))
        except (ConfigError, OSError):
            continue
        shutil.rmtree(other, ignore_errors=True)
        removed.append(other)
    return removed
