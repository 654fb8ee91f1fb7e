"""Copies to a device in pieces: all bytes arrive, and no buffer is filled before its copy is over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.kernels.staging import in_turns, to_device


class Queue:
    """A stand-in for a device: copies happen when an event is waited for, as late as they may."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def event(self, name: str) -> Queued:
        return Queued(self, name)


class Queued:
    def __init__(self, queue: Queue, name: str) -> None:
        self.queue, self.name = queue, name

    def record(self) -> None:
        self.queue.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.queue.log.append(f"wait {self.name}")


@pytest.mark.parametrize("length", [1, 7, 8, 9, 29])
def test_pieces_take_turns(length: int) -> None:
    source, out = torch.arange(length, dtype=torch.uint8), torch.zeros(length, dtype=torch.uint8)
    queue = Queue()
    in_turns(source, out, [torch.empty(8, dtype=torch.uint8) for _ in "ab"], [queue.event(name) for name in "ab"])
    assert torch.equal(out, source)
    turns = ["ab"[turn % 2] for turn in range(-(-length // 8))]
    assert queue.log == [word for name in turns for word in (f"wait {name}", f"record {name}")]


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
