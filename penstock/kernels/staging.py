"""Arrays of a checkpoint → tensors on a device, past the host's memory: through two pinned buffers, or directly.

The arrays are mostly views of a mapped file, so that a copy by the driver itself would read page by page, and a pinned
copy of the whole would double what the host holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 32 << 20  # bytes of a buffer: long enough for the bus, short beside a tensor


class Event(Protocol):
    """A point of a device's queue, as torch.cuda.Event."""

    def record(self) -> object: ...

    def synchronize(self) -> object: ...


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """The array's values in memory of their own on the device, of its shape and type."""
    array = np.ascontiguousarray(array)
    place, source = torch.device(device), _bytes(array)
    out = torch.empty(len(source), dtype=torch.uint8, device=place)
    if place.type == "cuda" and len(source):
        buffers = [torch.empty(min(CHUNK, len(source)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        in_turns(source, out, buffers, [torch.cuda.Event(), torch.cuda.Event()])  # type: ignore[no-untyped-call]
    else:
        out.copy_(source)
    return out.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)


def in_turns(source: Tensor, out: Tensor, buffers: Sequence[Tensor], events: Sequence[Event]) -> None:
    """Copies bytes [n] to out [n]: a buffer is filled while the other's copy to the device is under way."""
    size = len(buffers[0])
    for turn, begin in enumerate(range(0, len(source), size)):
        buffer, event = buffers[turn % len(buffers)], events[turn % len(buffers)]
        event.synchronize()  # an event that was never recorded is over
        piece = buffer[: min(size, len(source) - begin)]
        piece.copy_(source[begin : begin + size])
        out[begin : begin + size].copy_(piece, non_blocking=True)
        event.record()


def _bytes(array: npt.NDArray[Any]) -> Tensor:
    """The array's memory as [n] uint8, to be read only; torch warns of arrays that cannot be written, so it gets the

    address instead. The caller keeps the array.
    """
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
