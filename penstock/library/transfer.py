"""Loads a file in ranges, several at once; goes on where a killed process stopped; gives it its name once it is right.

Beside the file under way (`NAME.partial`) lies its ledger (`NAME.parts`), which is mapped into memory: how far each
part has come. Bytes are written before they are counted, and what was counted survives the process, so that after a
kill no more than what was on its way is loaded again. What survives a power cut is settled by the digest.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx2

from penstock.config.errors import CheckpointError
from penstock.config.limits import DOWNLOAD_STREAMS, MAX_MODEL_FILE_BYTES, PART_BYTES
from penstock.library.digests import Digest, matches
from penstock.library.files import check_room, disk_error, locked
from penstock.library.web import Web, WebError, content_range, pause_before

_HEADER: Final = 4096
_COUNTER: Final = struct.Struct("<Q")
_PIECE: Final = 256 << 10
_SIZE: Final = re.compile(r"[0-9]{1,18}")
_ATTEMPTS: Final = 6  # in a row without a byte

Told = Callable[[int], None]
"""Gets the bytes that are there more."""
Renew = Callable[[Mapping[str, str], str], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Source:
    """A file on a server.

    Attributes:
        url: where.
        size: bytes.
        digest: what its bytes hash to; None where nobody says, then `version` tells whether it is still the same file.
        headers: of the request, credentials among them.
        version: the server's ETag.
        ranges: the server gives parts.
        renew: gives headers anew, from those that were refused and the challenge that came (401).
    """

    url: str
    size: int
    digest: Digest | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    version: str = ""
    ranges: bool = True
    renew: Renew | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Manner:
    """How files are loaded.

    Attributes:
        streams: ranges that are under way at once.
        part: bytes of a range.
        told: progress.
        say: a sentence for the person.
        partials: where parts lie meanwhile, on the disk of their files; beside them if None.
        locks: where locks lie; beside the parts if None.
    """

    streams: int = DOWNLOAD_STREAMS
    part: int = PART_BYTES
    told: Told = lambda count: None
    say: Callable[[str], None] = lambda line: None
    partials: Path | None = None
    locks: Path | None = None

    def partial_of(self, target: Path) -> Path:
        """Where the bytes of a file lie until it is complete."""
        return (self.partials or target.parent) / f"{target.name}.partial"


class _NoRangesError(Exception):
    """The server sends the whole file whatever is asked for; `done` bytes are to be loaded again."""

    def __init__(self, done: int) -> None:
        super().__init__()
        self.done = done


def probe(web: Web, url: str, headers: Mapping[str, str]) -> Source:
    """What a server says of a file: its size, its version, whether it gives parts of it.

    Raises:
        WebError: it refuses, or does not tell the size.
    """

    def once() -> Source:
        with web.stream(url, {**headers, "Range": "bytes=0-0"}) as response:
            found = content_range(response)
            if found is not None and found[2] and found[2] <= MAX_MODEL_FILE_BYTES:
                return Source(url, found[2], None, headers, response.headers.get("etag", ""))
            size = response.headers.get("content-length", "")
            if response.status_code == 200 and _SIZE.fullmatch(size) and int(size) <= MAX_MODEL_FILE_BYTES:
                return Source(url, int(size), None, headers, response.headers.get("etag", ""), ranges=False)
            raise WebError(f"{url} does not tell how large it is, so that nobody could tell whether it came whole.")

    return web.again(once)


def fetch(web: Web, source: Source, target: Path, manner: Manner) -> None:
    """Loads a file to `target`, unless it is there.

    Args:
        web: the way to the server.
        source: the file.
        target: where it gets its name, in a folder that only the caller names.
        manner: streams, progress, where its parts lie.

    Raises:
        WebError: the server refuses, or breaks off again and again; what came is kept.
        CheckpointError: the bytes are not those that were promised; they are removed.
        ConfigError: the disk is full, or cannot be written; what came is kept.
    """
    if target.exists():
        manner.told(source.size)
        return
    partial = manner.partial_of(target)
    lock = (manner.locks or partial.parent) / f"{target.name}.lock"
    try:
        for path in (target.parent, partial.parent):
            path.mkdir(parents=True, exist_ok=True)
        waiting = lambda: manner.say(f"Another process loads {target.name}; waiting for it.")  # noqa: E731
        with locked(partial, waiting, lock, lambda: manner.told(0)):
            if target.exists():  # the other one brought it
                manner.told(source.size)
                return
            _load(web, source, partial, manner)
            if source.digest is not None and not matches(partial, source.digest):
                _drop(partial)
                raise CheckpointError(
                    f"{target.name} came with other bytes than its digest {source.digest} promises, and was removed. "
                    "Give the command again; if that does not help, the server's file is damaged."
                )
            partial.replace(target)
            _drop(partial)
    except OSError as error:
        raise disk_error(error, partial) from error


def fetch_beginning(web: Web, source: Source, target: Path, manner: Manner, parts: int) -> Path:
    """Loads the first parts of a file, where `fetch` will go on; gives the file under way, or `target` if it is whole.

    Raises:
        as `fetch`
    """
    partial = manner.partial_of(target)
    try:
        if target.exists():
            return target
        partial.parent.mkdir(parents=True, exist_ok=True)
        lock = (manner.locks or partial.parent) / f"{target.name}.lock"
        with locked(partial, lock=lock, looking=lambda: manner.told(0)):
            if target.exists():
                return target
            with _opened(partial, source, manner.part, parts) as (handle, ledger):
                _Loading(web, source, handle, ledger, lambda count: None).run(manner.streams, parts)
            return partial
    except OSError as error:
        raise disk_error(error, partial) from error


def give_up(target: Path, manner: Manner, parts: int) -> None:
    """Removes a file of which no more than its first parts have come; of more, somebody wanted all."""
    partial = manner.partial_of(target)
    with suppress(OSError), locked(partial, lock=(manner.locks or partial.parent) / f"{target.name}.lock"):
        if partial.stat().st_blocks * 512 <= (parts + 1) * manner.part:
            _drop(partial)


def _drop(partial: Path) -> None:
    for path in (partial, partial.with_suffix(".parts")):
        path.unlink(missing_ok=True)


class _Ledger:
    """How far each part of a file has come; shared by threads, each of which writes its own counter."""

    def __init__(self, counters: mmap.mmap, size: int, part: int) -> None:
        self._counters = counters
        self.size = size
        self.part = part
        self.count = max(1, -(-size // part))

    def done(self, index: int) -> int:
        found: int = _COUNTER.unpack_from(self._counters, _HEADER + 8 * index)[0]
        return min(found, self.length(index))

    def length(self, index: int) -> int:
        """Bytes of a part."""
        return min(self.part, self.size - index * self.part)

    def count_to(self, index: int, done: int) -> None:
        _COUNTER.pack_into(self._counters, _HEADER + 8 * index, done)

    @property
    def total(self) -> int:
        return sum(map(self.done, range(self.count)))


@contextmanager
def _opened(partial: Path, source: Source, part: int, parts: int | None = None) -> Iterator[tuple[int, _Ledger]]:
    """The file under way and its ledger; both begin anew if they are of another file. `parts` are to be loaded of it,
    or all: there must be room for them.
    """
    path = partial.with_suffix(".parts")
    about = {"size": source.size, "digest": str(source.digest or ""), "version": source.version}
    if source.digest is None:
        about["url"] = source.url
    kept = _kept_part(path, about) if source.ranges and partial.is_file() and not partial.is_symlink() else None
    if kept is None:
        _drop(partial)
        kept = part if source.ranges else max(1, source.size)
        count = max(1, -(-source.size // kept))
        text = json.dumps({**about, "part": kept}).encode()
        # Written out, not left sparse: a page of a map without room on the disk would end the process.
        path.write_bytes(text.ljust(_HEADER, b" ") + bytes(_COUNTER.size * count))
    handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.ftruncate(handle, source.size)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as counters:
            ledger = _Ledger(counters, source.size, kept)
            wanted = source.size if parts is None else min(source.size, parts * kept)
            check_room(partial.parent, max(0, wanted - ledger.total), partial.stem)
            yield handle, ledger
    finally:
        os.close(handle)


def _kept_part(path: Path, about: Mapping[str, Any]) -> int | None:
    """Bytes of a part in a ledger that is of the same file; None if there is no such ledger."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        data = path.read_bytes()
        found = json.loads(data[:_HEADER])
        part = found.pop("part")
        if found == about and type(part) is int and part > 0:
            count = max(1, -(-about["size"] // part))
            return part if len(data) == _HEADER + _COUNTER.size * count else None
    return None


def _load(web: Web, source: Source, partial: Path, manner: Manner) -> None:
    """Brings all bytes of a file to the disk."""
    try:
        with _opened(partial, source, manner.part) as (handle, ledger):
            manner.told(ledger.total)
            _Loading(web, source, handle, ledger, manner.told).run(manner.streams)
            os.fsync(handle)
    except _NoRangesError as refused:
        manner.told(-refused.done)
        _load(web, replace(source, ranges=False), partial, manner)


class _Loading:
    """The parts of one file, by several threads."""

    def __init__(self, web: Web, source: Source, handle: int, ledger: _Ledger, told: Told) -> None:
        self._web = web
        self._source = source
        self._handle = handle
        self._ledger = ledger
        self._told = told
        self._stop = threading.Event()

    def run(self, streams: int, first: int | None = None) -> None:
        """Loads what is missing, of the `first` parts or of all; the first failure stops all."""
        ledger = self._ledger
        parts = range(ledger.count if first is None else min(first, ledger.count))
        missing = [index for index in parts if ledger.done(index) < ledger.length(index)]
        if not missing:
            return
        with ThreadPoolExecutor(min(streams, len(missing)), "penstock-load") as pool:
            futures = [pool.submit(self._part, index) for index in missing]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _part(self, index: int) -> None:
        ledger = self._ledger
        attempt, mark = 0, ledger.done(index)
        renewed = False
        while ledger.done(index) < ledger.length(index) and not self._stop.is_set():
            source = self._source
            try:
                self._range(source, index)
            except WebError as error:
                if error.status == 401 and source.renew is not None and not renewed:
                    self._source = replace(source, headers=source.renew(source.headers, error.challenge))
                    renewed = True
                    continue
                gained = ledger.done(index) - mark >= _PIECE
                attempt, mark = (0, ledger.done(index)) if gained else (attempt + 1, mark)
                if not error.passing or attempt >= _ATTEMPTS:
                    raise
                self._web.pause(max(error.wait, pause_before(attempt)))

    def _range(self, source: Source, index: int) -> None:
        """Asks for what is missing of a part, and writes what comes."""
        ledger = self._ledger
        done, length = ledger.done(index), ledger.length(index)
        headers, first = dict(source.headers), index * ledger.part + done
        if source.ranges:
            headers["Range"] = f"bytes={first}-{first + length - done - 1}"
            if source.digest is None and source.version.startswith('"'):
                headers["If-Range"] = source.version
        elif done:
            self._told(-done)
            ledger.count_to(index, 0)
            done = first = 0
        with self._web.stream(source.url, headers) as response:
            if source.ranges:
                self._check(response, first, first + length - done - 1)
            for piece in response.iter_raw():
                if self._stop.is_set():
                    return
                if done + len(piece) > length:
                    raise WebError(f"{source.url} sends more bytes than the {source.size} it stated.")
                self._write(piece, index * ledger.part + done)
                done += len(piece)
                ledger.count_to(index, done)
                self._told(len(piece))
        if done < length:
            raise WebError(f"{source.url} ended early.", passing=True)

    def _check(self, response: httpx2.Response, first: int, last: int) -> None:
        """Whether an answer holds the bytes that were asked for."""
        source, found = self._source, content_range(response)
        if found is None and response.status_code == 200:
            if source.digest is None and source.version != response.headers.get("etag", ""):
                raise CheckpointError(f"{source.url} has changed while it was loaded; give the command again.")
            if (first, last) == (0, source.size - 1):  # all that was asked for
                return
            raise _NoRangesError(self._ledger.total)
        if found is None or found[0] != first or found[1] > last or found[2] not in (None, source.size):
            told = response.headers.get("content-range", "none")[:60]
            raise WebError(
                f"{source.url} was asked for bytes {first} to {last} of {source.size} and sent others ({told})."
            )

    def _write(self, piece: bytes, offset: int) -> None:
        view = memoryview(piece)
        while view:
            count = os.pwrite(self._handle, view, offset)
            view, offset = view[count:], offset + count


def fetch_all(web: Web, files: Sequence[tuple[Source, Path]], manner: Manner) -> None:
    """Loads several files: small ones side by side, then large ones, each in ranges side by side.

    Raises:
        as `fetch`
    """
    missing = [(source, target) for source, target in files if not target.exists()]
    if missing:
        left = sum(source.size - held(source, manner.partial_of(target)) for source, target in missing)
        check_room(manner.partial_of(missing[0][1]).parent, left, "this model")
    small = [pair for pair in files if pair[0].size <= manner.part]
    single = replace(manner, streams=1)
    if small:
        with ThreadPoolExecutor(manner.streams, "penstock-small") as pool:
            futures = [pool.submit(fetch, web, source, target, single) for source, target in small]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    for source, target in files:
        if source.size > manner.part:
            fetch(web, source, target, manner)


def held(source: Source, partial: Path) -> int:
    """Bytes of a file under way that are on the disk already."""
    try:
        return min(source.size, partial.stat().st_blocks * 512)
    except OSError:
        return 0
