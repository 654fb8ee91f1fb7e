"""Links between processes: a stream socket, on which each message is a head in msgpack and the bytes of its tensors.

The large ones, states and logits, are sent from where they lie and received where they stay: nothing copies them but
the sockets. A thread receives, so that a sender never waits for what the other end computes.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from penstock.config.adapters import AdapterUse
from penstock.core.protocol import CacheOp
from penstock.layers.part import LayerStates
from penstock.runtime.pipeline.links import QueueLink
from penstock.runtime.pipeline.steps import LogitsPart, Message, Placed, StageOps, StageResult, StageStep
from penstock.runtime.ranks import messages
from penstock.runtime.ranks.wire import fill

_LENGTH: Final = struct.Struct("!I")
MOST_HEAD: Final = 2**28  # bytes of a head
MOST_TENSOR: Final = 2**33  # bytes of one tensor
BUFFER: Final = 4 << 20  # bytes that a socket may hold of what is sent


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose bytes follow: the name of its type and its shape."""

    kind: str
    shape: tuple[int, ...]


class _Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A StageStep. `kept`: the states, of which `streams` are streams and the last are vectors if `vectors`; taps."""

    number: int
    ops: tuple[CacheOp, ...]
    batch: messages.Forward
    logits: tuple[messages.Array | None, ...]
    hidden: bool
    streams: int | None
    vectors: bool
    taps: tuple[str, ...]
    seconds: tuple[float, ...]
    error: str | None
    places: tuple[Placed, ...]
    kept: tuple[_Kept, ...]


class _Result(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A StageResult. `kept`: logits and final states, if there are such, and taps."""

    number: int
    logits: bool
    hidden: bool
    taps: tuple[str, ...]
    seconds: tuple[float, ...]
    error: str | None
    kept: tuple[_Kept, ...]


class _Part(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A LogitsPart. `kept`: its values, if there are any."""

    number: int
    call: int
    error: str | None
    kept: tuple[_Kept, ...]


class _Ops(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A StageOps. `kept`: nothing."""

    ops: tuple[CacheOp, ...]
    places: tuple[Placed, ...]
    reads: tuple[AdapterUse, ...]
    kept: tuple[_Kept, ...] = ()


_Head = _Step | _Ops | _Result | _Part
_encoder = msgspec.msgpack.Encoder()
_heads: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)


class WireLink:
    """One end of a socket, to send or to receive."""

    def __init__(self, end: socket.socket, room: int) -> None:
        """`room`: messages that have come and nobody has taken, from which on the other end waits."""
        self._socket = end
        with suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._arrived = QueueLink(room)
        self._reader: threading.Thread | None = None

    def send(self, message: Message) -> None:
        head, tensors = _split(message)
        data = _encoder.encode(head)
        parts = [_LENGTH.pack(len(data)), data, *map(_bytes_of, tensors)]
        with suppress(OSError):  # whoever was to read it has ended, and those who watch that process know
            _send_all(self._socket, parts)

    def receive(self) -> Message | None:
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, name="penstock-stage-link", daemon=True)
            self._reader.start()
        return self._arrived.receive()

    def close(self) -> None:
        self._arrived.close()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while (message := self._next()) is not None:
                self._arrived.send(message)
        finally:
            self._arrived.end()

    def _next(self) -> Message | None:
        head = bytearray(_LENGTH.size)
        if not fill(self._socket, memoryview(head)):
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MOST_HEAD:
            raise ValueError(f"a head of {length} bytes is over the {MOST_HEAD} bytes that one may have")
        data = bytearray(length)
        if not fill(self._socket, memoryview(data)):
            return None
        found = _heads.decode(data)
        tensors = [_made(kept) for kept in found.kept]
        for tensor in tensors:
            if not fill(self._socket, _bytes_of(tensor)):
                return None
        return _joined(found, tensors)


def _split(message: Message) -> tuple[_Head, list[Tensor]]:
    """A head, and the tensors that follow it."""
    if isinstance(message, StageOps):
        return _Ops(message.ops, message.places, message.reads), []
    if isinstance(message, LogitsPart):
        tensors = [] if message.values is None else [message.values]
        return _Part(message.number, message.call, message.error, _kept(tensors)), tensors
    taps = tuple(message.taps)
    tapped = [message.taps[name] for name in taps]
    if isinstance(message, StageResult):
        tensors = [one for one in (message.logits, message.hidden) if one is not None] + tapped
        logits, hidden = message.logits is not None, message.hidden is not None
        return _Result(message.number, logits, hidden, taps, message.seconds, message.error, _kept(tensors)), tensors
    states = message.states
    tensors = [*(states.tensors() if states else ()), *tapped]
    head = _Step(
        number=message.number,
        ops=message.ops,
        batch=messages.forward(message.batch),
        logits=tuple(None if rows is None else messages.array(np.asarray(rows, np.int64)) for rows in message.logits),
        hidden=message.hidden,
        streams=None if states is None else len(states.streams),
        vectors=states is not None and states.per_layer_embeddings is not None,
        taps=taps,
        seconds=message.seconds,
        error=message.error,
        places=message.places,
        kept=_kept(tensors),
    )
    return head, tensors


def _joined(head: _Head, tensors: list[Tensor]) -> Message:
    """What `_split` was given."""
    if isinstance(head, _Ops):
        return StageOps(head.ops, head.places, head.reads)
    if isinstance(head, _Part):
        return LogitsPart(head.number, head.call, tensors[0] if tensors else None, head.error)
    first = len(tensors) - len(head.taps)
    taps = dict(zip(head.taps, tensors[first:], strict=True))
    if isinstance(head, _Result):
        given = iter(tensors)
        logits = next(given) if head.logits else None
        hidden = next(given) if head.hidden else None
        return StageResult(head.number, logits, hidden, taps, head.seconds, head.error)
    states = None
    if head.streams is not None:
        vectors = tensors[1 + head.streams] if head.vectors else None
        states = LayerStates(tensors[0], tuple(tensors[1 : 1 + head.streams]), vectors)
    return StageStep(
        number=head.number,
        ops=head.ops,
        batch=messages.batch_of(head.batch),
        logits=tuple(None if rows is None else messages.tensor(rows).numpy() for rows in head.logits),
        hidden=head.hidden,
        states=states,
        taps=taps,
        seconds=head.seconds,
        error=head.error,
        places=head.places,
    )


def _kept(tensors: Iterable[Tensor]) -> tuple[_Kept, ...]:
    return tuple(_Kept(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors)


def _made(kept: _Kept) -> Tensor:
    """Memory for a tensor that follows.

    Raises:
        ValueError: it is of no known type, or larger than any may be.
    """
    if kept.kind not in messages.ARRAYS or min(kept.shape, default=0) < 0:
        raise ValueError(f"a tensor of {kept.kind!r} and shape {kept.shape}; known: {', '.join(messages.ARRAYS)}")
    kind: torch.dtype = getattr(torch, kept.kind)
    if (size := int(np.prod(kept.shape, dtype=object)) * kind.itemsize) > MOST_TENSOR:
        raise ValueError(f"a tensor of {size} bytes is over the {MOST_TENSOR} bytes that one may have")
    return torch.empty(kept.shape, dtype=kind)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


def _send_all(end: socket.socket, parts: Sequence[Any]) -> None:
    """Sends parts one behind the other, from where they lie."""
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    while left:
        sent = end.sendmsg(left[:64])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if left and sent:
            left[0] = left[0][sent:]
