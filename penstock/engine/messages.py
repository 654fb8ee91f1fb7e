"""What crosses between the engine process and its client: tagged msgpack, one message a frame, never pickle.

Commands go down (client → engine), events come up. Whatever does not decode to one of the types below is a
MessageError, which a receiver logs and drops: a foreign frame never ends an engine or a client.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    MemoryPlanError,
    OverloadedError,
    PenstockError,
    RequestError,
    TemplateError,
)
from penstock.config.options import EngineOptions
from penstock.core.policies.pace import Pace
from penstock.core.policies.pause import Control
from penstock.core.request import EngineOutput, EngineRequest
from penstock.engine.api import EngineInfo
from penstock.engine.so_far import SoFar

MAX_FRAME_BYTES = 128 * 2**20
"""Longest frame either side accepts, bytes: a prompt of 16 Mi tokens fits."""


class MessageError(PenstockError):
    """A frame that is no message of this protocol, or a message that cannot be sent."""


class Launch(msgspec.Struct, frozen=True):
    """First and only thing on the engine process's standard input.

    Attributes:
        options: what engine to build.
        commands: endpoint the process binds and receives commands from.
        events: endpoint it sends events to.
        work: path of the record of requests that are worked on.
        parent: process id of the client; the engine ends when that process does.
        cores: descriptor of the file in which engines of one host note who works (`config.cores`); None for one alone.
        place: its own there.
        prefixes: the seed of names by which it tells what it has cached (`transfer.prefix_names`); "" to tell nothing.
    """

    options: EngineOptions
    commands: str
    events: str
    work: str
    parent: int
    cores: int | None = None
    place: int = 0
    prefixes: str = ""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request, which goes on from what is known of its answers if it began in another engine."""

    request: EngineRequest
    so_far: SoFar | None = None


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request's sequences; unknown ids are ignored."""

    request_id: str


class EndReasoning(msgspec.Struct, frozen=True, tag=True):
    """End the reasoning of a request that has a budget of it, so that its answer begins; unknown ids are ignored."""

    request_id: str


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Pause, go on, or forget cached prefixes."""

    control: Control


class StatsQuery(msgspec.Struct, frozen=True, tag=True):
    """Send a Stats event to a client."""

    client: str = ""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A further client: news of its requests, whose ids begin with `prefix(client)`, go to this endpoint."""

    client: str
    events: str


class Detach(msgspec.Struct, frozen=True, tag=True):
    """A client has gone: its requests end; unknown ones are ignored."""

    client: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Loading goes on: `done` of `total` bytes of weights."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on."""

    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step produced."""

    outputs: list[EngineOutput]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A submitted request was not admitted; the fields are those of the RequestError raised."""

    request_id: str
    kind: str
    message: str
    param: str | None
    code: str | None


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Answer to a StatsQuery."""

    stats: EngineStats


class Paced(msgspec.Struct, frozen=True, tag=True):
    """How fast the engine works."""

    pace: Pace


class Prefixes(msgspec.Struct, frozen=True, tag=True):
    """Names of blocks that can be found now, and less than 0 of those that cannot any more, in order."""

    news: list[int]


class Unattached(msgspec.Struct, frozen=True, tag=True):
    """To the first client: another one, which asked to be attached, cannot be told anything."""

    client: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The process runs (even while it loads or a step takes long)."""


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """Last words: why the process ends. `kind` is the error's class name."""

    kind: str
    message: str


Command = Submit | Cancel | EndReasoning | Tell | StatsQuery | Attach | Detach
Event = Progress | Ready | Outputs | Refused | Stats | Paced | Prefixes | Unattached | Heartbeat | Fatal

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_events: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_launch = msgspec.msgpack.Decoder(Launch)
_REFUSALS = (ContextLengthError, OverloadedError)
_FATALS = (ConfigError, CheckpointError, MemoryPlanError, TemplateError)


def encode(message: Command | Event | Launch) -> bytes:
    """One frame.

    Raises:
        MessageError: a value has no place in msgpack (an integer above 64 bits, a lone surrogate), or the frame
            would be longer than MAX_FRAME_BYTES.
    """
    try:
        frame = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"a {type(message).__name__} message cannot be encoded: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise MessageError(f"a message of {len(frame)} bytes is over the {MAX_FRAME_BYTES} bytes a frame may have")
    return frame


def decode_command(frame: bytes) -> Command:
    """Raises MessageError if the frame is no command; the checks of SamplingParams apply here too."""
    return _decode(_commands, frame)


def decode_event(frame: bytes) -> Event:
    """Raises MessageError if the frame is no event."""
    return _decode(_events, frame)


def decode_launch(frame: bytes) -> Launch:
    """Raises MessageError if the bytes are no Launch."""
    return _decode(_launch, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, PenstockError, ValueError, RecursionError) as error:
        raise MessageError(f"a frame of {len(frame)} bytes is no message: {error}") from error


def refusal(request_id: str, error: RequestError) -> Refused:
    """The message that carries a refusal."""
    return Refused(request_id, type(error).__name__, str(error), error.param, error.code)


def refusal_error(message: Refused) -> RequestError:
    """The error a Refused message carries, of the same HTTP status as the one raised in the engine."""
    for kind in _REFUSALS:
        if kind.__name__ == message.kind:
            error: RequestError = kind(message.message)
            error.param, error.code = message.param, message.code
            return error
    return RequestError(message.message, param=message.param, code=message.code)


def fatal_error(message: Fatal) -> PenstockError:
    """The error a Fatal message carries: of its own class where that is one a person can act on."""
    for kind in _FATALS:
        if kind.__name__ == message.kind:
            return kind(message.message)
    return EngineDeadError(message.message)
