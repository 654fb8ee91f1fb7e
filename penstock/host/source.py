"""What a host is told of its models: where each comes from, and how long it stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from penstock.config.options import EngineOptions


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that another server serves through OpenAI's API.

    Attributes:
        url: what its paths are put behind, as clients know it: "https://api.example.com/v1".
        model: its name there.
        key_from: the environment variable that holds its key; None for none.
        connect_timeout: seconds to be connected.
        timeout: seconds to the first byte of an answer, and between two of them.
        retries: times that a call is sent again while nothing of its answer has come.
    """

    url: str
    model: str
    key_from: str | None = None
    connect_timeout: float = 5.0
    timeout: float = 120.0
    retries: int = 2


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model as it was listed: loaded here with `options`, or served elsewhere (`remote`).

    Attributes:
        name: what clients call it.
        options: of its engine; None for one that is served elsewhere.
        remote: where it is served; None for one that is loaded here.
        aliases: other names and, where several models share one, this one's part of the calls.
        pinned: loaded at start, and never unloaded for others.
        ttl: seconds without a call until it sleeps; None for the host's.
    """

    name: str
    options: EngineOptions | None = None
    remote: RemoteModel | None = None
    aliases: tuple[tuple[str, float], ...] = ()
    pinned: bool = False
    ttl: float | None = None


Sources = Callable[[], Mapping[str, ModelSource]]
"""The models there are now, by name: of a file, a folder, or a library."""
