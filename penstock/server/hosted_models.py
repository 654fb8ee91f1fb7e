"""A server of a host's models: each is loaded when it is first asked for, and kept while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ModelNotFoundError, RequestError
from penstock.engine.api import EngineState
from penstock.host.adapters import AdapterNames
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext
from penstock.server.early import EARLY, EarlyStream
from penstock.server.errors import REQUEST_ID, not_ready
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import Metrics

if TYPE_CHECKING:
    from penstock.engine.api import EngineClient
    from penstock.engine.frontend import Frontend
    from penstock.host.model_host import KeepAlive, Lease, ModelHost
    from penstock.host.source import ModelSource

_PATIENCE_S = 1.0  # before a client who waits for events is told what it waits for, and between two such comments


class HostedModels:
    """`ServedModels` of a host."""

    def __init__(
        self,
        host: ModelHost,
        lifecycle: Lifecycle,
        metrics: Metrics,
        modules: Sequence[str] = (),
        *,
        trust_template: bool,
    ) -> None:
        """`modules`: adapters as `host.adapters.of_several` gives them. Raises ConfigError for files that are none."""
        self._host = host
        self.adapters = AdapterNames(modules, taken=lambda name: name in host.names)
        self._lifecycle, self._metrics = lifecycle, metrics
        self._trust_template = trust_template

    @property
    def state(self) -> EngineState:
        return EngineState.READY

    @property
    def host(self) -> ModelHost:
        return self._host

    def names(self) -> Sequence[str]:
        return self._host.names.all

    def unknown(self, name: str) -> ModelNotFoundError:
        return self._host.names.unknown(name)

    async def use(
        self, request: Request, name: str | None, keep_alive: KeepAlive | None, *, events: bool
    ) -> ModelContext:
        if self._lifecycle.draining:
            raise not_ready("The server is shutting down; send the request to another one.", "shutting_down")
        adapter = self.adapters.meant(name, self._host.names.own)
        source = await self._host.find(name if adapter is None else adapter.base, str(request.scope[REQUEST_ID]))
        if source.remote is not None:
            message = f"{source.name} is served elsewhere, by OpenAI's API alone: use POST /v1/chat/completions, "
            raise RequestError(f"{message}/v1/completions or /v1/embeddings.", param="model", code="remote_model")
        early: EarlyStream = request.scope[EARLY]
        work = self._lease(source, keep_alive, early if events else None)
        lease = await while_connected(work, request.receive, self._lifecycle)
        early.at_end(lease.release)
        model = self._context(lease.name, lease.frontend, lease)
        return model.usual() if adapter is None else model.adapted(adapter.name)

    async def _lease(self, source: ModelSource, keep_alive: KeepAlive | None, early: EarlyStream | None) -> Lease:
        """A use of the model; while it is waited for, comments go to a client who waits for events."""
        entry = self._host.entry(source)
        if early is None or entry.usable:
            return await self._host.lease(source, keep_alive)
        leasing = asyncio.ensure_future(self._host.lease(source, keep_alive))
        try:
            while not (await asyncio.wait((leasing,), timeout=_PATIENCE_S))[0]:
                await early.comment(entry.sentence())
        except BaseException:
            leasing.cancel()
            await asyncio.wait((leasing,))
            if not leasing.cancelled() and leasing.exception() is None:
                leasing.result().release()
            raise
        return leasing.result()

    def _context(self, name: str, frontend: Frontend, lease: Lease | None = None) -> ModelContext:
        metrics, trust = self._metrics.model(name), self._trust_template
        return ModelContext(frontend, self._lifecycle, metrics, trust, lease, self.adapters, name)

    def all(self) -> Sequence[ModelContext]:
        return [
            self._context(entry.name, entry.frontend)
            for entry in self._host.entries()
            if entry.usable and entry.frontend is not None
        ]

    def engines(self) -> Mapping[str, EngineClient]:
        return {entry.name: entry.engine for entry in self._host.entries() if entry.engine is not None}

    def past(self) -> Mapping[str, EngineStats]:
        return {entry.name: entry.past for entry in self._host.entries() if entry.loads}

    def check_room(self, owner: str) -> None:
        """What may wait is each model's own."""
