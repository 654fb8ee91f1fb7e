"""The list of models, in the form of OpenAI or, for clients that name an `anthropic-version`, of Anthropic."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.host.adapters import NamedAdapter
from penstock.host.entry import ModelEntry, ModelState
from penstock.host.model_host import ModelHost
from penstock.server.context import ServerContext
from penstock.server.document import gives
from penstock.server.encoding import json_response, made_answer
from penstock.server.spoken import Dialect, dialect_of_scope


@dataclass(frozen=True, slots=True)
class _Listed:
    """A model as the list has it: its length once that is known, and of a host's model what it is doing."""

    name: str
    max_model_len: int | None
    more: dict[str, Any]


def models_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router, created = APIRouter(), int(time.time())

    def described(dialect: Dialect, model: _Listed) -> dict[str, Any]:
        if dialect is Dialect.ANTHROPIC:
            since = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            names = {"id": model.name, "type": "model", "display_name": model.name}
            most = dict.fromkeys(("max_input_tokens", "max_tokens"), model.max_model_len)
            return {**names, "created_at": since, "lifecycle": "active", "capabilities": None, **most}
        about = {"id": model.name, "object": "model", "created": created, "owned_by": "penstock"}
        return {**about, "root": model.name, "parent": None, "max_model_len": model.max_model_len, **model.more}

    async def all_models(name: str | None = None) -> Iterable[_Listed]:
        """All models and adapters, of which there may be thousands; of adapters only the one of a given name."""
        host, adapters = context.models.host, context.models.adapters
        found = _of_one(context) if host is None else await _of_host(host)
        lengths = {model.name: model.max_model_len for model in found}
        known = adapters.all() if name is None else filter(None, (adapters.find(name),))
        return chain(found, (_adapter(one, lengths.get(one.base)) for one in known))

    async def models(request: Request) -> Response:
        dialect, every = dialect_of_scope(request.scope), await all_models()

        def listed() -> dict[str, Any]:
            found = list(every)
            data = [described(dialect, model) for model in found]
            if dialect is Dialect.ANTHROPIC:
                ends = {"first_id": found[0].name if found else None, "last_id": found[-1].name if found else None}
                return {"data": data, "has_more": False, **ends}
            return {"object": "list", "data": data}

        return await made_answer(listed)

    for path in ("/v1/models", "/models") if context.models.host is None else ("/v1/models",):
        router.get(path, summary="List the models served", openapi_extra=gives("application/json"))(models)

    @router.get("/v1/models/{model:path}", summary="Describe a model", openapi_extra=gives("application/json"))
    async def model(request: Request, model: str) -> Response:
        found = next((known for known in await all_models(model) if known.name == model), None)
        if found is None:
            raise context.models.unknown(model)
        return json_response(described(dialect_of_scope(request.scope), found))

    return router


def _adapter(one: NamedAdapter, length: int | None) -> _Listed:
    return _Listed(one.name, length, {"parent": one.base, "adapter": {"id": one.number, "rank": one.rank}})


def _of_one(context: ServerContext) -> Sequence[_Listed]:
    """The one model there is, by its own name and by its aliases."""
    (model,) = context.models.all()
    length, others = model.max_model_len(), [name for name in context.models.names() if name != model.model]
    return [_Listed(model.model, length, {}), *(_Listed(name, length, {"root": model.model}) for name in others)]


_LLAMA = {"ready": "loaded", "waiting": "loading", "leaving": "loaded", "asleep": "sleeping", "failed": "unloaded"}


def status_of(entry: ModelEntry) -> dict[str, Any]:
    """What a model is doing, as llama-server's router tells it."""
    told: dict[str, Any] = {"value": _LLAMA.get(entry.state.value, entry.state.value)}
    if entry.state is ModelState.LOADING and entry.progress[1]:
        told["progress"] = entry.progress[0] / entry.progress[1]
    if entry.state is ModelState.FAILED and entry.failure is not None:
        told |= {"failed": True, "error": entry.failure.sentence}
    return told


def router_props(context: ServerContext) -> dict[str, Any]:
    """The properties of a server of several models, as llama-server's router tells them."""
    return {
        "role": "router",
        "max_instances": len(context.models.names()),
        "models_autoload": True,
        "model_alias": "penstock",
        "model_path": "none",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "endpoint_slots": context.shows_slots,
        "endpoint_props": context.changes_props,
        "endpoint_metrics": True,
        "build_info": __version__,
    }


async def _of_host(host: ModelHost) -> Sequence[_Listed]:
    """Every model by its own name and by its aliases."""
    await host.refresh()
    found = []
    for entry in host.told():
        length = None if entry.info is None else entry.info.max_model_len
        state = "remote" if entry.source.remote else entry.told_state
        more: dict[str, Any] = {"state": state, "status": status_of(entry)}
        found.append(_Listed(entry.name, length, more))
        found += [_Listed(alias, length, {**more, "root": entry.name}) for alias, _ in entry.source.aliases]
    return list({model.name: model for model in reversed(found)}.values())[::-1]
