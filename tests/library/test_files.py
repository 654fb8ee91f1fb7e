"""Files that get their names when they are whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.library.files import symbolic, write_whole


def test_threads_that_write_one_name_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    pieces = [bytes([number]) * 10_000 for number in range(8)]
    target, pointed = tmp_path / "x", tmp_path / "to"

    def write(piece: bytes) -> None:
        for _ in range(20):
            write_whole(target, piece)
            symbolic(pointed, target)

    with ThreadPoolExecutor(len(pieces)) as pool:
        list(pool.map(write, pieces))
    assert target.read_bytes() in pieces
    assert pointed.resolve() == target
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to", "x"]
