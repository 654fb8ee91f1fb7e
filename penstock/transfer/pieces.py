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
        self._memory = memory
        self._stream: Any = None
        if device is not None and device != "cpu":
            import torch

            if torch.device(device).type == "cuda":
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._host = False
        else:
            self._host = True
        self.states = memory.num_groups - 1 if memory.has_states else -1
        self.sizes = tuple(sum(_size(piece) for piece in memory.pieces(g, 0)) for g in range(memory.num_groups))

    def read(self, group: int, index: int) -> list[Bytes]:
        """The bytes of a block (or state slot), without a copy where they are on the host."""
        pieces = self._memory.pieces(group, index)
        if self._host:
            return [memoryview(_host_bytes(piece)) for piece in pieces]
        return [self._from_device(pieces)]

    def write(self, group: int, index: int, data: Bytes) -> None:
        """Sets the bytes of a block (or state slot), which are `sizes[group]` many."""
        pieces = self._memory.pieces(group, index)
        source = np.frombuffer(data, np.uint8)
        if not self._host:
            self._to_device(pieces, source)
            return
        start = 0
        for piece in pieces:
            target = _host_bytes(piece)
            target[:] = source[start : start + target.size]
            start += target.size

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


def _size(piece: Any) -> int:
    return int(piece.nbytes)


def _host_bytes(piece: Any) -> Any:
    """A numpy array of the bytes of an array or tensor on the host, which it shares."""
    if isinstance(piece, np.ndarray):
        return piece.reshape(-1).view(np.uint8)
    import torch

    return piece.reshape(-1).view(torch.uint8).numpy()
