"""A rank's share of the copies that several processes keep of a block: bytes alone, whose index the leading rank has.

What it is told of a copy is its place, its group and its digest. Whatever lies at the place instead, of another start
or written halfway, has another digest or another sum, and is told of as lost.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.config.errors import ConfigError
from penstock.core.kv.node import Namespace
from penstock.core.policies.bounded_tier import Entry
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.runtime.mover import Mover
from penstock.transfer.carrier import Carrier
from penstock.transfer.folder import LOCK, share_file
from penstock.transfer.pieces import Bytes
from penstock.transfer.places import PlacesFile, Rest
from penstock.transfer.sealing import PLAIN, Sealing
from penstock.transfer.store import Described, Store, always

_PATIENCE_S: Final = 5.0  # a rank that ends may have the file so long
_AGAIN_S: Final = 0.01


class ShareStore(Described):
    """A rank's file in a folder of copies, which one process has at a time."""

    def __init__(
        self, folder: Path, rank: str, sizes: Sequence[int], places: Sequence[range], sealing: Sealing = PLAIN
    ) -> None:
        """Opens it, and makes it where it is not there.

        Args:
            folder: theirs alone: only this user may enter.
            rank: `Ranks.name` of the rank.
            sizes: bytes that it keeps of a block, by group.
            places: their numbers, by group.
            sealing: how blocks are written.

        Raises:
            ConfigError: it cannot be made or written, or another process has it.
        """
        super().__init__()
        self._rest = Rest()
        path = folder / share_file(rank)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            # By its lock a folder is known as ours, also on a machine of which no rank leads.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(folder / LOCK, flags, 0o600))
            self._lock = os.open(path, flags, 0o600)
            try:
                _take(self._lock, path)
                self._file = PlacesFile(path, sizes, places, sealing=sealing)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise ConfigError(f"--kv-disk cannot keep blocks in {folder}: {error.strerror or error}.") from None

    def found(self) -> Iterator[tuple[int, Entry]]:
        return iter(())

    def holds(self, place: int, entry: Entry) -> bool:
        """Whether its copy of this lies at a place, if it is whole."""
        return self._file.holds(place, entry)

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        with self._rest.writing():
            self._file.write(place, entry, parts, settled)

    def read(self, place: int, entry: Entry) -> Bytes:
        return self._file.read(place, entry)

    def close(self) -> None:
        self._file.close()
        with suppress(OSError):
            os.close(self._lock)


def _take(handle: int, path: Path) -> None:
    """Raises ConfigError where somebody else has the file."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > until:
            raise ConfigError(f"--kv-disk: another process has {path}; give each engine a folder of its own.")
        time.sleep(_AGAIN_S)


class ShareMover(Mover):
    """Carries what it is told to; who told it hears of each end at once."""

    def __init__(self, carrier: Carrier, store: Store) -> None:
        self._carrier, self._store = carrier, store

    def start(self, op: CacheOp) -> None:
        if op.kind is CacheOpKind.FORGET:
            self._store.forget(op.place)
            return
        if op.kind is not CacheOpKind.CANCEL:
            self._store.describe(op.place, Entry(op.group, op.digest, b"", Namespace("", None), ()))
        self._carrier.start(op)

    def abort(self) -> None:
        self._carrier.abort()

    def close(self) -> None:
        self._carrier.close()
