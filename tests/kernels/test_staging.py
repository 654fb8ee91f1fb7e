"""Copies to a device in pieces: all bytes arrive, and no buffer is filled before its copy is over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.kernels.staging import in_turns, to_device


class Queue:
    """A stand-in for a device: what was queued is over once it was waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.turns = 0

    def mark(self) -> Queued:
        self.turns += 1
        self.log.append(f"queue {self.turns}")
        return Queued(self, self.turns)


class Queued:
    def __init__(self, queue: Queue, turn: int) -> None:
        self.queue, self.turn = queue, turn

    def wait(self) -> None:
        self.queue.log.append(f"wait {self.turn}")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
def test_pieces_take_turns(length: int) -> None:
    source, out = torch.arange(length, dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
    queue = Queue()
    in_turns(source, out, [torch.empty(8, dtype=torch.uint8) for _ in "ab"], queue.mark)
    assert torch.equal(out, source)
    pieces = -(-length // 8)
    before = [[f"wait {turn - 2}"] if turn > 2 else [] for turn in range(1, pieces + 1)]
    assert queue.log == [word for turn, waits in enumerate(before, 1) for word in (*waits, f"queue {turn}")]


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int32, np.uint16, np.float16, np.float32])
def test_types_and_shapes_stay(kind: type[np.generic]) -> None:
    values = np.arange(24).astype(kind).reshape(2, 3, 4)
    for array in (values, values[:, 1], values[::2, :, ::3], values[:0]):
        array.setflags(write=False)
        found = to_device(array, "cpu")
        assert np.array_equal(found.numpy(), array)
        assert found.numpy().dtype == array.dtype
        found.zero_()  # memory of its own
    assert values[1, 2, 3] == 23


def test_mapped_files_are_read_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    (tmp_path / "data").write_bytes(bytes(range(200)))
    mapped = np.memmap(tmp_path / "data", np.uint8, "r")
    assert to_device(mapped[100:], "cpu").tolist() == list(range(100, 200))
    assert not recwarn
