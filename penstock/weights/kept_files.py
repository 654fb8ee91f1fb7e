"""What is kept of models for their next starts, as files of one folder: listed, removed, and held to a size.

Of a model there are packed weights, a kept start and a kept vocabulary, with their notes that they were checked
(`weights.pack_cache`). Whoever maps or writes such a file holds a lock on it; what is locked is never removed.
"""

from __future__ import annotations

import fcntl
import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.machine import free_bytes
from penstock.weights.pack_cache import model_of

log = logging.getLogger(__name__)
_OURS: Final = re.compile(r"-[0-9a-f]{16}(?=\.(?:packed|text)(?:\.|\Z))")


@dataclass(frozen=True, slots=True)
class KeptModel:
    """What is kept of one model.

    Attributes:
        name: as it was served, and how it was quantised.
        bytes: of all its files.
        used: when a start last used them, seconds since 1970.
        files: theirs.
    """

    name: str
    bytes: int
    used: float
    files: tuple[Path, ...]

    @property
    def model(self) -> str:
        """Where the model lies, which is read from its files; "" if that was not written down."""
        whole = (file for file in self.files if file.suffix not in (".checked", ".partial"))
        return next(filter(None, map(model_of, whole)), "")


def kept_models(folder: Path) -> list[KeptModel]:
    """All of a folder, the least recently used first. Raises OSError if it cannot be read."""
    stems = dict[str, list[Path]]()
    for stem, file in _files(folder):
        stems.setdefault(stem, []).append(file)
    found = (_kept(stem, sorted(files)) for stem, files in stems.items())
    return sorted(filter(None, found), key=lambda kept: (kept.used, kept.name))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """What is ours of a folder, each with what all files of its model begin with."""
    for file in folder.iterdir() if folder.is_dir() else ():
        if (match := _OURS.search(file.name)) is not None:
            yield file.name[: match.end()], file


def _kept(stem: str, files: list[Path]) -> KeptModel | None:
    """None where all has gone meanwhile."""
    size, used = 0, 0.0
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            size += stat.st_size
            used = max(used, stat.st_mtime)
    return KeptModel(stem[:-17], size, used, tuple(files)) if used else None


def in_use(kept: KeptModel) -> bool:
    """Whether a running engine maps one of its files, or a start writes one."""
    with ExitStack() as locks:
        return not _locked(kept.files, locks)


def remove(kept: KeptModel) -> bool:
    """Removes what is kept of a model; False, and nothing is removed, if it is in use.

    Raises:
        OSError: the folder cannot be written to.
    """
    with ExitStack() as locks:
        if not _locked(kept.files, locks):
            return False
        for file in kept.files:
            file.unlink(missing_ok=True)
    return True


def _locked(files: tuple[Path, ...], locks: ExitStack) -> bool:
    """Takes the locks of all files; False if somebody has one, or if that cannot be known."""
    for file in files:
        try:
            handle = locks.enter_context(file.open("r+b"))  # network file systems lock what is open for writing
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True


def most_bytes(folder: Path, most: int | None) -> int:
    """How large a folder may become: `most`, or half of what would be free on its disk without it."""
    if most is not None:
        return most
    return (free_bytes(folder) + sum(kept.bytes for kept in _readable(folder))) // 2


def trim(folder: Path, most: int) -> list[KeptModel]:
    """Removes what was used least recently until no more than `most` bytes are kept; what is in use stays.

    Returns:
        What was removed.
    """
    with suppress(OSError):
        for partial in [file for _, file in _files(folder) if file.suffix == ".partial"]:
            with ExitStack() as locks, suppress(OSError):  # of writers that died: the living hold a lock
                if _locked((partial,), locks):
                    partial.unlink()
    there = _readable(folder)
    size = sum(kept.bytes for kept in there)
    removed = list[KeptModel]()
    for kept in there:
        if size <= most:
            break
        with suppress(OSError):
            if remove(kept):
                size -= kept.bytes
                removed.append(kept)
    if removed:
        names = ", ".join(kept.name for kept in removed)
        log.info("no longer kept for faster starts, for want of room (--pack-cache-size): %s", names)
    return removed


def _readable(folder: Path) -> list[KeptModel]:
    try:
        return kept_models(folder)
    except OSError:
        return []
