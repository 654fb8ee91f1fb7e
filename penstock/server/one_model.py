"""A server of one model, which is there from the start to the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from penstock.config.errors import ModelNotFoundError, format_value
from penstock.core.request import EngineStats
from penstock.engine.api import EngineState
from penstock.server.context import ModelContext

if TYPE_CHECKING:
    from penstock.engine.api import EngineClient
    from penstock.host.host import KeepAlive


class OneModel:
    """`ServedModels` of one; `keep_alive` has no effect on it."""

    host = None

    def __init__(self, model: ModelContext) -> None:
        self._model = model

    @property
    def state(self) -> EngineState:
        return self._model.frontend.client.state

    def names(self) -> Sequence[str]:
        return (self._model.model,)

    async def use(
        self, request: Request, name: str | None, keep_alive: KeepAlive | None, *, events: bool
    ) -> ModelContext:
        if name is not None and name != self._model.model:
            raise self.unknown(name)
        return self._model

    def unknown(self, name: str) -> ModelNotFoundError:
        message = f"The model {format_value(name)} is not served here; available: {format_value(self._model.model)}."
        return ModelNotFoundError(message, param="model", code="model_not_found")

    def all(self) -> Sequence[ModelContext]:
        return (self._model,)

    def engines(self) -> Mapping[str, EngineClient]:
        return {self._model.model: self._model.frontend.client}

    def past(self) -> Mapping[str, EngineStats]:
        return {}

    def check_room(self, owner: str) -> None:
        self._model.frontend.client.check_room(owner)
