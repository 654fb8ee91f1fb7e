"""A server of one model, which is there from the start to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelNotFoundError, format_value
from penstock.engine.api import EngineState
from penstock.host.adapters import AdapterNames
from penstock.server.context import ModelContext

if TYPE_CHECKING:
    from penstock.engine.api import EngineClient
    from penstock.host.model_host import KeepAlive

_LISTED = 20  # adapters named in a message


class OneModel:
    """`ServedModels` of one; `keep_alive` has no effect on it."""

    host = None

    def __init__(self, model: ModelContext, aliases: Sequence[str] = (), *, any_name: bool = False) -> None:
        """It answers under its own name, these, or `any_name`."""
        self._model = model
        self._aliases, self._any = tuple(aliases), any_name

    @property
    def state(self) -> EngineState:
        return self._model.frontend.client.state

    @property
    def adapters(self) -> AdapterNames:
        return self._model.adapters

    def names(self) -> Sequence[str]:
        return (self._model.model, *self._aliases)

    async def use(
        self, request: Request, name: str | None, keep_alive: KeepAlive | None, *, events: bool
    ) -> ModelContext:
        if (adapter := self._model.adapters.meant(name, self._own)) is not None:
            return self._model.adapted(adapter.name)
        if name is not None and not self._any and name not in self.names():
            raise self.unknown(name)
        return self._model.usual()

    def _own(self, name: str) -> str | None:
        return self._model.model if name in self.names() else None

    def unknown(self, name: str) -> ModelNotFoundError:
        adapters = [adapter.name for adapter in self._model.adapters.all()]
        listed = (*self.names(), *adapters[:_LISTED])
        known = ", ".join(map(format_value, listed)) + (", …" if len(adapters) > _LISTED else "")
        message = f"The model {format_value(name)} is not served here; available: {known}."
        return ModelNotFoundError(message, param="model", code="model_not_found")

    def all(self) -> Sequence[ModelContext]:
        return (self._model,)

    def engines(self) -> Mapping[str, EngineClient]:
        return {self._model.model: self._model.frontend.client}

    def past(self) -> Mapping[str, EngineStats]:
        return {}

    def check_room(self, owner: str) -> None:
        self._model.frontend.client.check_room(owner)
