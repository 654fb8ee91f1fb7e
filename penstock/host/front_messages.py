"""What a host and its HTTP processes tell each other, over a pair of sockets that ends with either."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from penstock.config.errors import PenstockError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.core.request import EngineStats
from penstock.engine.api import EngineInfo

_HEAD = struct.Struct("<I")
_MAX_BYTES = 2**26  # of a message: the requests that an engine worked on are the longest


class FrontLaunch(msgspec.Struct, frozen=True, tag=True):
    """The first message to an HTTP process.

    Attributes:
        engine, server: options.
        client: its name among the engine's clients, which no other had before.
        place: its number among the processes there are.
        folder: its own, beside those of the others.
        listener: file descriptor of the socket on which it answers.
    """

    engine: EngineOptions
    server: ServerOptions
    client: str
    place: int
    folder: str
    listener: int


class Serving(msgspec.Struct, frozen=True, tag=True):
    """An engine takes commands at this endpoint; the requests there are wait for `Turn`.

    `generation` is its number among the engines there were, `past` what those before it counted.
    """

    generation: int
    info: EngineInfo
    commands: str
    past: EngineStats


class Turn(msgspec.Struct, frozen=True, tag=True):
    """The requests of this process may go on in the engine that it was told of."""


class Silent(msgspec.Struct, frozen=True, tag=True):
    """Whether nothing has been heard of the engine for a while."""

    silent: bool


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine has gone. It worked on these requests; None where nobody knows on which."""

    worked_on: list[str] | None


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """There will be no engine any more."""

    why: str


class Drain(msgspec.Struct, frozen=True, tag=True):
    """New requests are refused, running ones may finish; `now` ends them."""

    now: bool = False


class TellFigures(msgspec.Struct, frozen=True, tag=True):
    """`OwnFigures` are wanted."""


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Answer to AskFigures: what the engine has counted, and what all HTTP processes have, also those that are gone."""

    number: int
    stats: EngineStats
    counted: bytes


class Listening(msgspec.Struct, frozen=True, tag=True):
    """An HTTP process answers."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """Its event loop runs."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last words: what has to be done about it, in a sentence."""

    why: str


class Through(msgspec.Struct, frozen=True, tag=True):
    """The requests of an HTTP process have gone on in the engine of this number."""

    generation: int


class AskFigures(msgspec.Struct, frozen=True, tag=True):
    """`Figures` with this number are wanted."""

    number: int


class OwnFigures(msgspec.Struct, frozen=True, tag=True):
    """What this process has counted, in Prometheus' text format; what the engine counts is 0 in it."""

    counted: bytes


Down = FrontLaunch | Serving | Turn | Silent | Died | Stopped | Drain | TellFigures | Figures
Up = Listening | Alive | Failed | Through | AskFigures | OwnFigures
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_encoder = msgspec.msgpack.Encoder()


def write(writer: asyncio.StreamWriter, message: Down | Up) -> None:
    """Sends a message; nothing where the other side has gone."""
    body = _encoder.encode(message)
    if not writer.is_closing():
        writer.write(_HEAD.pack(len(body)) + body)


async def read_down(reader: asyncio.StreamReader) -> Down | None:
    """The next message to an HTTP process; None once the host has gone."""
    body = await _read(reader)
    return None if body is None else _down.decode(body)


async def read_up(reader: asyncio.StreamReader) -> Up | None:
    """The next message of an HTTP process; None once it has gone."""
    body = await _read(reader)
    return None if body is None else _up.decode(body)


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (length,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if length > _MAX_BYTES:
            raise PenstockError(f"a message of {length} bytes between processes is over {_MAX_BYTES}")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
