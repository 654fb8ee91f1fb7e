"""What a server asks of a host of many models, whether that is in its process or in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.frontend import Frontend
from penstock.host.entry import ModelEntry
from penstock.host.names import Names
from penstock.host.remote import RemoteServer
from penstock.host.source import ModelSource


class Lease:
    """One use of a loaded model, which is not unloaded while there are any.

    Attributes:
        name: of the model.
        frontend: what serves it.
    """

    __slots__ = ("_begin", "_end", "frontend", "name")

    def __init__(self, name: str, frontend: Frontend, begin: Callable[[], Callable[[], None]]) -> None:
        """`begin` counts a use, and gives what ends it."""
        self.name, self.frontend = name, frontend
        self._begin = begin
        self._end: Callable[[], None] | None = begin()

    def again(self) -> Lease:
        """Another use of the same, for work that goes on after this one."""
        if self._end is None:
            raise ValueError(f"the lease of {self.name} has been released")
        return Lease(self.name, self.frontend, self._begin)

    def release(self) -> None:
        """Ends the use; safe to call twice."""
        end, self._end = self._end, None
        if end is not None:
            end()


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """How long a model stays after its last use, as a caller says: seconds, 0 for no longer, None for ever."""

    seconds: float | None


class ModelHost(Protocol):
    """Many models by name, which are loaded when they are used. All methods belong to one event loop."""

    @property
    def names(self) -> Names:
        """As they were listed last."""

    @property
    def memory(self) -> int:
        """Bytes that all models may take together."""

    @property
    def has_remotes(self) -> bool:
        """Whether any model is served elsewhere."""

    def entries(self) -> Iterator[ModelEntry]:
        """Every model that was ever used here."""

    def entry(self, source: ModelSource) -> ModelEntry:
        """What is known of a model."""

    def told(self) -> Sequence[ModelEntry]:
        """Every model, in the order of the list; of those not used yet an entry as it would be."""

    def remote(self, source: ModelSource) -> RemoteServer | None:
        """What hands calls for a model on; None for one that is loaded here.

        Raises:
            ModelUnavailableError: its key is missing.
        """

    async def refresh(self, *, anew: bool = False) -> None:
        """Lists the models anew; unless that is known to be needed, not if it was done just now."""

    async def find(self, name: str | None, draw: str = "") -> ModelSource:
        """The model that a call means.

        Raises:
            RequestError: as `Names.model`.
        """

    async def lease(self, source: ModelSource, keep_alive: KeepAlive | None = None) -> Lease:
        """A use of a model, once it is loaded. Cancel it to wait no longer.

        Raises:
            ModelUnavailableError: it could not be loaded, now or just before, or is served elsewhere.
            OverloadedError: too many calls wait for models already.
        """

    async def load(self, source: ModelSource) -> ModelEntry:
        """Loads a model without using it; one whose last load failed is tried at once.

        Raises:
            ModelUnavailableError: it could not be loaded.
        """

    async def begin_load(self, source: ModelSource) -> ModelEntry:
        """Begins to load a model; `entry.state` tells how that goes."""

    async def unload(self, source: ModelSource) -> ModelEntry:
        """Ends a model's engine once nobody uses it, and forgets what it kept; returns when it has gone."""

    async def changed(self, seconds: float) -> None:
        """Returns when something has changed, after so many seconds at the latest."""
