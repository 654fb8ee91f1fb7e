"""The bytes of a block: all that its layers keep of it, one piece after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.runtime.kv_memory import KVMemory

Bytes = bytes | bytearray | memoryview


class Pieces:
    """Reads and writes what layers keep of blocks, wherever that memory is.

    Attributes:
        sizes: bytes of a block, by cache group; of a recurrent state behind all groups of blocks.
        states: the number of that group; -1 without such states.
    """

    def __init__(self, memory: KVMemory, device: str | None) -> None:
        """`device` of torch; None, or "cpu", where the memory is the host's."""
        self._stream: Any = None
        self._host = device is None or device == "cpu"
        if device is not None and not self._host:
            import torch

            if torch.device(device).type == "cuda":
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        groups = [memory.arrays(group) for group in range(memory.num_groups)]
        self._arrays = [[_rows(array) for array in arrays] if self._host else arrays for arrays in groups]
        self.states = memory.num_groups - 1 if memory.has_states else -1
        self.sizes = tuple(sum(int(array[0].nbytes) for array in arrays) for arrays in groups)

    def read(self, group: int, index: int) -> list[Bytes]:
        """The bytes of a block (or state slot), without a copy where they are on the host."""
        if self._host:
            return [array[index].data for array in self._arrays[group]]
        return [self._from_device([array[index] for array in self._arrays[group]])]

    def write(self, group: int, index: int, data: Bytes) -> None:
        """Sets the bytes of a block (or state slot), which are `sizes[group]` many."""
        pieces = [array[index] for array in self._arrays[group]]
        source = np.frombuffer(data, np.uint8)
        if not self._host:
            self._to_device(pieces, source)
            return
        start = 0
        for piece in pieces:
            piece[:] = source[start : start + piece.size]
            start += piece.size

    def _from_device(self, pieces: Sequence[Any]) -> bytes:
        import torch

        with torch.cuda.stream(self._stream):  # of None: the one that is current
            found = torch.cat([piece.reshape(-1).view(torch.uint8) for piece in pieces]).cpu()
        return bytes(found.numpy().data)

    def _to_device(self, pieces: Sequence[Any], source: Any) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            found = torch.from_numpy(source.copy()).to(pieces[0].device)
            start = 0
            for piece in pieces:
                target = piece.reshape(-1).view(torch.uint8)
                target.copy_(found[start : start + target.numel()])
                start += target.numel()
        if self._stream is not None:
            self._stream.synchronize()


def _rows(array: Any) -> Any:
    """The bytes [rows, bytes of a row] of an array or tensor on the host, which they share."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.reshape(len(array), -1).view(torch.uint8).numpy()
    return array.reshape(len(array), -1).view(np.uint8)
