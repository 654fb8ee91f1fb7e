"""Adapters that come and go while their model is served, as vLLM, SGLang and llama-server have it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config.adapters import AdapterUse
from penstock.config.errors import CheckpointError, RequestError, format_value
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.host.adapters import MOST_NAME_CHARS, AdapterNames, NamedAdapter
from penstock.server.adapter_fields import MOST_SCALES, AdapterScale
from penstock.server.adapter_orders import AdapterOrders
from penstock.server.auth import AdminKeys, owner_of
from penstock.server.body import read_body, translated, validate, whole_body
from penstock.server.context import ModelContext, ServerContext
from penstock.server.document import gives, takes
from penstock.server.encoding import json_response, made_answer
from penstock.server.errors import HttpError
from penstock.server.shapes import Exact, Loose
from penstock.server.strict_json import parse_json

_PATH_CHARS = 4096
_TRIED = SamplingParams(temperature=0.0, max_tokens=1)
_Name = Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)]


class LoadAdapterBody(Loose):
    """POST /v1/load_lora_adapter and /load_lora_adapter."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=_PATH_CHARS)]
    base_model_name: Annotated[str, Field(min_length=1, max_length=MOST_NAME_CHARS)] | None = None
    load_inplace: bool = False
    pinned: bool = False


class UnloadAdapterBody(Loose):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: _Name


class AdapterScales(Exact):
    """POST /lora-adapters, whose body is the list: adapters that are not in it count nothing."""

    adapters: Annotated[list[AdapterScale], Field(max_length=MOST_SCALES)]


ADAPTER_BODIES = (LoadAdapterBody, UnloadAdapterBody, AdapterScale)
_LIST = {"type": "array", "maxItems": MOST_SCALES, "items": {"$ref": "#/components/schemas/AdapterScale"}}
_SCALES: Mapping[str, Any] = MappingProxyType(
    {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _LIST}}},
        **gives("application/json"),
    }
)


class _Adapters:
    """What these routes do, for those who may."""

    def __init__(self, context: ServerContext, keys: AdminKeys) -> None:
        self._context, self._keys = context, keys
        self.names = context.models.adapters
        self.everywhere = AdapterOrders(self.names, context.orders)  # in all HTTP processes

    def check(self, request: Request) -> None:
        """Raises HttpError 403 for those who are no administrators."""
        self._keys.check_admin(request.headers)

    async def load(self, request: Request, body: LoadAdapterBody) -> None:
        """Reads an adapter, has its model's engine answer with it once, and gives it its name."""
        self.check(request)
        try:
            use, rank = await asyncio.to_thread(AdapterNames.read, body.lora_path)
        except CheckpointError as error:
            raise RequestError(str(error), param="lora_path", code="adapter_unusable") from error
        self.names.check(body.lora_name, again=body.load_inplace)
        model = await self._context.model(request, await self._base(body.base_model_name))
        model.require_ready()
        try:
            await self._try(request, model, body.lora_name, use)
        except RequestError as error:  # of the trial, whose parameters nobody sent
            raise RequestError(str(error), param="lora_path", code=error.code) from error
        use = replace(use, pinned=body.pinned)
        await self.everywhere.add(body.lora_name, use, rank, model.base, again=body.load_inplace)

    async def _base(self, name: str | None) -> str | None:
        """The model that an adapter belongs to; None for the one there is, whatever its clients call it."""
        host = self._context.models.host
        if host is None:
            return None
        await host.refresh()
        return host.names.base(name)

    async def unload(self, request: Request, body: UnloadAdapterBody) -> None:
        """Forgets a name; answers that are being written go on."""
        self.check(request)
        if not await self.everywhere.remove(body.lora_name):
            message = f"There is no adapter {format_value(body.lora_name)} here; GET /v1/models lists those there are."
            raise HttpError(404, message, param="lora_name", code="adapter_not_found")

    async def _try(self, request: Request, model: ModelContext, name: str, use: AdapterUse) -> None:
        """Refuses what the engine cannot use: of another model, or too large. Models that only pool are not asked."""
        if not model.frontend.text.pooling.generates:
            return
        frontend = model.frontend.adapted(name, (replace(use, invocation=()),))  # it is to count, whatever is asked
        asked = GenerationRequest(uuid.uuid4().hex, _TRIED, prompt_ids=(0,), owner=owner_of(request))
        answer = await frontend.generate(asked)
        try:
            async for _ in answer:
                pass
        finally:
            await answer.aclose()


def adapters_router(context: ServerContext, keys: AdminKeys) -> APIRouter:
    """vLLM's and SGLang's routes."""
    router, adapters = APIRouter(), _Adapters(context, keys)

    @router.post("/v1/load_lora_adapter", summary="Load an adapter", openapi_extra=takes(LoadAdapterBody, "text/plain"))
    async def load(request: Request) -> Response:
        body = await read_body(request, LoadAdapterBody)
        await adapters.load(request, body)
        return Response(f"Success: LoRA adapter '{body.lora_name}' added successfully.", media_type="text/plain")

    @router.post(
        "/v1/unload_lora_adapter", summary="Unload an adapter", openapi_extra=takes(UnloadAdapterBody, "text/plain")
    )
    async def unload(request: Request) -> Response:
        body = await read_body(request, UnloadAdapterBody)
        await adapters.unload(request, body)
        return Response(f"Success: LoRA adapter '{body.lora_name}' removed successfully.", media_type="text/plain")

    @router.post("/load_lora_adapter", summary="Load an adapter", openapi_extra=takes(LoadAdapterBody))
    async def load_as_sglang(request: Request) -> Response:
        await adapters.load(request, await read_body(request, LoadAdapterBody))
        return _loaded(adapters.names)

    @router.post("/unload_lora_adapter", summary="Unload an adapter", openapi_extra=takes(UnloadAdapterBody))
    async def unload_as_sglang(request: Request) -> Response:
        await adapters.unload(request, await read_body(request, UnloadAdapterBody))
        return _loaded(adapters.names)

    _add_llama(router, context, adapters)
    return router


def _loaded(names: AdapterNames) -> Response:
    return json_response({"success": True, "loaded_adapters": {one.name: one.name for one in names.all()}})


def _add_llama(router: APIRouter, context: ServerContext, adapters: _Adapters) -> None:
    @router.get("/lora-adapters", summary="List the adapters", openapi_extra=gives("application/json"))
    async def listed() -> Response:
        frontends = {model.base: model.frontend for model in context.models.all()}
        return await made_answer(lambda: [_as_llama(frontends.get(one.base), one) for one in adapters.names.all()])

    @router.post("/lora-adapters", summary="Scale the adapters", openapi_extra=dict(_SCALES))
    async def scale(request: Request) -> Response:
        raw = await whole_body(request)
        given = await translated(request, lambda: validate(AdapterScales, _listed(raw)))
        pairs = [(one.id, one.scale) for one in given.adapters]
        adapters.check(request)
        await adapters.everywhere.scale(pairs)
        return json_response({"success": True})


def _as_llama(frontend: Frontend | None, one: NamedAdapter) -> dict[str, Any]:
    """`frontend`: of its model; None while that is not loaded, where an invocation is not told as a text."""
    told = {"id": one.number, "path": one.name, "scale": one.scale}
    if invocation := one.use.invocation:
        told["alora_invocation_tokens"] = list(invocation)
        if frontend is not None:
            text = frontend.text.tokenizer.decode(invocation, skip_special_tokens=False)
            told["alora_invocation_string"] = text
    return told


def _listed(raw: bytes) -> dict[str, Any]:
    """A body that is a list, as one that has it."""
    found = parse_json(b'{"adapters":' + raw + b"}")
    if len(found) > 1 or not isinstance(found["adapters"], list):
        raise RequestError("The body must be a list of adapters, each with id and scale.", code="invalid_value")
    return found
