"""What names a checkpoint by content: a digest of its files, each read once as long as it stays as it was."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.weights.pack_cache import parts_of

_PIECE: Final = 1 << 20


def checkpoint_files(model: Path) -> Iterator[Path]:
    """The files that decide what a model computes: weights and configurations."""
    files = sorted(model.iterdir()) if model.is_dir() else parts_of(model)
    return (file for file in files if file.suffix in (".safetensors", ".gguf", ".json", ".bin") and file.is_file())


def content_digest(model: Path, notes: Path, *, weights: bool = True) -> str:
    """A digest of a checkpoint's files.

    Args:
        model: the folder or file.
        notes: what is known of files from before.
        weights: of files with weights too, not of configurations alone.

    Raises:
        OSError: a file cannot be read.
    """
    return files_digest((file for file in checkpoint_files(model) if weights or file.suffix == ".json"), notes)


def files_digest(files: Iterable[Path], notes: Path) -> str:
    """A digest of these files and their names; what was read is noted in the file `notes`, which may be written or not.

    Raises:
        OSError: a file cannot be read.
    """
    known = _read(notes)
    found: dict[str, str] = {}
    names = hashlib.sha256()
    for file in files:
        state = _state(file)
        found[state] = known.get(state) or _digest(file)
        names.update(f"{file.name} {found[state]}\n".encode())
    if not found.keys() <= known.keys():
        with suppress(OSError):
            _write(notes, {**known, **found})
    return names.hexdigest()


def _state(file: Path) -> str:
    """What changes whenever a file does."""
    stat = file.stat()
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}"


def _read(notes: Path) -> dict[str, str]:
    try:
        found = json.loads(notes.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _write(notes: Path, known: dict[str, str]) -> None:
    """Whatever happens meanwhile, and whoever else writes, the file is whole. Raises OSError."""
    fresh = notes.with_name(f"{notes.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(known), encoding="ascii")
        os.replace(fresh, notes)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
