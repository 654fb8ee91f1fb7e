"""Routes about models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from penstock import __version__
from penstock.config.errors import RequestError, format_value
from penstock.engine.api import EngineState
from penstock.server.body import read_body
from penstock.server.context import ServerContext
from penstock.server.dialects.ollama.models.about import described, kept, listed, listed_by_host, served
from penstock.server.dialects.ollama.schema import ShowBody
from penstock.server.document import gives, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError
from penstock.server.web.routes import page_response, wants_page

OLLAMA_VERSION = "0.12.11"  # the version of Ollama whose API this is; clients ask for at least one
_LIBRARY = (
    *(("POST", f"/api/{name}", f"{name.capitalize()} a model") for name in ("pull", "push", "create", "copy")),
    ("DELETE", "/api/delete", "Delete a model"),
    *((method, "/api/blobs/{digest}", "A file of a model") for method in ("POST", "HEAD")),
)


def _loaded(context: ServerContext) -> list[dict[str, Any]]:
    """Entries of the models whose engines are there now."""
    host = context.models.host
    if host is None:
        there = [model.frontend for model in context.models.all()]
        there = [frontend for frontend in there if frontend.client.state is EngineState.READY]
        return [kept(frontend.served_name, frontend.info, None) for frontend in there]
    ready = [entry for entry in host.entries() if entry.told_state == EngineState.READY.value]
    return [kept(entry.name, entry.info, entry.expires_in) for entry in ready if entry.info is not None]


def add_models(router: APIRouter, context: ServerContext, *, page: bool) -> None:
    """Adds the routes over one server's context; with `page`, browsers get that where others learn that it runs."""

    def models(entries: list[dict[str, Any]]) -> Response:
        return json_response({"models": entries})

    async def root(request: Request) -> Response:
        if page and wants_page(request):
            return page_response(request, "index.html")
        return PlainTextResponse("Ollama is running")  # clients ask for this text to see that the API is there

    async def tags() -> Response:
        if context.models.host is not None:
            return models(await listed_by_host(context.models.host))
        (model,) = context.models.all()
        model.require_ready()
        return models([listed(model)])

    async def version() -> Response:
        return json_response({"version": OLLAMA_VERSION, "penstock": __version__})

    for path, handler, summary in (
        ("/", root, "Whether the server runs"),
        ("/api/tags", tags, "List the models served"),
        ("/api/version", version, "The version of Ollama's API"),
    ):
        media_type = "text/plain" if path == "/" else "application/json"
        router.get(path, summary=summary, openapi_extra=gives(media_type))(handler)
        router.head(path, summary=summary)(handler)

    @router.get("/api/ps", summary="List the models loaded", openapi_extra=gives("application/json"))
    async def ps() -> Response:
        return models(_loaded(context))

    @router.post("/api/show", summary="Describe a model", openapi_extra=takes(ShowBody))
    async def show(request: Request) -> Response:
        body = await read_body(request, ShowBody, any_type="origin" not in request.headers)
        names = {served(context, name) for name in (body.model, body.name) if name}  # clients may leave one empty
        if not names:
            raise RequestError("model is required.", param="model", code="missing_required_parameter")
        if len(names) > 1:  # who held one model and waited for another would hold up both
            raise RequestError("model and name mean the same, and differ here; send one of them.", param="name")
        model = await context.model(request, names.pop())
        model.require_ready()
        return json_response(described(model))

    async def library(request: Request) -> Response:
        path, why = format_value(request.url.path), "this server keeps the one model it was started with"
        how = "start `penstock serve` without a model's name, which serves the library and pulls models into it"
        raise HttpError(501, f"{path} is not available: {why}; {how}.", code="not_implemented")

    async def blob(request: Request, digest: str) -> Response:
        return await library(request)

    for method, path, summary in _LIBRARY if context.models.host is None else ():
        refuse = blob if "{digest}" in path else library
        router.add_api_route(path, refuse, methods=[method], summary=f"{summary} (not with one model)", status_code=501)
