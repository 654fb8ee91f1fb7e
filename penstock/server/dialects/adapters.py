"""Adapters that come and go while their model is served, as vLLM, SGLang and llama-server have it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
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
        models = () if context.models.host is not None else context.models.all()
        self._everywhere = AdapterOrders(models[0].adapters, context.orders) if models else None

    @property
    def everywhere(self) -> AdapterOrders:
        """Changes of the one model's adapters, in all HTTP processes."""
        assert self._everywhere is not None  # `model` has refused several
        return self._everywhere

    def model(self, request: Request) -> ModelContext:
        """The one model whose adapters these are, for an administrator.

        Raises:
            HttpError: 403 for others; 501 where there are several models.
        """
        self._keys.check_admin(request.headers)
        if self._context.models.host is not None:
            told = "A server of several models has no adapters; start one of their model alone."
            raise HttpError(501, f"{request.url.path} is not available here. {told}", code="not_available")
        (model,) = self._context.models.all()
        return model

    async def load(self, request: Request, body: LoadAdapterBody) -> AdapterNames:
        """Reads an adapter, has the engine answer with it once, and gives it its name."""
        model = self.model(request)
        model.require_ready()
        try:
            use, rank = await asyncio.to_thread(AdapterNames.read, body.lora_path)
        except CheckpointError as error:
            raise RequestError(str(error), param="lora_path", code="adapter_unusable") from error
        names, again = model.adapters, body.load_inplace
        names.check(body.lora_name, again=again)
        try:
            await self._try(request, model, body.lora_name, use)
        except RequestError as error:  # of the trial, whose parameters nobody sent
            raise RequestError(str(error), param="lora_path", code=error.code) from error
        await self.everywhere.add(body.lora_name, replace(use, pinned=body.pinned), rank, again=again)
        return names

    async def unload(self, request: Request, body: UnloadAdapterBody) -> AdapterNames:
        """Forgets a name; answers that are being written go on."""
        names = self.model(request).adapters
        if not await self.everywhere.remove(body.lora_name):
            message = f"There is no adapter {format_value(body.lora_name)} here; GET /v1/models lists those there are."
            raise HttpError(404, message, param="lora_name", code="adapter_not_found")
        return names

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
        return _loaded(await adapters.load(request, await read_body(request, LoadAdapterBody)))

    @router.post("/unload_lora_adapter", summary="Unload an adapter", openapi_extra=takes(UnloadAdapterBody))
    async def unload_as_sglang(request: Request) -> Response:
        return _loaded(await adapters.unload(request, await read_body(request, UnloadAdapterBody)))

    _add_llama(router, context, adapters)
    return router


def _loaded(names: AdapterNames) -> Response:
    return json_response({"success": True, "loaded_adapters": {one.name: one.name for one in names.all()}})


def _add_llama(router: APIRouter, context: ServerContext, adapters: _Adapters) -> None:
    @router.get("/lora-adapters", summary="List the adapters", openapi_extra=gives("application/json"))
    async def listed() -> Response:
        models: Sequence[ModelContext] = () if context.models.host is not None else context.models.all()
        lists = [(model.frontend, model.adapters.all()) for model in models]
        return await made_answer(lambda: [_as_llama(frontend, one) for frontend, found in lists for one in found])

    @router.post("/lora-adapters", summary="Scale the adapters", openapi_extra=dict(_SCALES))
    async def scale(request: Request) -> Response:
        raw = await whole_body(request)
        given = await translated(request, lambda: validate(AdapterScales, _listed(raw)))
        pairs = [(one.id, one.scale) for one in given.adapters]
        if pairs or context.models.host is None:
            adapters.model(request)
            await adapters.everywhere.scale(pairs)
        return json_response({"success": True})


def _as_llama(frontend: Frontend, one: NamedAdapter) -> dict[str, Any]:
    told = {"id": one.number, "path": one.name, "scale": one.scale}
    if invocation := one.use.invocation:
        text = frontend.text.tokenizer.decode(invocation, skip_special_tokens=False)
        told |= {"alora_invocation_string": text, "alora_invocation_tokens": list(invocation)}
    return told


def _listed(raw: bytes) -> dict[str, Any]:
    """A body that is a list, as one that has it."""
    found = parse_json(b'{"adapters":' + raw + b"}")
    if len(found) > 1 or not isinstance(found["adapters"], list):
        raise RequestError("The body must be a list of adapters, each with id and scale.", code="invalid_value")
    return found
