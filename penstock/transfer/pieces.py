"""The bytes of a block: all that its layers keep of it, one piece after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.runtime.kv_memory import KVMemory

if TYPE_CHECKING:
    from torch import Tensor

Bytes = bytes | bytearray | memoryview


class Pieces(Protocol):
    """Reads and writes what layers keep of blocks, wherever that memory is.

    Attributes:
        sizes: bytes of a block, by cache group; of a recurrent state behind all groups of blocks.
        states: the number of that group; -1 without such states.
    """

    sizes: tuple[int, ...]
    states: int

    def reading(self, group: int, index: int) -> Callable[[], Sequence[Bytes]]:
        """What reads a block, or a state slot, as all steps so far have left it; for another thread to call.

        A block may be overwritten meanwhile, a state slot too, of which a copy is begun at once. What was read is valid
        until its thread reads again.
        """

    def writing(self, group: int, index: int, data: Bytes) -> Callable[[], None]:
        """What sets the bytes of a block (or state slot), `sizes[group]` many, and ends when the device has them."""


def pieces_of(memory: KVMemory, device: str | None) -> Pieces:
    """`device` of torch; None, or "cpu", where the memory is the host's."""
    groups = [memory.arrays(group) for group in range(memory.num_groups)]
    states = memory.num_groups - 1 if memory.has_states else -1
    return HostPieces(groups, states) if device in (None, "cpu") else DevicePieces(groups, states)


class HostPieces:
    """Of arrays, or tensors, in the host's memory."""

    def __init__(self, groups: Sequence[Sequence[Any]], states: int) -> None:
        self._arrays = [[_rows(array) for array in arrays] for arrays in groups]
        self.states = states
        self.sizes = tuple(sum(array.shape[1] for array in arrays) for arrays in self._arrays)

    def reading(self, group: int, index: int) -> Callable[[], Sequence[Bytes]]:
        found: list[Bytes] = [array[index].data for array in self._arrays[group]]
        if group == self.states:
            found = [b"".join(found)]
        return lambda: found

    def writing(self, group: int, index: int, data: Bytes) -> Callable[[], None]:
        return partial(self._write, group, index, np.frombuffer(data, np.uint8))

    def _write(self, group: int, index: int, source: Any) -> None:
        start = 0
        for array in self._arrays[group]:
            array[index] = source[start : start + array.shape[1]]
            start += array.shape[1]


class DevicePieces:
    """Of tensors on a device. Each thread that moves blocks has a stream and a pinned buffer of its own."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], states: int) -> None:
        import torch

        self._torch = torch
        self._arrays = [[array.reshape(len(array), -1).view(torch.uint8) for array in arrays] for arrays in groups]
        self._device = groups[0][0].device
        self._of_thread = local()
        self.states = states
        self.sizes = tuple(sum(array.shape[1] for array in arrays) for arrays in self._arrays)

    def reading(self, group: int, index: int) -> Callable[[], Sequence[Bytes]]:
        kept = self._joined(group, index) if group == self.states else None
        return partial(self._read, group, index, kept, self._stream().record_event() if self._cuda else None)

    def writing(self, group: int, index: int, data: Bytes) -> Callable[[], None]:
        staged = self._staging(self.sizes[group])
        staged.numpy()[:] = np.frombuffer(data, np.uint8)
        with self._aside():
            found = staged.to(self._device, non_blocking=True)
        return partial(self._write, group, index, found)

    @property
    def _cuda(self) -> bool:
        return bool(self._device.type == "cuda")

    def _read(self, group: int, index: int, kept: Tensor | None, ready: Any) -> Sequence[Bytes]:
        staged = self._staging(self.sizes[group])
        with self._aside():
            if ready is not None:
                self._stream().wait_event(ready)
            staged.copy_(self._joined(group, index) if kept is None else kept, non_blocking=True)
            self._wait()
        return [staged.numpy().data]

    def _write(self, group: int, index: int, found: Tensor) -> None:
        targets = [array[index] for array in self._arrays[group]]
        with self._aside():
            self._torch._foreach_copy_(targets, self._torch.split(found, [t.numel() for t in targets]))
            self._wait()

    def _joined(self, group: int, index: int) -> Tensor:
        return self._torch.cat([array[index] for array in self._arrays[group]])

    def _stream(self) -> Any:
        return self._torch.cuda.current_stream(self._device)

    def _aside(self) -> Any:
        """This thread's own stream, where devices have such."""
        if not self._cuda:
            return nullcontext()
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = self._torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._torch.cuda.stream(self._of_thread.stream)

    def _wait(self) -> None:
        if self._cuda:
            self._stream().synchronize()

    def _staging(self, size: int) -> Tensor:
        """The first bytes of this thread's buffer, into which nothing is copied any more."""
        if not hasattr(self._of_thread, "buffer"):
            most = max(self.sizes)
            self._of_thread.buffer = self._torch.empty(most, dtype=self._torch.uint8, pin_memory=self._cuda)
        found: Tensor = self._of_thread.buffer[:size]
        return found


def _rows(array: Any) -> Any:
    """The bytes [rows, bytes of a row] of an array or tensor on the host, which they share."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.reshape(len(array), -1).view(torch.uint8).numpy()
    return array.reshape(len(array), -1).view(np.uint8)
