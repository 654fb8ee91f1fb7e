"""Folders of copies as people look at them: how much each has, how long its prefixes are, whether its bytes are whole.

Nothing is told of whose they are, or of what was said: only sizes, counts and times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from penstock.config.errors import ConfigError
from penstock.core.policies.bounded_tier import Entry
from penstock.parallel.ranks import Ranks
from penstock.transfer.folder import (
    BLOCKS,
    INDEX,
    LOCK,
    About,
    read_about,
    remove_files,
    share_file,
    size_and_use,
    try_lock,
)
from penstock.transfer.index import read_entries
from penstock.transfer.places import PlacesFile
from penstock.transfer.sealing import PLAIN, Sealing
from penstock.transfer.store import StoreError

_VERSION: Final = 16  # digits of what a folder's name says of its model's version,
_PLACE: Final = 8  # and of where that lies
_DIGITS: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """What is kept of the blocks of one model, in one version of it.

    Attributes:
        folder: where.
        model: as it was served.
        about: what the folder tells of itself; None if it does not.
        bytes: on disk.
        blocks: copies, in all groups.
        tokens: in blocks that have one, each prefix once.
        damaged_lines: of its index, which tell nothing.
        used: when an engine last had it, seconds since 1970.
        in_use: an engine has it, or it lies on a disk without locks.
        sealed: it is encrypted with a key that is not given, so that nobody knows what it has.
    """

    folder: Path
    model: str
    about: About | None
    bytes: int
    blocks: int
    tokens: int
    damaged_lines: int
    used: float
    in_use: bool
    sealed: bool = False

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.name


class Chain(NamedTuple):
    """A prefix that is kept and that nothing goes on from: its tokens, and the copies of their blocks in all groups."""

    tokens: int
    blocks: int


@dataclass(slots=True)
class Verdict:
    """What became of the copies of a folder when they were read.

    Attributes:
        whole: as they were written.
        damaged: not what the index says.
        unreadable: the disk gives an error instead.
        first: what is wrong with the first of those; "" if nothing is.
    """

    whole: int = 0
    damaged: int = 0
    unreadable: int = 0
    first: str = ""

    @property
    def wrong(self) -> int:
        """Those that are not whole."""
        return self.damaged + self.unreadable


def kept_blocks(base: Path, sealing: Sealing = PLAIN) -> list[KeptBlocks]:
    """All of a folder of folders, the least recently used first. Raises OSError if it cannot be read."""
    if not base.is_dir():
        return []
    found = (kept_in(folder, sealing) for folder in base.iterdir() if is_ours(folder))
    return sorted(filter(None, found), key=lambda kept: (kept.used, kept.name))


def is_ours(folder: Path) -> bool:
    """Whether an engine made it: by its name, and by its lock."""
    digits = [word for word in folder.name.rsplit("-", 2)[1:] if _DIGITS.issuperset(word)]
    named = [len(word) for word in digits] == [_PLACE, _VERSION]
    return named and not folder.is_symlink() and (folder / LOCK).is_file() and not (folder / LOCK).is_symlink()


def kept_in(folder: Path, sealing: Sealing = PLAIN) -> KeptBlocks | None:
    """What a folder has; None if it has gone meanwhile. Raises OSError if its index cannot be read."""
    size, used = size_and_use(folder)
    if not used:
        return None
    about = read_about(folder)
    sealed = about is not None and about.key_id not in ("", sealing.key_id)
    entries, damaged = ({}, 0) if sealed else read_entries(folder / INDEX, _written(about, sealing).unseal_line)
    handle = try_lock(folder)
    if handle is not None:
        os.close(handle)
    return KeptBlocks(
        folder,
        (about.model if about else "") or folder.name[: -_VERSION - _PLACE - 2],
        about,
        size,
        len(entries),
        sum({entry.digest: len(entry.key) for entry in entries.values()}.values()),
        damaged,
        used,
        handle is None,
        sealed,
    )


def chains(kept: KeptBlocks, sealing: Sealing = PLAIN) -> tuple[list[Chain], int]:
    """What is kept from a prompt's first token on, the longest first, and how many copies nothing leads to.

    Raises:
        ConfigError: it is encrypted with a key that is not given.
        OSError: the index cannot be read.
    """
    entries = _entries(kept, sealing)
    copies: dict[bytes, int] = {}
    tokens: dict[bytes, int] = {}
    behind: dict[bytes, set[bytes]] = {}
    for entry in entries.values():
        copies[entry.digest] = copies.get(entry.digest, 0) + 1
        tokens[entry.digest] = len(entry.key)
        behind.setdefault(entry.parent, set()).add(entry.digest)
    found: list[Chain] = []
    reached: set[bytes] = set()
    steps = [(digest, Chain(0, 0)) for digest in behind.get(b"", ())]
    while steps:
        digest, before = steps.pop()
        if digest in reached:  # an index that somebody else wrote
            continue
        reached.add(digest)
        chain = Chain(before.tokens + tokens[digest], before.blocks + copies[digest])
        after = behind.get(digest, ())
        steps += [(one, chain) for one in after]
        if not after:
            found.append(chain)
    return sorted(found, reverse=True), sum(count for digest, count in copies.items() if digest not in reached)


def verify(
    kept: KeptBlocks, progress: Callable[[int, int], None] = lambda done, total: None, sealing: Sealing = PLAIN
) -> Verdict:
    """Reads every copy of a folder that no engine has, and holds its bytes to their checksum.

    Args:
        kept: the folder.
        progress: is told how many have been read, and of how many.
        sealing: with the key that is given.

    Raises:
        ConfigError: an engine has the folder, it does not tell its layout, or it is encrypted with another key.
        OSError: its index cannot be read.
    """
    about = kept.about
    if about is None:
        raise ConfigError(
            f"{kept.name} does not tell how large its blocks are (about.json is missing or damaged); an engine that "
            "starts with it writes that anew."
        )
    with _held(kept, alone=False):
        entries = _entries(kept, sealing)
        verdict = Verdict()
        files = _files(kept.folder, about)
        for number, (name, sizes) in enumerate(files):
            try:
                path = kept.folder / name
                file = PlacesFile(path, sizes, about.places, read_only=True, sealing=_written(about, sealing))
            except FileNotFoundError:
                verdict.damaged += len(entries)
                verdict.first = verdict.first or ("the file of blocks is gone" if entries else "")
                continue
            told = partial(_told, progress, number * len(entries), len(files) * len(entries))
            try:
                _read_all(file, sizes, entries, verdict, told)
            finally:
                file.close()
        return verdict


def _told(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(before + done, total)


def _files(folder: Path, about: About) -> list[tuple[str, tuple[int, ...]]]:
    """The files of blocks, and the bytes of a block in each, by group; of ranks on other machines none."""
    count = len(about.shares) + 1
    shares = ((share_file(Ranks(rank, count).name), sizes) for rank, sizes in enumerate(about.shares, 1))
    return [(BLOCKS, about.sizes), *((name, sizes) for name, sizes in shares if (folder / name).exists())]


def _entries(kept: KeptBlocks, sealing: Sealing) -> dict[int, Entry]:
    if kept.sealed:
        why = "is not the one that it was encrypted with" if sealing.key_id else "is not set, and it is encrypted"
        raise ConfigError(f"{kept.name} cannot be read: PENSTOCK_KV_KEY {why}; set it to the key that the engine had.")
    return read_entries(kept.folder / INDEX, _written(kept.about, sealing).unseal_line)[0]


def _written(about: About | None, sealing: Sealing) -> Sealing:
    """How a folder was written, as far as that may be with a key."""
    return sealing if about is not None and about.key_id else PLAIN


def _read_all(
    file: PlacesFile, sizes: Sequence[int], entries: Mapping[int, Entry], verdict: Verdict,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Enters what became of a file's copies."""
    for done, (place, entry) in enumerate(sorted(entries.items()), 1):
        try:
            if not file.has(place, entry.group):
                raise StoreError("the index names a place that there is not")
            if sizes[entry.group] > file.length:
                raise StoreError("its file is too short")  # before so much memory is asked for
            file.read(place, entry)
            verdict.whole += 1
        except StoreError as error:
            verdict.damaged += 1
            verdict.first = verdict.first or f"place {place}: {error}"
        except OSError as error:
            verdict.unreadable += 1
            verdict.first = verdict.first or f"place {place}: {error.strerror or error}"
        progress(done)


def remove(kept: KeptBlocks) -> None:
    """Removes a folder that nobody has.

    Raises:
        ConfigError: somebody has it, or it has files of others, which stay.
        OSError: it cannot be written.
    """
    with _held(kept, alone=True):
        others = remove_files(kept.folder)
    if others:
        raise ConfigError(f"the blocks of {kept.name} are removed; its folder stays, it also has {', '.join(others)}.")


@contextmanager
def _held(kept: KeptBlocks, *, alone: bool) -> Iterator[None]:
    handle = try_lock(kept.folder, alone=alone)
    if handle is None:
        raise ConfigError(f"{kept.name} is in use by a running engine, or on a disk without locks; end that first.")
    try:
        yield
    finally:
        os.close(handle)
