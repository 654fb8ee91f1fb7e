"""What lies in which place of a folder of copies: a journal of lines, each with its checksum.

A line is a CRC-32 in eight hexadecimal digits and a JSON list: of a place alone where it was given up, else of place,
group, digest, parent, space, owner and tokens. The last one of a place counts; lines that are damaged are left out.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry

MOST_BYTES: Final = 1 << 30
_MOST_LINE: Final = 1 << 20
_SPARE_LINES: Final = 4096  # more than entries there may be before the journal is written anew

Seal = Callable[[bytes], bytes]


def _plain(data: bytes) -> bytes:
    return data


class Index:
    """A journal in a file, which is read once and then appended to.

    Attributes:
        damaged: lines that could not be used.
    """

    def __init__(self, path: Path, seal: Seal = _plain, unseal: Seal = _plain) -> None:
        """`seal` makes bytes without line breaks of a line's text, `unseal` the other way round, ValueError if it is
        not its own.
        """
        self._path = path
        self._seal = seal
        self._lock = Lock()
        self._lines = 0
        self._given_up: set[int] = set()  # places, whose lines are written before the next
        self._entries, self.damaged = read_entries(path, unseal)
        self._file: Any = None
        try:
            self._write_anew()
        except OSError:  # a full disk: the old one is gone on with
            self._open()

    @property
    def entries(self) -> dict[int, Entry]:
        """What is written of places."""
        return {place: entry for place, entry in self._entries.items() if place not in self._given_up}

    def put(self, place: int, entry: Entry) -> None:
        """A place has a whole copy of this now. Raises OSError."""
        with self._lock:
            self._write_given_up()
            self._entries.pop(place, None)  # what was written last stands last
            self._entries[place] = entry
            self._append(_record(place, entry))

    def drop(self, place: int) -> None:
        """A place has none any more. Waits for nothing: it is written by `write_given_up`, or with the next put."""
        self._given_up.add(place)

    def write_given_up(self) -> None:
        """Writes which places were dropped, unless it has ended. Raises OSError."""
        with self._lock:
            if not self._file.closed:
                self._write_given_up()

    def close(self) -> None:
        """Ends it. What cannot be written any more is left out."""
        with self._lock:
            with suppress(OSError):
                self._write_given_up()
            self._file.close()

    def _write_given_up(self) -> None:
        while self._given_up:
            place = self._given_up.pop()
            if self._entries.pop(place, None) is not None:
                self._append([place])

    def _append(self, record: Sequence[Any]) -> None:
        if self._lines > 2 * len(self._entries) + _SPARE_LINES:
            self._lines = len(self._entries)  # where it fails, it is tried again after as many lines
            with suppress(OSError):
                self._write_anew()
        self._file.write(self._line(record))
        self._lines += 1

    def _line(self, record: Sequence[Any]) -> bytes:
        text = self._seal(json.dumps(record, separators=(",", ":")).encode())
        return b"%08x " % zlib.crc32(text) + text + b"\n"

    def _write_anew(self) -> None:
        """Writes what counts alone; whatever happens meanwhile, the file is whole."""
        fresh = self._path.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
                for place, entry in self._entries.items():
                    file.write(self._line(_record(place, entry)))
            os.replace(fresh, self._path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._open()

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.fdopen(os.open(self._path, flags, 0o600), "wb", buffering=0)
        self._lines = len(self._entries)


def read_entries(path: Path, unseal: Seal = _plain) -> tuple[dict[int, Entry], int]:
    """What a journal says of places, and how many of its lines could not be used; the file stays as it is.

    Raises:
        OSError: it is there and cannot be read.
    """
    entries: dict[int, Entry] = {}
    damaged = 0
    try:  # without waiting for a writer, if it is a pipe
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        return entries, damaged
    with file:
        for line in _lines(file):
            try:
                _take(line, unseal, entries)
            except (ValueError, TypeError, RecursionError):
                damaged += 1
    return entries, damaged


def _take(line: bytes, unseal: Seal, entries: dict[int, Entry]) -> None:
    sum_, space, text = line.rstrip(b"\n").partition(b" ")
    if not space or int(sum_, 16) != zlib.crc32(text):
        raise ValueError("its checksum is another")
    place, *rest = json.loads(unseal(text))
    if type(place) is not int:
        raise ValueError("a place is a number")
    if not rest:
        entries.pop(place, None)
        return
    entry = _entry(*rest)
    entries.pop(place, None)
    entries[place] = entry


def _record(place: int, entry: Entry) -> list[Any]:
    space, owner = entry.namespace
    return [place, entry.group, entry.digest.hex(), entry.parent.hex(), space, owner, entry.key]


def _entry(group: Any, digest: Any, parent: Any, space: Any, owner: Any, key: Any) -> Entry:
    """Raises ValueError or TypeError for values of other types."""
    if type(group) is not int or not (isinstance(key, list) and all(type(token) is int for token in key)):
        raise ValueError("a group is a number, and so are tokens")
    namespace = Namespace(_hashable(space), _hashable(owner))
    return Entry(group, bytes.fromhex(digest), bytes.fromhex(parent), namespace, tuple(key))


def _lines(file: Any) -> Iterator[bytes]:
    """Lines of bounded length, of a file of which only so much is looked at."""
    left = MOST_BYTES
    while left > 0 and (line := file.readline(_MOST_LINE)):
        left -= len(line)
        yield line


def _hashable(value: Any) -> Any:
    """A namespace's part as it was before JSON: lists were tuples."""
    if isinstance(value, list):
        return tuple(_hashable(one) for one in value)
    if value is None or isinstance(value, str):
        return value
    raise ValueError("a namespace is made of texts")
