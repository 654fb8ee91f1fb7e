"""Files of a store: locks between processes, names that appear with their whole contents, room on the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.config.machine import free_bytes

MARGIN_BYTES = 64 << 20  # of a disk that is not filled
_LOOK_S = 0.05  # between two looks at a lock that somebody holds


@contextmanager
def locked(
    target: Path,
    waiting: Callable[[], None] = lambda: None,
    lock: Path | None = None,
    looking: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Holds the lock of a file that may not exist yet, against other processes and threads.

    Args:
        target: the file.
        waiting: called once if somebody else holds it.
        lock: where the lock lies; beside the file if None.
        looking: called each time before it is tried again; what it raises ends the wait.
    """
    path = lock or target.with_name(target.name + ".lock")
    waited = False
    while True:
        handle = _lock_file(path)
        try:
            while not _taken(handle):
                if not waited:
                    waiting()
                waited = True
                looking()
                time.sleep(_LOOK_S)
            if not _is_same(handle, path):  # removed while we waited: the next one locks another file
                continue
            yield
            if lock is None:
                path.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _lock_file(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def shared_lock(path: Path, *, alone: bool) -> Iterator[None]:
    """Holds a lock that many may share.

    Raises:
        BlockingIOError: `alone` is wanted, and somebody else holds it.
    """
    handle = _lock_file(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _is_same(handle: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(handle), os.stat(path))
    return False


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """A name that nobody else has, to make a file under; it gets its own when it is whole, in place of an older one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that has all its bytes when its name appears."""
    with _appearing(path) as partial, partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def link(source: Path, target: Path) -> None:
    """Gives a file a second name; where that is not possible (another disk), copies it."""
    with _appearing(target) as partial:
        try:
            os.link(source.resolve(), partial)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                raise
            shutil.copyfile(source, partial)


def symbolic(link: Path, target: Path) -> None:
    """Makes `link` point to `target`, which is told relative to it where both lie under one folder."""
    with _appearing(link) as partial:
        partial.symlink_to(os.path.relpath(target, link.parent))


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raises ConfigError, with both numbers, if a disk has no room for so many bytes more."""
    free = free_bytes(folder)
    if needed and needed + MARGIN_BYTES > free:
        raise ConfigError(
            f"{what} needs {needed / 2**30:.2f} GiB in {folder}, where {free / 2**30:.2f} GiB are free; remove models "
            "(`penstock rm`, `penstock prune`), or keep them elsewhere with PENSTOCK_MODELS or HF_HOME."
        )


def disk_error(error: OSError, path: Path) -> ConfigError:
    """What a failed write means to the person; what was loaded is kept."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = free_bytes(path.parent)
        return ConfigError(
            f"the disk of {path.parent} is full ({free / 2**30:.2f} GiB are free). What came so far is kept: make room "
            "and give the same command again."
        )
    return ConfigError(f"{path} cannot be written: {error.strerror or error}.")


def inside(folder: Path, name: str) -> Path:
    """A path below a folder for a name that a server sent.

    Raises:
        CheckpointError: it would lie elsewhere: it is absolute, goes up, or passes a link.
    """
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name and not name.startswith("/")
    if not plain or any(part in ("", ".", "..") or len(part.encode()) > 240 for part in parts):
        raise CheckpointError(f"the name {quoted(name)} of a file in this model is not taken: it could lie anywhere.")
    if len(parts) > 8:
        raise CheckpointError(f"the file {quoted(name)} lies in {len(parts) - 1} folders; 7 are allowed.")
    path, base = folder.joinpath(*parts), os.path.realpath(folder)
    if os.path.realpath(path.parent) != os.path.join(base, *parts[:-1]):
        raise CheckpointError(f"{path.parent} is a link to another place; remove it, and load the model again.")
    return path


def remove_file(path: Path) -> int:
    """Removes a file if it is there; the bytes that became free."""
    try:
        size = 0 if path.is_symlink() else path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def remove_all(path: Path) -> int:
    """Removes a file, or a folder with all in it; the bytes that became free."""
    if path.is_symlink() or not path.is_dir():
        return remove_file(path)
    freed = sum(map(remove_all, path.iterdir()))
    path.rmdir()
    return freed
