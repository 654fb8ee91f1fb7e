"""`penstock serve` in a process that writes down, once a second, how much memory is in use in it.

In use is what malloc has given out and not got back. Resident memory says less: it holds what is free between blocks
that are used, which grows for hours where sizes vary. Python's objects are to be malloc's too (`PYTHONMALLOC=malloc`).

    PYTHONMALLOC=malloc python -m benchmarks.counted_memory FILE serve …
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
import time
from typing import IO

from penstock.cli.main import main

EVERY_S = 1.0
ENTRY = struct.Struct("<dQ")  # seconds since the start of the process, bytes in use


class _Figures(ctypes.Structure):
    """glibc's struct mallinfo2 (2.33 and later)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    ]  # fmt: skip


def in_use() -> int:
    """Bytes that malloc has given out: of all arenas, and of what it mapped apart."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Figures
    figures = library.mallinfo2()
    return int(figures.uordblks + figures.hblkhd)


def _write(file: IO[bytes]) -> None:
    started = time.perf_counter()
    while True:
        file.write(ENTRY.pack(time.perf_counter() - started, in_use()))
        file.flush()
        time.sleep(EVERY_S)


if __name__ == "__main__":
    threading.Thread(target=_write, args=(open(sys.argv.pop(1), "wb"),), daemon=True).start()  # noqa: SIM115
    sys.argv[0] = "penstock"
    main()
