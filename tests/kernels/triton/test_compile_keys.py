"""A served mixture of steps compiles few kernels, all of them ahead: tiles and kinds make new ones, sizes do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MOST = {
    "_attend": 6,  # rows of 1, 2, 4, 8, 16 and more queries
    "_join_in_order": 5,
    "_sort": 4,  # tiles of rows
    "_multiply": 28,  # four such tiles, by one program or several, of three packings and two experts' matrices
}


def test_sizes_of_steps_make_no_new_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.triton.compile_keys"]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, check=False, timeout=110, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    made = {name: int(count) for name, count, _ in lines}
    assert set(MOST) < set(made)
    assert {name: count for name, count in made.items() if count > MOST.get(name, 2)} == {}
    assert {name: late for name, _, late in lines if late != "0"} == {}  # what requests would have waited for
