"""A folder of copies: the names of its files, what it tells of itself, and the lock of who has it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import ConfigError
from penstock.config.ranks import MOST_RANKS

ABOUT: Final = "about.json"
BLOCKS: Final = "blocks"
INDEX: Final = "index"
LOCK: Final = "lock"
PINS: Final = "pins"
FRESH_PINS: Final = "pins.new"
_FRESH: Final = "about.new"
FILES: Final = (ABOUT, _FRESH, BLOCKS, INDEX, "index.new", PINS, FRESH_PINS, LOCK)
"""All that a folder of copies has; the lock last, since whoever removes the others holds it."""
_SHARE: Final = re.compile(r"blocks\.rank[1-7]of[2-8]")
_MOST_ABOUT: Final = 1 << 16
_MOST_GROUPS: Final = 256
_MOST_NUMBER: Final = 1 << 50
_MOST_BYTES: Final = 1 << 61
_LOOKED_AT_S: Final = 0.2  # a lock is waited for so long, since whoever lists folders tries it for a moment
_AGAIN_S: Final = 0.01


@dataclass(frozen=True, slots=True)
class About:
    """What a folder tells of itself.

    Attributes:
        model: as it was served.
        block_size: tokens of a block.
        sizes: bytes of a block, by cache group.
        places: their numbers, by group.
        opened: when an engine took it, seconds since 1970.
        key_id: of the key that it is encrypted with; "" for none.
        shares: bytes of a block that each further rank keeps, by group, in a file of its own.
    """

    model: str
    block_size: int
    sizes: tuple[int, ...]
    places: tuple[range, ...]
    opened: float = 0.0
    key_id: str = ""
    shares: tuple[tuple[int, ...], ...] = ()


def share_file(rank: str) -> str:
    """The file of a rank that does not lead, by the rank's name."""
    return f"{BLOCKS}.{rank}"


def share_files(folder: Path) -> list[str]:
    """Those there are. Raises OSError."""
    return sorted(file.name for file in folder.iterdir() if _SHARE.fullmatch(file.name))


def write_about(folder: Path, about: About) -> None:
    """Whatever happens meanwhile, the file is whole. Raises OSError."""
    told = {
        "model": about.model,
        "block_size": about.block_size,
        "sizes": about.sizes,
        "places": [[numbers.start, len(numbers), numbers.step] for numbers in about.places],
        "opened": about.opened,
        "key": about.key_id,
        "shares": about.shares,
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(folder / _FRESH, flags, 0o600), "wb") as file:
        file.write(json.dumps(told).encode())
    os.replace(folder / _FRESH, folder / ABOUT)


def read_about(folder: Path) -> About | None:
    """None where nothing is told, or nothing that can be so."""
    try:
        with os.fdopen(
            os.open(folder / ABOUT, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK), "rb"
        ) as file:
            return _about(json.loads(file.read(_MOST_ABOUT)))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _about(told: Any) -> About:
    """Raises ValueError, TypeError or KeyError for what is none."""
    model, opened = told["model"], told["opened"]
    sizes, places = told["sizes"], [tuple(one) for one in told["places"]]
    if not isinstance(model, str) or type(opened) not in (int, float):
        raise ValueError("a model has a name, and a time is a number")
    if not 0 < len(sizes) == len(places) <= _MOST_GROUPS or any(len(one) != 3 for one in places):
        raise ValueError("each group has a size and places")
    numbers = [told["block_size"], *sizes, *(number for one in places for number in one)]
    if any(type(number) is not int or not 0 <= number <= _MOST_NUMBER for number in numbers):
        raise ValueError("sizes and places are numbers")
    if not all(step for _, _, step in places):
        raise ValueError("no two places have one number")
    if sum(sizes) * max(count for _, count, _ in places) > _MOST_BYTES:
        raise ValueError("no disk has so many bytes")
    ranges = tuple(range(first, first + count * step, step) for first, count, step in places)
    key_id = told.get("key", "")
    if not isinstance(key_id, str):
        raise ValueError("a key has a name")
    shares = tuple(tuple(share) for share in told.get("shares", ()))
    if len(shares) >= MOST_RANKS or any(len(share) != len(sizes) for share in shares):
        raise ValueError("each rank has a share of each group's blocks")
    if any(type(size) is not int or not 0 <= size <= _MOST_NUMBER for share in shares for size in share):
        raise ValueError("sizes are numbers")
    return About(model, told["block_size"], tuple(sizes), ranges, float(opened), key_id, shares)


def size_and_use(folder: Path) -> tuple[int, float]:
    """Bytes on disk of what a folder of copies has, and when it was used last, seconds since 1970; 0 if it is gone."""
    size, used = 0, 0.0
    shares: list[str] = []
    with suppress(OSError):
        shares = share_files(folder)
    for path in (folder, *(folder / name for name in (*shares, *FILES))):
        with suppress(OSError):
            stat = path.lstat()
            size += stat.st_blocks * 512 if path != folder else 0
            used = max(used, stat.st_mtime if path.name != LOCK else 0.0)
    return size, used


def lock(path: Path, patience: float = _LOOKED_AT_S) -> int:
    """Takes a folder's lock, which the system takes back from the dead; those who are dying have it for some seconds.

    Raises:
        ConfigError: somebody has it.
        OSError: it cannot be made.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + patience
    while not _taken(handle, fcntl.LOCK_EX):
        if time.monotonic() > until:
            os.close(handle)
            raise ConfigError(
                f"--kv-disk: another engine keeps blocks in {path.parent}, or `penstock cache kv verify` reads them; "
                "give each engine a folder of its own (--kv-disk-path)."
            )
        time.sleep(_AGAIN_S)
    return handle


def try_lock(folder: Path, *, alone: bool = False) -> int | None:
    """A folder's lock, shared with others that read unless `alone`; None if an engine has it or that is not known."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if _taken(handle, fcntl.LOCK_EX if alone else fcntl.LOCK_SH) and not _shares_in_use(folder):
        return handle
    os.close(handle)
    return None


def _shares_in_use(folder: Path) -> bool:
    """Whether a rank has its share here, which it may without the one that leads on another machine."""
    try:
        for name in share_files(folder):
            handle = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            free = _taken(handle, fcntl.LOCK_SH)
            os.close(handle)
            if not free:
                return True
    except OSError:
        return True
    return False


def _taken(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_files(folder: Path) -> Sequence[str]:
    """Removes what a folder of copies has, and the folder; returns the names of what else lies in it.

    Raises:
        OSError: it cannot be written.
    """
    ours = (*share_files(folder), *FILES)
    others = sorted({file.name for file in folder.iterdir()} - {*ours})
    for name in ours:
        (folder / name).unlink(missing_ok=True)
    if not others:
        folder.rmdir()
    return others
