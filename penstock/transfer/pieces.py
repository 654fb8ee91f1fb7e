"""The bytes of a block: all that its layers keep of it, one piece after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import local
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from penstock.runtime.kv_memory import KVMemory

if TYPE_CHECKING:
    from torch import Tensor

Bytes = bytes | bytearray | memoryview
_TOGETHER: Final = 32  # blocks
_STAGED: Final = 32 << 20  # bytes of a thread


class Pieces(Protocol):
    """Reads and writes what layers keep of blocks, wherever that memory is. A state slot counts as a block.

    Attributes:
        sizes: bytes of a block, by cache group; of a recurrent state behind all groups of blocks.
        states: the number of that group; -1 without such states.
        most: blocks of a group that are moved together by `read`, or `put` and `write`.
    """

    sizes: tuple[int, ...]
    states: int
    most: int

    def begin(self, group: int, index: int) -> Any:
        """What `read` takes for a block as all steps so far leave it, which may be overwritten before.

        A state slot is copied: it may be another's before the next step.
        """

    def before(self, group: int) -> Any:
        """What a load into a group has to come after, for `lift`.

        Steps so far may still use a state slot that is loaded; no block that is, which waits for these to commit.
        """

    def read(self, group: int, begun: Sequence[Any]) -> Sequence[Sequence[Bytes]]:
        """The bytes of blocks; for another thread to call, and valid until that calls this or `put` again."""

    def put(self, place: int, group: int, data: Bytes) -> None:
        """Takes bytes of a block, `sizes[group]` many, to this thread's place of that number."""

    def lift(self, group: int, before: Sequence[Any]) -> None:
        """Takes what lies at the first places to the device, beside the blocks, once what is before each is over."""

    def write(self, group: int, targets: Mapping[int, int]) -> None:
        """Sets the bytes of blocks, by place, to what was lifted, and ends when the device has them."""


def pieces_of(memory: KVMemory, device: str | None) -> Pieces:
    """`device` of torch; None, or "cpu", where the memory is the host's."""
    groups = [memory.arrays(group) for group in range(memory.num_groups)]
    states = memory.num_groups - 1 if memory.has_states else -1
    return HostPieces(groups, states) if device in (None, "cpu") else DevicePieces(groups, states)


class HostPieces:
    """Of arrays, or tensors, in the host's memory: one block at a time, without a copy between."""

    def __init__(self, groups: Sequence[Sequence[Any]], states: int) -> None:
        self._arrays = [[_rows(array) for array in arrays] for arrays in groups]
        self._of_thread = local()
        self.states = states
        self.sizes = tuple(sum(array.shape[1] for array in arrays) for arrays in self._arrays)
        self.most = 1

    def begin(self, group: int, index: int) -> list[Bytes]:
        found: list[Bytes] = [array[index].data for array in self._arrays[group]]
        return [b"".join(found)] if group == self.states else found

    def read(self, group: int, begun: Sequence[Any]) -> Sequence[Sequence[Bytes]]:
        return begun

    def put(self, place: int, group: int, data: Bytes) -> None:
        self._of_thread.data = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)

    def before(self, group: int) -> None:
        return None

    def lift(self, group: int, before: Sequence[Any]) -> None:
        pass

    def write(self, group: int, targets: Mapping[int, int]) -> None:
        source = self._of_thread.data
        for index in targets.values():
            start = 0
            for array in self._arrays[group]:
                array[index] = source[start : start + array.shape[1]]
                start += array.shape[1]


class _Begun(NamedTuple):
    """A block to be read: its number, or its bytes; and when the steps so far have ended."""

    block: int
    kept: Tensor | None
    ready: Any


class DevicePieces:
    """Of tensors on a device. Each thread that moves blocks has a stream and pinned memory of its own.

    A layer's pieces of several blocks are moved by one launch: of one block each they are small, and launching them
    takes longer than the copy.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], states: int) -> None:
        import torch

        self._torch = torch
        self._arrays = [_wide(arrays) for arrays in groups]
        self._device = groups[0][0].device
        self._cuda = self._device.type == "cuda"
        self._of_thread = local()
        self.states = states
        self.sizes = tuple(sum(array.shape[1] * array.itemsize for array in arrays) for arrays in self._arrays)
        self.most = max(1, min(_TOGETHER, _STAGED // max(self.sizes)))

    def begin(self, group: int, index: int) -> _Begun:
        kept = None
        if group == self.states:
            kept = self._torch.cat([array[index] for array in self._arrays[group]])
        return _Begun(index, kept, self._stream().record_event() if self._cuda else None)

    def before(self, group: int) -> Any:
        return self._stream().record_event() if self._cuda and group == self.states else None

    def read(self, group: int, begun: Sequence[Any]) -> Sequence[Sequence[Bytes]]:
        staged = self._staging(group, len(begun))
        with self._aside():
            for one in begun if self._cuda else ():
                self._stream().wait_event(one.ready)
            if group == self.states:
                found = self._torch.stack([one.kept for one in begun])
            else:
                indices = self._indices(one.block for one in begun)
                found = self._torch.cat([array.index_select(0, indices) for array in self._arrays[group]], 1)
            staged.copy_(found.view(self._torch.uint8), non_blocking=self._cuda)
            self._wait()
        return [[row.data] for row in staged.numpy()]

    def put(self, place: int, group: int, data: Bytes) -> None:
        self._staging(group, place + 1)[place].numpy()[:] = np.frombuffer(data, np.uint8)

    def lift(self, group: int, before: Sequence[Any]) -> None:
        with self._aside():
            for ready in before:
                if ready is not None:
                    self._stream().wait_event(ready)
            self._of_thread.lifted = self._staging(group, len(before)).to(self._device, non_blocking=self._cuda)
            self._wait()

    def write(self, group: int, targets: Mapping[int, int]) -> None:
        with self._aside():
            lifted, indices = self._of_thread.lifted, self._indices(targets.values())
            if len(targets) < len(lifted):
                lifted = lifted.index_select(0, self._indices(targets))
            arrays = self._arrays[group]
            parts = self._torch.split(lifted.view(arrays[0].dtype), [array.shape[1] for array in arrays], 1)
            for array, part in zip(arrays, parts, strict=True):
                array.index_copy_(0, indices, part)
            self._wait()

    def _indices(self, found: Iterable[int]) -> Tensor:
        return self._torch.tensor(list(found), device=self._device)

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

    def _staging(self, group: int, count: int) -> Tensor:
        """The first places [count, sizes[group]] of this thread, with nothing on its way to or from them."""
        if not hasattr(self._of_thread, "staged"):
            room = self.most * max(self.sizes)
            self._of_thread.staged = self._torch.empty(room, dtype=self._torch.uint8, pin_memory=self._cuda)
        found: Tensor = self._of_thread.staged[: count * self.sizes[group]].view(count, self.sizes[group])
        return found


def _wide(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Rows of tensors in the widest integers that all of them have a whole number of: fewer are moved faster."""
    import torch

    rows = [array.reshape(len(array), -1).view(torch.uint8) for array in arrays]
    kinds = (
        kind for kind in (torch.int64, torch.int32, torch.int16) if all(r.shape[1] % kind.itemsize == 0 for r in rows)
    )
    kind = next(kinds, torch.uint8)
    return [row.view(kind) for row in rows]


def _rows(array: Any) -> Any:
    """The bytes [rows, bytes of a row] of an array or tensor on the host, which they share."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.reshape(len(array), -1).view(torch.uint8).numpy()
    return array.reshape(len(array), -1).view(np.uint8)
