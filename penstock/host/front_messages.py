"""What a host and its HTTP processes tell each other, over a pair of sockets that ends with either."""

from __future__ import annotations

import asyncio
import struct
from enum import Enum

import msgspec

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelUnavailableError, OverloadedError, PenstockError, RequestError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.engine.api import EngineInfo
from penstock.host.entry import Failure, ModelState
from penstock.host.model_host import KeepAlive
from penstock.host.source import ModelSource

_HEAD = struct.Struct("<I")
_MAX_BYTES = 2**26  # of a message: the requests that an engine worked on are the longest


class FrontLaunch(msgspec.Struct, frozen=True, tag=True):
    """The first message to an HTTP process.

    Attributes:
        engine: its options; None where a host has many models.
        server: options.
        client: its name among the engine's clients, which no other had before.
        place: its number among the processes there are.
        folder: its own, beside those of the others.
        listener: file descriptor of the socket on which it answers.
        memory: bytes that all models of a host may take together.
    """

    engine: EngineOptions | None
    server: ServerOptions
    client: str
    place: int
    folder: str
    listener: int
    memory: int = 0


class Serving(msgspec.Struct, frozen=True, tag=True):
    """An engine takes commands at this endpoint; the requests there are wait for `Turn`.

    `generation` is its number among the engines there were, `past` what those before it counted. `model`, here and
    below, says which engine of a host is meant: it is its model's name, and empty where there is one engine.
    """

    generation: int
    info: EngineInfo
    commands: str
    past: EngineStats
    model: str = ""


class Turn(msgspec.Struct, frozen=True, tag=True):
    """The requests of this process may go on in the engine that it was told of."""

    model: str = ""


class Silent(msgspec.Struct, frozen=True, tag=True):
    """Whether nothing has been heard of the engine for a while."""

    silent: bool
    model: str = ""


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine has gone. It worked on these requests; None where nobody knows on which."""

    worked_on: list[str] | None
    model: str = ""


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """There will be no engine any more, unless a host starts another one."""

    why: str
    model: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """New requests are refused, running ones may finish; `now` ends them."""

    now: bool = False


class TellFigures(msgspec.Struct, frozen=True, tag=True):
    """`OwnFigures` are wanted."""


class Figures(msgspec.Struct, frozen=True, tag=True):
    """Answer to AskFigures: what engines have counted, by model, and what all HTTP processes have, also those that are
    gone.
    """

    number: int
    stats: dict[str, EngineStats]
    counted: bytes


class TellRequests(msgspec.Struct, frozen=True, tag=True):
    """`OwnRequests` are wanted, of one owner or of all (None), with this number; or what an order of that owner about
    what is called `name` comes to."""

    round: int
    owner: str | None
    order: str = ""
    name: str = ""


class Requests(msgspec.Struct, frozen=True, tag=True):
    """Answer to AskRequests: what each process told, JSON."""

    number: int
    told: list[bytes]


class Listed(msgspec.Struct, frozen=True, tag=True):
    """The models of a host there are now, by name."""

    sources: dict[str, ModelSource]


class ModelTold(msgspec.Struct, frozen=True):
    """What is known of a host's model; fields as those of `ModelEntry`, times in monotonic seconds of this machine."""

    source: ModelSource
    state: ModelState
    uses: int
    waiting: int
    leaving: bool
    keep_alive: float | None
    used_at: float
    expires_at: float | None
    progress: tuple[int, int]
    failure: Failure | None
    loads: int
    planned: int
    generates: bool


class Models(msgspec.Struct, frozen=True, tag=True):
    """What has changed of a host's models since it was told last."""

    told: list[ModelTold]


class Refusal(msgspec.Struct, frozen=True):
    """A RequestError: its class's name and its fields."""

    kind: str
    message: str
    param: str | None
    code: str | None
    retry_after: int | None


class Answered(msgspec.Struct, frozen=True, tag=True):
    """What was asked under this number is done, or refused."""

    number: int
    refusal: Refusal | None = None


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
    model: str = ""


class Wanted(str, Enum):
    """What an HTTP process asks its host for. A LEASE ends with `GiveUp`."""

    LEASE = "lease"
    LOAD = "load"
    BEGIN_LOAD = "begin_load"
    UNLOAD = "unload"
    REFRESH = "refresh"


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Something is wanted of a host's model; `Answered` with this number says that it is there, or why not.

    Attributes:
        number: no other of this process has it.
        wanted: what.
        model: its name; empty for a list of all.
        keep_alive: of a lease.
        anew: the list is known to have changed.
    """

    number: int
    wanted: Wanted
    model: str = ""
    keep_alive: KeepAlive | None = None
    anew: bool = False


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """What was asked under this number is wanted no more; a lease that was given has ended."""

    number: int


class AskFigures(msgspec.Struct, frozen=True, tag=True):
    """`Figures` with this number are wanted."""

    number: int


class AskRequests(msgspec.Struct, frozen=True, tag=True):
    """`Requests` with this number are wanted: the last ones for models, of one owner or of all (None); or what all
    processes answer to an order, see TellRequests."""

    number: int
    owner: str | None
    order: str = ""
    name: str = ""


class OwnRequests(msgspec.Struct, frozen=True, tag=True):
    """The last requests of this process, or what an order came to: JSON."""

    round: int
    requests: bytes


class OwnFigures(msgspec.Struct, frozen=True, tag=True):
    """What this process has counted, in Prometheus' text format; what the engine counts is 0 in it."""

    counted: bytes


OfEngine = Serving | Turn | Silent | Died | Stopped
OfHost = Listed | Models | Answered
OfSiblings = TellFigures | Figures | TellRequests | Requests
Down = FrontLaunch | OfEngine | OfHost | OfSiblings | Drain
Up = Listening | Alive | Failed | Through | Ask | GiveUp | AskFigures | OwnFigures | AskRequests | OwnRequests
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


_REFUSALS = (ModelUnavailableError, OverloadedError)


def refusal(error: RequestError) -> Refusal:
    """What carries a refusal."""
    return Refusal(type(error).__name__, str(error), error.param, error.code, getattr(error, "retry_after", None))


def refusal_error(told: Refusal) -> RequestError:
    """The error that was carried, of the same HTTP status."""
    for kind in _REFUSALS:
        if kind.__name__ == told.kind:
            error: RequestError = kind(told.message, retry_after=told.retry_after or 1)
            error.param, error.code = told.param, told.code
            return error
    return RequestError(told.message, param=told.param, code=told.code)
