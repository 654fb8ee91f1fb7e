"""Opens whatever adapter lies at a path, and names its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config.adapters import AdapterUse
from penstock.config.errors import CheckpointError
from penstock.weights.adapters.adapter import Adapter
from penstock.weights.adapters.gguf import open_gguf_adapter
from penstock.weights.adapters.peft import CONFIG, WEIGHTS, is_peft, open_peft

_PIECE = 2**20
_WANTED = f"give a folder with {CONFIG} and {WEIGHTS}, or a .gguf file"


def open_adapter(path: str | Path, config: Mapping[str, Any] | None = None) -> Adapter:
    """Opens an adapter without reading its numbers.

    Args:
        path: a folder in PEFT's layout, or a .gguf file.
        config: of the model, whose names projections get; without it those of a .gguf file stay its own.

    Raises:
        CheckpointError: nothing usable lies there; the message says what was looked for.
    """
    place = _place(path)
    if is_peft(place):
        return open_peft(place)
    if place.suffix == ".gguf" and place.is_file():
        return open_gguf_adapter(place, config)
    if not place.exists():
        raise CheckpointError(f"there is no adapter at {place}; {_WANTED}.")
    raise CheckpointError(f"{place} is no adapter Penstock reads; {_WANTED}.")


def adapter_digest(path: str | Path) -> str:
    """SHA-256 of an adapter's files, in hexadecimal: what prefixes computed with it are told apart by.

    Raises:
        CheckpointError: they cannot be read.
    """
    place = _place(path)
    digest = hashlib.sha256()
    try:
        for file in _files(place):
            if not file.is_file():  # devices and pipes may have no end
                raise CheckpointError(
                    f"there is no adapter at {place}: {file} is missing, or no plain file; {_WANTED}."
                )
            digest.update(b"%d:" % file.stat().st_size)
            with file.open("rb") as stream:
                while piece := stream.read(_PIECE):
                    digest.update(piece)
    except OSError as error:
        raise CheckpointError(f"the adapter at {place} cannot be read: {error.strerror or error}.") from error
    return digest.hexdigest()


def read_adapter(path: str | Path) -> tuple[AdapterUse, int]:
    """What names the adapter at a path, and the largest of its ranks. Reads all of it: not for an event loop.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    adapter = open_adapter(path)
    place = str(Path(path).expanduser())
    return AdapterUse(adapter_digest(path), place, invocation=adapter.invocation), adapter.rank


def adapter_state(path: str | Path) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and time of change of an adapter's files: another one where its content may be another.

    () where they cannot be looked at, as `read_adapter` will tell.
    """
    try:
        told = [file.stat() for file in _files(_place(path))]
    except (OSError, CheckpointError):
        return ()
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in told)


def _files(place: Path) -> tuple[Path, ...]:
    return (place / CONFIG, place / WEIGHTS) if is_peft(place) else (place,)


def _place(path: str | Path) -> Path:
    """A path with the home folder for ~; raises CheckpointError where the system cannot say what lies there."""
    try:
        place = Path(path).expanduser()
        for file in (place, place / CONFIG, place / WEIGHTS):
            file.exists()
    except (OSError, RuntimeError) as error:  # too long, not permitted, gone with its server, no such user
        raise CheckpointError(f"the adapter at {path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    return place
