"""Pages of a model's file that were read are given back, and can be read again."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.weights.readers.files import let_go, map_file

SIZE = 8 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system tells of pages in /proc")


def resident(name: str) -> int:
    """KiB of a mapped file that are in this process's memory."""
    found = re.search(rf"{re.escape(name)}\n(?:.*\n)*?Rss: +(\d+)", Path("/proc/self/smaps").read_text())
    assert found is not None
    return int(found[1])


def test_pages_are_given_back_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model"
    values = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    path.write_bytes(values.tobytes())
    _, data = map_file(path)
    part = data[1000 : SIZE - 1000][: SIZE // 2].reshape(2, -1)
    total = int(data.sum(dtype=np.int64))
    assert resident(str(path)) >= SIZE >> 10
    let_go(part.reshape(-1))
    assert resident(str(path)) <= (SIZE >> 10) * 3 // 4
    assert int(data.sum(dtype=np.int64)) == total
    assert np.array_equal(part.reshape(-1), values[1000 : 1000 + SIZE // 2])


def test_other_memory_stays_as_it_is() -> None:
    values = np.arange(1 << 16, dtype=np.uint8)
    before = values.copy()
    let_go(values[5:])
    let_go(np.empty(0, np.uint8))
    let_go(np.frombuffer(bytes(before), np.uint8))
    assert np.array_equal(values, before)
