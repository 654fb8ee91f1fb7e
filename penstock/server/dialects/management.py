"""Loading, unloading and listing models by hand: the routes of llama-server, LM Studio, TabbyAPI and Xinference."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.model_host import ModelHost
from penstock.host.source import ModelSource
from penstock.server.active_call import EventStream, event
from penstock.server.auth import AdminKeys
from penstock.server.body import read_body
from penstock.server.connected import while_connected
from penstock.server.context import ServerContext
from penstock.server.dialects.models import status_of
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_response
from penstock.server.shapes import Loose, either

_Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_MODEL_NAME_CHARS)]
_GIVEN: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": limits.MAX_MODEL_NAME_CHARS}
_PROGRESS_S = 0.5  # between two events of a load
_LOOK_S = 1.0  # between two looks at whether the server is being shut down


class ManagementBody(Loose):
    """Settings that others load models with are passed over: a model has the options it was listed with."""


class LoadBody(ManagementBody):
    """llama-server's and LM Studio's: a model by its name."""

    model: _Name


class UnloadInstanceBody(ManagementBody):
    """LM Studio's: an instance, which has its model's name."""

    instance_id: _Name


class TabbyLoadBody(ManagementBody):
    """TabbyAPI's, under its older name too."""

    model_config = either({"model_name": _GIVEN}, {"name": _GIVEN})

    model_name: _Name | None = None
    name: _Name | None = None


class WebuiLoadBody(ManagementBody):
    """text-generation-webui's."""

    model_name: _Name


class LaunchBody(ManagementBody):
    """Xinference's: a model by its name, under which it is known then."""

    model_name: _Name
    model_uid: _Name | None = None


MANAGEMENT_BODIES = (LoadBody, UnloadInstanceBody, TabbyLoadBody, WebuiLoadBody, LaunchBody)


class Management:
    """What all these routes do, for those who may."""

    def __init__(self, context: ServerContext, host: ModelHost, keys: AdminKeys) -> None:
        self.context, self.host = context, host
        self._keys = keys

    async def model(self, request: Request, name: str) -> ModelSource:
        """The model of that name, which this client may load and unload.

        Raises:
            RequestError: there is none, it is served elsewhere, or the key is not an administrator's.
        """
        self._keys.check_admin(request.headers)
        source = await self.host.find(name)
        if source.remote is not None:
            message = f"{source.name} is served elsewhere; it is neither loaded nor unloaded here."
            raise RequestError(message, param="model", code="remote_model")
        return source

    async def load(self, request: Request, name: str) -> ModelEntry:
        """Loads a model; the client waits for it."""
        source = await self.model(request, name)
        return await while_connected(self.host.load(source), request.receive, self.context.lifecycle)

    async def unload(self, request: Request, name: str) -> ModelEntry:
        """Unloads a model; the client waits until those who use it have been answered."""
        source = await self.model(request, name)
        return await while_connected(self.host.unload(source), request.receive, self.context.lifecycle)

    async def entries(self) -> list[ModelEntry]:
        """All models."""
        await self.host.refresh()
        return list(self.host.told())

    def loaded(self) -> ModelEntry:
        """The model that was used last, which is the one there is for clients that know of one."""
        there = [entry for entry in self.host.entries() if entry.usable]
        if not there:
            raise RequestError("No models are currently loaded.", code="no_model_loaded")
        return max(there, key=lambda entry: entry.used_at)


def management_router(context: ServerContext, host: ModelHost, keys: AdminKeys) -> APIRouter:
    """The routes over a host's models."""
    router, management = APIRouter(), Management(context, host, keys)
    _add_llama(router, management)
    _add_lm_studio(router, management)
    _add_tabby(router, management)
    _add_webui(router, management)
    _add_xinference(router, management)
    return router


def _add_llama(router: APIRouter, management: Management) -> None:
    created = int(time.time())

    @router.get("/models", summary="List the models and what they do", openapi_extra=gives("application/json"))
    async def models() -> Response:
        data = []
        for entry in await management.entries():
            about = {"id": entry.name, "object": "model", "created": created, "owned_by": "penstock"}
            data.append({**about, "status": status_of(entry)})
        return json_response({"object": "list", "data": data})

    @router.get("/models/sse", summary="What models do, in events as it changes", openapi_extra=gives(EVENTS))
    async def changes() -> Response:
        return EventStream(_changes(management), None, management.context.lifecycle)

    @router.post("/models/load", summary="Begin to load a model", openapi_extra=takes(LoadBody))
    async def load(request: Request) -> Response:
        body = await read_body(request, LoadBody)
        await management.host.begin_load(await management.model(request, body.model))
        return json_response({"success": True})

    @router.post("/models/unload", summary="Unload a model", openapi_extra=takes(LoadBody))
    async def unload(request: Request) -> Response:
        await management.unload(request, (await read_body(request, LoadBody)).model)
        return json_response({"success": True})


async def _changes(management: Management) -> AsyncIterator[bytes]:
    """What all models do, then an event for each that does something else, as llama-server's router tells it."""
    known: dict[str, dict[str, Any]] = {}
    while not management.context.lifecycle.draining:
        now = {entry.name: status_of(entry) for entry in await management.entries()}
        for name in known.keys() - now.keys():
            yield event({"model": name, "event": "model_remove"})
        for name, status in now.items():
            if status != known.get(name):
                told = dict(status)
                yield event({"model": name, "event": "model_status", "data": {"status": told.pop("value"), **told}})
        known = now
        await management.host.changed(_LOOK_S)


def _add_lm_studio(router: APIRouter, management: Management) -> None:
    def described(entry: ModelEntry) -> dict[str, Any]:
        info = entry.info
        instance = {"id": entry.name, "config": {"context_length": info.max_model_len if info else 0}}
        return {
            "type": "llm" if entry.generates else "embedding",
            "publisher": "penstock",
            "key": entry.name,
            "display_name": entry.name,
            "architecture": info.architecture.removesuffix("ForCausalLM").lower() if info else None,
            "loaded_instances": [instance] if info else [],
            "max_context_length": info.max_model_len if info else None,
            "state": entry.told_state,
        }

    @router.get("/api/v1/models", summary="List the models, as LM Studio", openapi_extra=gives("application/json"))
    async def models() -> Response:
        return json_response({"models": [described(entry) for entry in await management.entries()]})

    @router.post("/api/v1/models/load", summary="Load a model, as LM Studio", openapi_extra=takes(LoadBody))
    async def load(request: Request) -> Response:
        began = time.monotonic()
        entry = await management.load(request, (await read_body(request, LoadBody)).model)
        told = {"instance_id": entry.name, "load_time_seconds": time.monotonic() - began, "status": "loaded"}
        return json_response({"type": described(entry)["type"], **told})

    @router.post(
        "/api/v1/models/unload", summary="Unload a model, as LM Studio", openapi_extra=takes(UnloadInstanceBody)
    )
    async def unload(request: Request) -> Response:
        entry = await management.unload(request, (await read_body(request, UnloadInstanceBody)).instance_id)
        return json_response({"instance_id": entry.name})


def _add_tabby(router: APIRouter, management: Management) -> None:
    created = int(time.time())

    def card(entry: ModelEntry) -> dict[str, Any]:
        about: dict[str, Any] = {"id": entry.name, "object": "model", "created": created, "owned_by": "penstock"}
        info = entry.info
        parameters = None if info is None else {"max_seq_len": info.max_model_len, "max_batch_size": info.max_num_seqs}
        return {**about, "parameters": parameters}

    @router.get("/v1/model/list", summary="List the models, as TabbyAPI", openapi_extra=gives("application/json"))
    async def models() -> Response:
        return json_response({"object": "list", "data": [card(entry) for entry in await management.entries()]})

    @router.get("/v1/model", summary="The model used last, as TabbyAPI", openapi_extra=gives("application/json"))
    async def model() -> Response:
        return json_response(card(management.loaded()))

    @router.post("/v1/model/load", summary="Load a model, as TabbyAPI", openapi_extra=takes(TabbyLoadBody, EVENTS))
    async def load(request: Request) -> Response:
        body = await read_body(request, TabbyLoadBody)
        name = body.model_name or body.name
        if name is None:
            raise RequestError("model_name is required.", param="model_name", code="missing_required_parameter")
        source = await management.model(request, name)
        return EventStream(_progress(management.host, source), None, management.context.lifecycle)

    @router.post("/v1/model/unload", summary="Unload the model used last, as TabbyAPI")
    async def unload(request: Request) -> Response:
        await management.unload(request, management.loaded().name)
        return Response()


async def _progress(host: ModelHost, source: ModelSource) -> AsyncIterator[bytes]:
    """How a load goes, as TabbyAPI tells it: shares of the weights, then that it is done."""
    entry = await host.begin_load(source)
    while entry.state in (ModelState.WAITING, ModelState.LOADING):
        done, total = entry.progress
        yield event({"model_type": "model", "module": done, "modules": total, "status": "processing"})
        await host.changed(_PROGRESS_S)
    entry.check_loaded()
    done, total = entry.progress
    yield event({"model_type": "model", "module": total, "modules": total, "status": "finished"})


def _add_webui(router: APIRouter, management: Management) -> None:
    @router.post(
        "/v1/internal/model/load", summary="Load a model, as text-generation-webui", openapi_extra=takes(WebuiLoadBody)
    )
    async def load(request: Request) -> Response:
        await management.load(request, (await read_body(request, WebuiLoadBody)).model_name)
        return json_response("OK")

    @router.post("/v1/internal/model/unload", summary="Unload the model used last, as text-generation-webui")
    async def unload(request: Request) -> Response:
        await management.unload(request, management.loaded().name)
        return json_response("OK")


def _add_xinference(router: APIRouter, management: Management) -> None:
    @router.post("/v1/models", summary="Launch a model, as Xinference", openapi_extra=takes(LaunchBody))
    async def launch(request: Request) -> Response:
        entry = await management.load(request, (await read_body(request, LaunchBody)).model_name)
        return json_response({"model_uid": entry.name})
