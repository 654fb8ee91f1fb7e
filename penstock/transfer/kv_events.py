"""KV events as vLLM publishes them: batches over ZeroMQ of blocks that came and went, from a thread of its own.

A message is three frames: topic, number of the batch (8 bytes, big-endian), and an array [seconds since 1970, events,
rank] in msgpack. Numbers without a message are of what was lost.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any, Final

import msgspec
import zmq

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.errors import ConfigError
from penstock.config.kv_events import KVEvents
from penstock.transfer.block_hashes import BlockHasher, as_number
from penstock.transfer.told_blocks import Note, Place, Told, ToldBlocks, chain

log = logging.getLogger(__name__)
_GATHERED_S: Final = 0.005  # what comes within that is told together
_MOST_NOTES: Final = 1024  # of a batch
_MOST_KEPT: Final = 64 << 20  # bytes of batches that can be asked for again
_CLOSING_S: Final = 2.0
_LINGER_MS: Final = 200
_END: Final = (-1).to_bytes(8, "big", signed=True)
_DEVICE: Final = "GPU"  # vLLM's word for the pool, on CPUs too
_KINDS: Final = {
    CacheKind.FULL: "full_attention",
    CacheKind.SLIDING: "sliding_window",
    CacheKind.LATENT: "mla_attention",
    CacheKind.CROSS: "cross_attention",
}
# The fields of events in their order, and what each is where it may be left out.
_STORED: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")


class EventWriter:
    """Makes messages of notes."""

    def __init__(self, asked: KVEvents, hasher: BlockHasher, groups: Sequence[CacheGroup], below: str) -> None:
        """`below` is the medium of the tier below."""
        self._numbers = asked.block_hashes == "int"
        self._maps = asked.layout == "map"
        self._rank = asked.data_parallel_rank
        self._hasher = hasher
        self._groups = groups
        self._below = below

    def batch(self, notes: Sequence[Note], now: float) -> bytes:
        """The events of these notes, as msgpack."""
        return msgspec.msgpack.encode([now, list(self._events(notes)), self._rank])

    def _events(self, notes: Sequence[Note]) -> Iterator[Any]:
        run: list[Told] = []
        before: Note | None = None
        for note in notes:
            if before is not None and not _goes_on(before, note):
                yield self._event(before, run)
                run = []
            if note.told is not None:
                run.append(note.told)
            before = note
        if before is not None:
            yield self._event(before, run)

    def _event(self, note: Note, blocks: Sequence[Told]) -> Any:
        """One event, of blocks that came one after the other or that went."""
        if note.told is None:
            return self._written("AllBlocksCleared", (), {})
        place = note.place
        told: dict[str, Any] = {
            "block_hashes": [self._hash(block) for block in blocks],
            "medium": self._medium(place),
            "group_idx": place.group,
        }
        if not note.stored:
            return self._written("BlockRemoved", _REMOVED, told)
        first, group = blocks[0], self._groups[place.group]
        told |= {
            "parent_block_hash": None if first.before is None else self._hash(first.before),
            "token_ids": [token for block in blocks for token in block.tokens],
            "block_size": len(first.tokens),
            "lora_id": None,
            "lora_name": first.lora,
            "kv_cache_spec_kind": _KINDS[group.kind],
        }
        if any(block.extra for block in blocks):
            told["extra_keys"] = [block.extra for block in blocks]
        if group.window is not None:
            told["kv_cache_spec_sliding_window"] = group.window
        return self._written("BlockStored", _STORED, told)

    def _written(self, kind: str, fields: Sequence[str], told: dict[str, Any]) -> Any:
        if self._maps:
            return {"type": kind, **told}
        return [kind, *(told.get(field) for field in fields)]

    def _medium(self, place: Place) -> str:
        return self._below if place.below else _DEVICE

    def _hash(self, told: Told) -> int | bytes:
        for one in chain(told):
            one.digest = self._hasher.hash(b"" if one.before is None else one.before.digest, one.tokens, one.extra)
        return as_number(told.digest) if self._numbers else told.digest


def _goes_on(before: Note, note: Note) -> bool:
    """Whether a note belongs to the event of the one before it."""
    if before.told is None or note.told is None or (before.stored, before.place) != (note.stored, note.place):
        return False
    return not note.stored or (note.told.before is before.told and note.told.lora == before.told.lora)


class EventPublisher:
    """Publishes what an observer notes. Nobody who notes waits for it."""

    def __init__(self, asked: KVEvents, writer: EventWriter) -> None:
        """Opens the sockets; `start` begins to publish.

        Raises:
            ConfigError: an endpoint cannot be had.
        """
        self._asked = asked
        self._writer = writer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=asked.buffer_steps)
        self._kept_bytes = 0
        self._number = self._lost = 0
        self._awake = self._closing = False
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        try:
            self._events = self._socket(zmq.PUB, asked.endpoint, listens=_listens(asked.endpoint))
            self._replay = self._socket(zmq.ROUTER, asked.replay_endpoint, listens=True)
        except ConfigError:
            self._shut()
            raise
        self._thread: Thread | None = None

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where events, and batches again, are to be had; "" for nowhere."""
        return tuple(socket.get_string(zmq.LAST_ENDPOINT) if socket else "" for socket in (self._events, self._replay))  # type: ignore[return-value]

    def _socket(self, kind: int, endpoint: str | None, *, listens: bool) -> zmq.Socket[bytes] | None:
        if endpoint is None:
            return None
        socket = self._context.socket(kind)
        socket.set_hwm(self._asked.hwm)
        socket.set(zmq.LINGER, _LINGER_MS)
        try:
            if listens:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"--kv-events-config: {endpoint} cannot be used ({error}); each engine needs endpoints of its own."
            ) from None
        return socket

    def wake(self) -> None:
        """There are notes."""
        if not (self._awake or self._closing):
            self._awake = True
            os.write(self._wake, b"\0")

    def start(self, blocks: ToldBlocks) -> None:
        """Publishes what these note from now on."""
        self._thread = Thread(target=self._work, args=(blocks,), name="kv-events", daemon=True)
        self._thread.start()
        self.wake()

    def close(self) -> None:
        """Ends it, once what was noted has been published."""
        self._closing = True
        if self._thread is None:
            self._shut()
            return
        os.write(self._wake, b"\0")
        self._thread.join(_CLOSING_S)

    def _shut(self) -> None:
        self._context.destroy()
        os.close(self._woken)
        os.close(self._wake)

    def _work(self, blocks: ToldBlocks) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._give_again()
            if self._woken in ready:
                time.sleep(_GATHERED_S)
                os.read(self._woken, 4096)
                self._awake = False  # before the notes are looked at: what comes from here on wakes again
                self._guarded(blocks)
        self._guarded(blocks)
        self._shut()

    def _guarded(self, blocks: ToldBlocks) -> None:
        try:
            self._publish(blocks)
        except Exception:
            log.exception("a batch of KV events could not be published")
            self._number += 1

    def _publish(self, blocks: ToldBlocks) -> None:
        while blocks.notes:
            notes = list(_taken(blocks.notes))
            if blocks.lost > self._lost:  # a number is left out, by which subscribers notice
                self._lost = blocks.lost
                self._number += 1
            payload = self._writer.batch(notes, time.time())
            if self._events is not None:
                self._events.send_multipart((self._asked.topic.encode(), self._number.to_bytes(8, "big"), payload))
            self._keep(payload)
            self._number += 1
            blocks.published += 1

    def _keep(self, payload: bytes) -> None:
        if self._kept.maxlen == 0:
            return
        while self._kept and (len(self._kept) == self._kept.maxlen or self._kept_bytes + len(payload) > _MOST_KEPT):
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)

    def _give_again(self) -> None:
        """Sends who asks all batches from a number on, as far as they are kept, and a mark of the end."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((frames[0], b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((frames[0], b"", _END, b""))


def _listens(endpoint: str) -> bool:
    """Whether the PUB socket is bound there, as vLLM has it; else it is connected."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def _taken(notes: deque[Note]) -> Iterator[Note]:
    for _ in range(_MOST_NOTES):
        try:
            yield notes.popleft()
        except IndexError:  # nobody else takes any, but all may be given up
            return
