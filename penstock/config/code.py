"""Which state of this package's code is running."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress

State = tuple[tuple[str, int, int], ...]


def _files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith((".py", ".so", ".pyd")):
                with suppress(OSError):  # an editor's lock, or a file that an upgrade just removed
                    state = entry.stat()
                    yield entry.name, state.st_size, state.st_mtime_ns


# As of the import: files may change while the code that was read from them runs.
_STATE: State = tuple(_files(os.path.dirname(os.path.dirname(__file__))))


def code_state() -> State:
    """Name, size and time of change of every file of code, as they were when this process began."""
    return _STATE


def code_digest(version: int, files: str) -> str:
    """What files depend on that are kept for the next start: their form, what they were made of, and the code."""
    return hashlib.sha256(json.dumps([version, files, code_state()]).encode()).hexdigest()
