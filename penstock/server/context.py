"""What request handlers work with: a server's context, the models it serves, and one of these while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request

from penstock.config.counting import together
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import (
    EngineDeadError,
    ModelNotFoundError,
    ParameterError,
    PenstockError,
    RequestError,
    format_value,
)
from penstock.engine.api import EngineState
from penstock.host.adapters import AdapterNames
from penstock.host.figures import summed
from penstock.server.errors import not_ready
from penstock.server.habits import Habits
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import EngineFigures, Metrics, ModelMetrics
from penstock.server.orders import Orders
from penstock.server.siblings import Siblings

if TYPE_CHECKING:
    from penstock.engine.api import EngineClient
    from penstock.engine.frontend import Frontend
    from penstock.host.front_messages import Figures
    from penstock.host.model_host import KeepAlive, Lease, ModelHost
    from penstock.server.adapter_fields import AdapterScale
    from penstock.server.tools.connected import ServerTools


@dataclass(frozen=True, slots=True)
class ModelContext:
    """A model for as long as a request is answered by it.

    Attributes:
        frontend: what serves it.
        lifecycle: of the server.
        metrics: its figures.
        trust_request_chat_template: requests may bring a template of their own.
        lease: what keeps it from being unloaded; None where it stays anyway.
        adapters: those that requests may name, of all models.
        base: the model's own name, also where it answers with an adapter under that of the adapter.
    """

    frontend: Frontend
    lifecycle: Lifecycle
    metrics: ModelMetrics
    trust_request_chat_template: bool = False
    lease: Lease | None = None
    adapters: AdapterNames = field(default_factory=AdapterNames)
    base: str = ""

    @property
    def model(self) -> str:
        """The name clients use."""
        return self.frontend.served_name

    def adapted(self, name: str, param: str = "model") -> ModelContext:
        """The same with the adapter of that name, under which it answers.

        Raises:
            ModelNotFoundError: there is none of this model.
        """
        found = self.adapters.find(name)
        if found is None or found.base != self.base:
            of = "" if found is None else f" of {format_value(self.base)}: it is one of {format_value(found.base)}"
            message = f"There is no adapter {format_value(name)} here{of}; GET /v1/models lists those there are."
            raise ModelNotFoundError(message, param=param, code="adapter_not_found")
        return replace(self, frontend=self.frontend.adapted(name, (found.use,)))

    def weighted(self, scales: Iterable[tuple[int, float]], param: str = "lora") -> ModelContext:
        """The same with adapters by their numbers, each with a weight, and no others; raises ParameterError."""
        found = self.adapters.weighted(scales, param, self.base)
        return replace(self, frontend=self.frontend.adapted(self.base, found))

    def usual(self) -> ModelContext:
        """The same as it answers where nothing is said of adapters: with those that count unasked."""
        unasked = self.adapters.unasked(self.base)
        return replace(self, frontend=self.frontend.adapted(self.base, unasked)) if unasked else self

    def again(self) -> ModelContext:
        """The same for work that goes on after the request; to be released."""
        return self if self.lease is None else replace(self, lease=self.lease.again())

    def release(self) -> None:
        """Ends the use that `again` began; safe to call twice."""
        if self.lease is not None:
            self.lease.release()

    def max_model_len(self) -> int | None:
        """Longest prompt plus output, tokens; None before the engine has told."""
        with suppress(EngineDeadError):
            return self.frontend.info.max_model_len
        return None

    def check_template(self, given: str | None) -> None:
        """Raises RequestError for a template that is not the model's, unless requests may bring their own."""
        names = self.frontend.text.template.sources if self.frontend.text.template else {}
        if given is not None and given not in names and not self.trust_request_chat_template:
            raise RequestError(
                f"chat_template is not one of the model's own ({', '.join(sorted(names)) or 'it has none'}), and this "
                "server takes no other; leave it out, or start the server with --trust-request-chat-template.",
                param="chat_template",
                code="invalid_value",
            )

    @property
    def asleep(self) -> bool:
        """Whether its engine sleeps."""
        return self.frontend.client.state is EngineState.SLEEPING

    def require_ready(self, *, or_asleep: bool = False) -> None:
        """Raises HttpError 503 with Retry-After when new work cannot be taken; `or_asleep`: unless it sleeps."""
        state = self.frontend.client.state
        if or_asleep and self.asleep:
            return
        if self.lifecycle.draining:
            raise not_ready("The server is shutting down; send the request to another one.", "shutting_down")
        if state is EngineState.STARTING:
            raise not_ready("The model is still loading; retry shortly.", "not_ready", 2)
        if state is EngineState.SLEEPING:
            raise not_ready("The engine sleeps; POST /wake_up, then send it again.", "sleeping", 5)
        if state is not EngineState.READY:
            raise not_ready("The engine is restarting; retry shortly.", "engine_unavailable", 2)


class ServedModels(Protocol):
    """The models of a server: the one it was started with, or those of a host."""

    @property
    def state(self) -> EngineState:
        """Whether requests are taken."""

    @property
    def host(self) -> ModelHost | None:
        """The host of many models; None where there is one."""

    @property
    def adapters(self) -> AdapterNames:
        """The adapters of all models."""

    def names(self) -> Sequence[str]:
        """Every name that a request may use."""

    def unknown(self, name: str) -> ModelNotFoundError:
        """What a client is told of a name that is none of them."""

    async def use(
        self, request: Request, name: str | None, keep_alive: KeepAlive | None, *, events: bool
    ) -> ModelContext:
        """The model of that name until the request has been answered; None means the one model there is.

        Raises:
            RequestError: there is none of that name, or it cannot be loaded.
        """

    def all(self) -> Sequence[ModelContext]:
        """The models whose text side is there, in no use: the one there is, or those that are ready."""

    def engines(self) -> Mapping[str, EngineClient]:
        """Engines that are there, by the names of their models."""

    def past(self) -> Mapping[str, EngineStats]:
        """What engines that are gone have counted, by the names of their models."""

    def check_room(self, owner: str) -> None:
        """Raises OverloadedError while so much work waits that a call need not be looked at."""


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What request handlers of all models work with."""

    models: ServedModels
    lifecycle: Lifecycle
    metrics: Metrics
    trust_request_chat_template: bool = False
    siblings: Siblings | None = None
    shows_slots: bool = True
    changes_props: bool = False
    habits: Habits = field(default_factory=Habits)
    tools: ServerTools | None = None
    orders: Orders = field(default_factory=Orders)

    async def model(
        self,
        request: Request,
        name: str | None,
        keep_alive: KeepAlive | None = None,
        *,
        events: bool | None = False,
        lora: Sequence[AdapterScale] | None = None,
        adapter: str | None = None,
    ) -> ModelContext:
        """The model that a request is for, which stays until the request has been answered.

        With `events` the client waits for server-sent events, and is told how the model loads. It answers with the
        adapters of `lora`, or of the name `adapter`, where one of these is given.

        Raises:
            RequestError: there is none of that name, or it cannot be loaded.
        """
        model = await self.models.use(request, name, keep_alive, events=bool(events))
        if lora and adapter:
            raise ParameterError("lora_path", adapter, "nothing beside lora, which names adapters by their ids")
        if lora:
            return model.weighted([(one.id, one.scale) for one in lora])
        return model.adapted(adapter) if adapter else model

    async def figures(self) -> Mapping[str, EngineFigures]:
        """What is known of the engines now, by model."""
        past = self.models.past()
        found = {name: EngineFigures(stats) for name, stats in past.items()}
        engines = self.models.engines()
        for name, figures in zip(engines, await asyncio.gather(*map(_figures, engines.values())), strict=True):
            found[name] = replace(figures, stats=together(past.get(name, EngineStats()), figures.stats))
        if self.models.host is not None:
            for entry in self.models.host.entries():
                figures = found.get(entry.name, EngineFigures())
                found[entry.name] = replace(figures, memory=entry.planned, loads=entry.loads)
        return found

    async def exposition(self) -> bytes:
        """All figures in Prometheus' text format, of all HTTP processes where there are several.

        Raises:
            HttpError: those of the others cannot be had.
        """
        if self.siblings is not None:
            return await self._of_all(self.siblings)
        host = self.models.host
        budget = None if host is None else host.memory
        return await asyncio.to_thread(self.metrics.render, await self.figures(), budget)

    async def own_figures(self) -> bytes:
        """The metrics that are this process's own, of several over the same engines: what those tell is 0 in them."""
        own = {} if self.siblings is None else self.siblings.own()
        figures = {name: EngineFigures(stats) for name, stats in own.items()}
        return await asyncio.to_thread(self.metrics.render, figures)

    async def all_figures(self) -> Mapping[str, EngineFigures]:
        """As `figures`, where there are several HTTP processes too. Raises HttpError as `exposition`."""
        return await self.figures() if self.siblings is None else self._of_engines(await self.siblings.figures())

    def _of_engines(self, told: Figures) -> dict[str, EngineFigures]:
        engines = self.models.engines()
        return {
            name: EngineFigures(stats, _cache(engines[name]) if name in engines else {})
            for name, stats in told.stats.items()
        }

    async def _of_all(self, siblings: Siblings) -> bytes:
        told = await siblings.figures()
        host = self.models.host
        of_engines = Metrics()  # nothing but what engines and the host tell
        figures = self._of_engines(told)
        for name in figures:
            of_engines.model(name)
        for entry in () if host is None else host.entries():
            known = figures.get(entry.name, EngineFigures())
            figures[entry.name] = replace(known, memory=entry.planned, loads=entry.loads)
        budget = None if host is None else host.memory
        return await asyncio.to_thread(lambda: summed([of_engines.render(figures, budget), told.counted]))


async def _figures(engine: EngineClient) -> EngineFigures:
    """Of an engine, as far as they can be had: those of the server itself are worth having while an engine is away."""
    figures = EngineFigures()
    with suppress(PenstockError):
        figures = EngineFigures(await engine.stats())
    return replace(figures, cache=_cache(engine))


def _cache(engine: EngineClient) -> Mapping[str, str]:
    """The geometry of an engine's cache, once it is known."""
    with suppress(EngineDeadError):
        return {"block_size": str(engine.info.block_size), "num_gpu_blocks": str(engine.info.num_blocks)}
    return {}
