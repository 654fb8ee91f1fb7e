"""Arrays of a checkpoint → tensors on a device, past the host's memory: through two pinned buffers, or directly.

The arrays are mostly views of a mapped file, so that a copy by the driver itself would read page by page, and a pinned
copy of the whole would double what the host holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.copies import Event

CHUNK = 32 << 20  # bytes of a buffer: long enough for the bus, short beside a tensor


def to_device(array: npt.NDArray[Any], device: torch.device | str) -> Tensor:
    """The array's values in memory of their own on the device, of its shape and type."""
    array = np.ascontiguousarray(array)
    place, source = torch.device(device), _bytes(array)
    out = torch.empty(len(source), dtype=torch.uint8, device=place)
    if place.type == "cuda" and len(source):
        buffers = [torch.empty(min(CHUNK, len(source)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        in_turns(source, out, buffers, partial(Event, place))
    else:
        out.copy_(source)
    return out.view(torch.from_numpy(np.empty(0, array.dtype)).dtype).view(array.shape)


def in_turns(source: Tensor, out: Tensor, buffers: Sequence[Tensor], mark: Callable[[], Event]) -> None:
    """Copies bytes [n] to out [n]: a buffer is filled while the other's copy to the device is under way.

    `mark` gives the end of what was queued so far.
    """
    size = len(buffers[0])
    copied: list[Event | None] = [None] * len(buffers)
    for turn, begin in enumerate(range(0, len(source), size)):
        which = turn % len(buffers)
        buffer, last = buffers[which], copied[which]
        if last is not None:
            last.wait()
        piece = buffer[: min(size, len(source) - begin)]
        piece.copy_(source[begin : begin + size])
        out[begin : begin + size].copy_(piece, non_blocking=True)
        copied[which] = mark()


def _bytes(array: npt.NDArray[Any]) -> Tensor:
    """The array's memory as [n] uint8, to be read only; torch warns of arrays that cannot be written, so it gets the

    address instead. The caller keeps the array.
    """
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)
