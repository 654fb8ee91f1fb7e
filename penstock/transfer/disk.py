"""Copies of blocks in a folder: a file of places (`transfer.places`), an index beside it, and what the folder is.

Nothing waits for the disk: what a crash loses is computed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Final

from penstock.config.errors import ConfigError
from penstock.core.policies.bounded_tier import Entry
from penstock.transfer.folder import (
    BLOCKS,
    INDEX,
    LOCK,
    About,
    lock,
    read_about,
    remove_files,
    size_and_use,
    try_lock,
    write_about,
)
from penstock.transfer.index import Index
from penstock.transfer.pieces import Bytes
from penstock.transfer.places import PlacesFile, Rest
from penstock.transfer.sealing import PLAIN, Sealing
from penstock.transfer.store import Described, always

_GIVEN_UP_S: Final = 0.5  # until the index says what is not wanted any more
_LOCK_S: Final = 5.0  # an engine that ends may have the folder so long


class DiskStore(Described):
    """A folder of copies, which one process has at a time."""

    def __init__(
        self,
        folder: Path,
        sizes: Sequence[int],
        places: Sequence[range],
        *,
        model: str = "",
        block_size: int = 0,
        sealing: Sealing = PLAIN,
        shares: Sequence[Sequence[int]] = (),
    ) -> None:
        """Opens it, and makes it where it is not there.

        Args:
            folder: theirs alone: only this user may enter.
            sizes: bytes of a block, by group.
            places: their numbers, by group.
            model, block_size: whose blocks they are, and of how many tokens; only told to those who list folders.
            sealing: how all that tells of prompts is written.
            shares: bytes that each further rank keeps of a block, by group, in a file of its own.

        Raises:
            ConfigError: it cannot be made or written, or another process has it.
        """
        super().__init__()
        self._folder = folder
        self._rest = Rest()
        self._later: Timer | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            self._lock = lock(folder / LOCK, _LOCK_S)
            try:
                self._index = Index(folder / INDEX, sealing.seal_line, sealing.unseal_line)
                self._file = PlacesFile(folder / BLOCKS, sizes, places, sealing=sealing)
                with suppress(OSError):  # a full disk: what was told before stays
                    others = tuple(map(tuple, shares))
                    about = About(model, block_size, tuple(sizes), tuple(places), time.time(), sealing.key_id, others)
                    write_about(folder, about)
            except BaseException:
                os.close(self._lock)  # else this process could not try again
                raise
        except OSError as error:
            raise ConfigError(f"--kv-disk cannot keep blocks in {folder}: {error.strerror or error}.") from None

    def found(self) -> Iterator[tuple[int, Entry]]:
        """What is there from before, as far as it can be a block of this layout."""
        for place, entry in self._index.entries.items():
            if self._file.has(place, entry.group):
                self.describe(place, entry)
                yield place, entry
            else:
                self._index.drop(place)

    def forget(self, place: int) -> None:
        super().forget(place)
        self._index.drop(place)
        if self._later is None:  # a crash would bring it back
            self._later = Timer(_GIVEN_UP_S, self._write_given_up)
            self._later.daemon = True
            self._later.start()

    def _write_given_up(self) -> None:
        self._later = None
        with suppress(OSError):  # a full disk: what is at the place later has another digest
            self._index.write_given_up()

    def holds(self, place: int, entry: Entry) -> bool:
        """Whether a copy of this lies at a place, if it is whole."""
        return self._file.holds(place, entry)

    def write(self, place: int, entry: Entry, parts: Sequence[Bytes], settled: Callable[[], bool] = always) -> None:
        with self._rest.writing():
            self._file.write(place, entry, parts, settled)
            self._index.put(place, entry)

    def read(self, place: int, entry: Entry) -> Bytes:
        return self._file.read(place, entry)

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._index.close()
        self._file.close()
        with suppress(OSError):
            os.utime(self._folder)  # when it was used last
        os.close(self._lock)


def remove_others(folder: Path, stem: str, most: int, *, encrypted: bool = False) -> list[Path]:
    """Removes folders beside `folder` that begin with `stem`, of other versions of a model, if nobody has them.

    Those that were used last stay, as far as `most` bytes hold them all: whoever goes back to them finds them. Where
    this one is `encrypted`, none stays that can be read.

    Returns:
        Those that were removed. What in them is nobody's stays.
    """
    others = (other for other in folder.parent.glob(f"{stem}-????????????????") if other != folder and other.is_dir())
    found = [(size_and_use(other), other) for other in others]
    removed = []
    for (size, _), other in sorted(found, key=lambda one: one[0][1], reverse=True):
        about = read_about(other) if encrypted else None
        readable = encrypted and (about is None or not about.key_id)
        most -= size
        handle = try_lock(other, alone=True) if most < 0 or readable else None
        if handle is None:
            continue
        with suppress(OSError):  # held until they are gone, so that nobody takes them meanwhile
            remove_files(other)
        os.close(handle)
        removed.append(other)
    return removed
