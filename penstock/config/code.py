"""Which state of this package's code is running."""

from __future__ import annotations

import os
from collections.abc import Iterator


def code_state(folder: str = os.path.dirname(os.path.dirname(__file__))) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of change of every file of code."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                yield from code_state(entry.path)
            elif entry.name.endswith((".py", ".so", ".pyd")):
                state = entry.stat()
                yield entry.name, state.st_size, state.st_mtime_ns
