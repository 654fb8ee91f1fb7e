"""The HTTP application: routes for operators, the dialects, and the middleware in front of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from penstock import __version__
from penstock.config.arithmetic import ARITHMETIC_VERSION
from penstock.config.errors import format_value
from penstock.config.options import ServerOptions
from penstock.engine.api import EngineState
from penstock.engine.frontend import Frontend
from penstock.host.adapters import AdapterNames
from penstock.host.model_host import ModelHost
from penstock.host.shelf import open_shelf
from penstock.server import document
from penstock.server.account import account_of
from penstock.server.adapter_orders import AdapterOrders
from penstock.server.auth import LOCAL_ORIGINS, NO_ORIGIN, AdminKeys, ApiKeys, HostRule
from penstock.server.context import ModelContext, ServedModels, ServerContext
from penstock.server.dialects.adapters import ADAPTER_BODIES, adapters_router
from penstock.server.dialects.anthropic.routes import anthropic_router
from penstock.server.dialects.anthropic.schema import ANTHROPIC_BODIES
from penstock.server.dialects.cache import CachePrompt, PinBody, cache_router
from penstock.server.dialects.chat_control import ControlBody, RunningChats, chat_control_router
from penstock.server.dialects.cohere import CohereEmbedBody, cohere_router
from penstock.server.dialects.conversations.routes import conversations_router
from penstock.server.dialects.conversations.schema import CONVERSATION_BODIES
from penstock.server.dialects.decisions import DecisionBody, decisions_router
from penstock.server.dialects.embeddings import ClassifyBody, EmbeddingBody, PoolingBody, embeddings_router
from penstock.server.dialects.engine_control import PauseBody, engine_control_router
from penstock.server.dialects.engine_sleep import engine_sleep_router
from penstock.server.dialects.kobold.routes import kobold_router
from penstock.server.dialects.kobold.schema import KOBOLD_BODIES
from penstock.server.dialects.kserve.routes import kserve_router
from penstock.server.dialects.kserve.schema import KSERVE_BODIES
from penstock.server.dialects.llama_embeddings import LlamaEmbeddingBody, llama_embeddings_router
from penstock.server.dialects.llama_server.routes import llama_server_router
from penstock.server.dialects.llama_server.schema import LLAMA_BODIES
from penstock.server.dialects.management import MANAGEMENT_BODIES, management_router
from penstock.server.dialects.models import models_router
from penstock.server.dialects.moderation.routes import ModerationBody, moderation_router
from penstock.server.dialects.ollama.models.about import called
from penstock.server.dialects.ollama.models.library import LIBRARY_BODIES, library_router
from penstock.server.dialects.ollama.routes import ollama_router
from penstock.server.dialects.ollama.schema import OLLAMA_BODIES
from penstock.server.dialects.openai.routes import openai_router
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.dialects.render import render_router
from penstock.server.dialects.rerank import RerankBody, ScoreBody, TextsRerankBody, rerank_router
from penstock.server.dialects.responses.routes import responses_router
from penstock.server.dialects.responses.schema import CompactBody, InputTokensBody, ResponsesBody
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.resumed import LookupBody, resumed_router
from penstock.server.dialects.sagemaker import sagemaker_router
from penstock.server.dialects.server_tools import ToolBody, server_tools_router
from penstock.server.dialects.sglang.routes import sglang_router
from penstock.server.dialects.sglang.schema import SGLANG_BODIES
from penstock.server.dialects.sglang.sessions.kept import Sessions
from penstock.server.dialects.sglang.sessions.routes import sessions_router
from penstock.server.dialects.slots import SlotBody, slots_router
from penstock.server.dialects.stored_chats import ChatUpdateBody, StoredChats, stored_chats_router
from penstock.server.dialects.tgi.routes import tgi_router
from penstock.server.dialects.tgi.schema import TGI_BODIES
from penstock.server.dialects.tokenize import DetokenizeBody, LlamaTokenizeBody, TokenizeBody, tokenize_router
from penstock.server.dialects.vertex import VertexBody, vertex_router
from penstock.server.dialects.vllm.generative_scoring import ScoringBody, scoring_router
from penstock.server.dialects.vllm.routes import vllm_router
from penstock.server.dialects.vllm.schema import VLLM_BODIES
from penstock.server.dialects.webui import WEBUI_BODIES, webui_router
from penstock.server.document import gives
from penstock.server.encoding import json_response, made_answer
from penstock.server.errors import HttpError, error_response, not_ready
from penstock.server.habits import Habits
from penstock.server.hooks import HookMiddleware, load_hook
from penstock.server.hosted_models import HostedModels
from penstock.server.lifecycle import Lifecycle
from penstock.server.metrics import Metrics, log_throughput
from penstock.server.middleware import RequestMiddleware
from penstock.server.not_here import not_here_router
from penstock.server.one_model import OneModel
from penstock.server.orders import Orders
from penstock.server.origins import SocketOrigins
from penstock.server.reports import RequestReports, newest
from penstock.server.resumable import ResumableMiddleware, ResumableStreams
from penstock.server.root_path import RootPath, check_root_of
from penstock.server.siblings import Siblings
from penstock.server.slots import Slots
from penstock.server.store import ResponseStore
from penstock.server.tools.connected import ServerTools, check_mcp
from penstock.server.tools.servers_file import read_servers
from penstock.server.traces import RequestTraces
from penstock.server.web.routes import web_router

_ANY_CALL: Final[Any] = {"allow_origin_regex": LOCAL_ORIGINS, "allow_methods": ["*"], "allow_headers": ["*"]}
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    served: Frontend | ModelHost,
    options: ServerOptions,
    lifecycle: Lifecycle | None = None,
    *,
    siblings: Siblings | None = None,
) -> FastAPI:
    """The application over an engine that may still be loading, or over a host of many models.

    Args:
        served: joins text and the engine's client, which is started and closed by the caller; or a host, which the
            caller closes.
        options: keys, bound host and CORS origins.
        lifecycle: shared with whoever drains the server; by default its own.
        siblings: the other HTTP processes of this server, all of which keep responses in one file; None for one alone.

    Raises:
        ConfigError: an API key is empty, or the responses' store or the slots' folder cannot be used.
    """
    lifecycle = lifecycle or Lifecycle()
    if options.slot_save_path is not None:
        lifecycle.slots = Slots(Path(options.slot_save_path).expanduser())
    metrics = Metrics()
    reports = _reports(options)
    models = _models(served, options, lifecycle, metrics)
    context = _context(models, options, lifecycle, metrics, siblings)
    responses = Responses(context, ResponseStore(options.responses_store, shared=siblings is not None), reports)
    admins, hosts = AdminKeys(options.admin_keys), HostRule("" if options.uds is not None else options.host)
    keys = ApiKeys((*options.api_keys, *options.admin_keys) if options.api_keys else ())

    app = FastAPI(
        title="Penstock",
        version=__version__,
        description="Large language models over the APIs that clients already use.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        lifespan=lambda _: _lifespan(context, responses, reports),
        default_response_class=Response,
    )
    streams = ResumableStreams()
    _include(app, context, _routers(context, responses, admins, options, streams), admins, options)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.include_router(_requests_router(reports, admins, siblings), tags=["Operation"])
    _add_hooks(app, options)
    check_room = models.check_room
    app.add_middleware(
        RequestMiddleware,
        keys=keys,
        hosts=hosts,
        lifecycle=lifecycle,
        metrics=metrics,
        reports=reports,
        check_room=check_room,
        processes=1 if siblings is None else siblings.count,
    )
    app.add_middleware(ResumableMiddleware, streams=streams)
    _add_outermost(app, options)
    return app


def _context(
    models: ServedModels, options: ServerOptions, lifecycle: Lifecycle, metrics: Metrics, siblings: Siblings | None
) -> ServerContext:
    trust = options.trust_request_chat_template
    told = {"shows_slots": options.slots, "changes_props": options.props}
    habits = Habits(options.force_include_usage, options.tokens_as_ids)
    tools = None
    if options.mcp_servers is not None:
        check_mcp()
        tools = ServerTools(read_servers(Path(options.mcp_servers)))
    return ServerContext(
        models, lifecycle, metrics, trust, siblings, **told, habits=habits, tools=tools, orders=Orders(siblings)
    )


def _reports(options: ServerOptions) -> RequestReports:
    traces = None if options.otlp_traces_endpoint is None else RequestTraces(options.otlp_traces_endpoint)
    return RequestReports(log=options.log_requests, traces=traces)


def _add_outermost(app: FastAPI, options: ServerOptions) -> None:
    """What sees a request before its key is looked at; the last is the first to see it."""
    if options.allowed_origins != (NO_ORIGIN,):
        app.add_middleware(CORSMiddleware, allow_origins=list(options.allowed_origins), **_ANY_CALL)
    app.add_middleware(SocketOrigins, allowed=options.allowed_origins)
    if options.root_path:
        check_root_of(options.root_path, _paths(app.routes))
        app.add_middleware(RootPath, prefix=options.root_path)


def _add_hooks(app: FastAPI, options: ServerOptions) -> None:
    if options.pre is not None or options.post is not None:
        before = None if options.pre is None else load_hook(options.pre, "--pre")
        after = None if options.post is None else load_hook(options.post, "--post")
        app.add_middleware(HookMiddleware, before=before, after=after)


async def _know_adapters(context: ServerContext) -> None:
    """Has this process know the adapters that came before it did."""
    if context.siblings is None:
        return
    with suppress(HttpError):  # nobody is beside it
        await AdapterOrders(context.models.adapters, context.orders).learn()


@asynccontextmanager
async def _lifespan(context: ServerContext, responses: Responses, reports: RequestReports) -> AsyncIterator[None]:
    siblings = context.siblings
    log = asyncio.ensure_future(log_throughput(context.models.engines if siblings is None or siblings.first else dict))
    if siblings is not None:
        siblings.answer(context.own_figures, reports.recent)
    known = asyncio.ensure_future(_know_adapters(context))
    yield
    for task in (log, known):
        task.cancel()
    await asyncio.gather(log, known, return_exceptions=True)
    await responses.aclose()
    if context.tools is not None:
        await context.tools.aclose()
    await asyncio.to_thread(reports.close)


class _Description:
    """The application's own description, which is made when it is asked for, and again when other models are there."""

    def __init__(self, app: FastAPI, context: ServerContext, options: ServerOptions) -> None:
        self._app, self._context = app, context
        self._secured, self._root = bool(options.api_keys), options.root_path
        many = context.models.host is not None
        self._bodies = (*_bodies(), PauseBody, *((*MANAGEMENT_BODIES, *LIBRARY_BODIES) if many else ()))
        self._described: document.ServedModelFacts | None = None
        self._made: dict[str, Any] = {}
        self._making = threading.Lock()

    def now(self) -> dict[str, Any]:
        """That of the models there are now, which takes a second or more the first time."""
        return self._of(_facts(self._context))

    async def answer(self) -> Response:
        """The same, made beside the event loop."""
        return await made_answer(partial(self._of, _facts(self._context)))

    def _of(self, facts: document.ServedModelFacts) -> dict[str, Any]:
        with self._making:
            if self._described != facts:
                made = document.openapi(self._app, self._bodies, facts, secured=self._secured)
                self._made = {**made, "servers": [{"url": self._root}]} if self._root else made
                self._described = facts
            return self._made


def _bodies() -> tuple[type[BaseModel], ...]:
    """What requests to the dialects are made of."""
    pooling = (EmbeddingBody, ClassifyBody, PoolingBody, CohereEmbedBody, RerankBody, TextsRerankBody, ScoreBody)
    openai = (ChatBody, CompletionBody, ResponsesBody, InputTokensBody, CompactBody, ModerationBody, DecisionBody)
    tokens = (TokenizeBody, LlamaTokenizeBody, DetokenizeBody)
    return (
        *openai,
        ControlBody,
        LookupBody,
        ToolBody,
        *tokens,
        *CONVERSATION_BODIES,
        ChatUpdateBody,
        *pooling,
        *ANTHROPIC_BODIES,
        *OLLAMA_BODIES,
        *LLAMA_BODIES,
        SlotBody,
        CachePrompt,
        PinBody,
        LlamaEmbeddingBody,
        *TGI_BODIES,
        *SGLANG_BODIES,
        VertexBody,
        *KSERVE_BODIES,
        *KOBOLD_BODIES,
        *WEBUI_BODIES,
        *VLLM_BODIES,
        *ADAPTER_BODIES,
        ScoringBody,
    )


def _models(
    served: Frontend | ModelHost, options: ServerOptions, lifecycle: Lifecycle, metrics: Metrics
) -> ServedModels:
    trust = options.trust_request_chat_template
    if isinstance(served, Frontend):
        name = served.served_name
        adapters = AdapterNames(options.lora_modules, options.lora, (name, *options.aliases).__contains__, name)
        model = ModelContext(served, lifecycle, metrics.model(name), trust, adapters=adapters, base=name)
        return OneModel(model, options.aliases, any_name=options.any_model)
    return HostedModels(served, lifecycle, metrics, options.lora_modules, trust_template=trust)


def _facts(context: ServerContext) -> document.ServedModelFacts:
    names = context.models.names()
    if context.models.host is not None:
        others = (other for name in names for other in called(name))
        return document.ServedModelFacts(tuple(names), tuple(dict.fromkeys(others)))
    (model,) = context.models.all()
    text = model.frontend.text
    named = sorted(text.template.sources) if text.template else []
    return document.ServedModelFacts(
        names=tuple(names),
        called=tuple(other for name in names for other in called(name)),
        vocab_size=text.vocab_size,
        templates=None if context.trust_request_chat_template else tuple(named),
        dimensions=text.pooling.size,
    )


def _include(
    app: FastAPI,
    context: ServerContext,
    dialects: Mapping[str, Sequence[APIRouter]],
    admins: AdminKeys,
    options: ServerOptions,
) -> None:
    """Adds every route, in the group it is described in."""
    for group, routers in dialects.items():
        for router in routers:
            app.include_router(router, tags=[group])
    if (host := context.models.host) is not None:
        app.include_router(management_router(context, host, admins), tags=["Loading models"])
        app.include_router(library_router(context, host, open_shelf(), admins), tags=["Library"])
    description = _Description(app, context, options)
    app.openapi = description.now  # type: ignore[method-assign]
    app.include_router(_operator_router(context, description), tags=["Operation"])
    app.include_router(cache_router(context), tags=["Operation"])
    app.include_router(engine_control_router(context, admins), tags=["Operation"])
    app.include_router(engine_sleep_router(context, admins), tags=["Operation"])
    app.include_router(web_router(page=options.page), tags=["Pages"])


def _routers(
    context: ServerContext, responses: Responses, admins: AdminKeys, options: ServerOptions, streams: ResumableStreams
) -> Mapping[str, Sequence[APIRouter]]:
    """Those of the dialects, by the groups they are described in."""
    chats, running = StoredChats(responses.store), RunningChats()
    sessions = Sessions(responses.store)
    return {
        "OpenAI: chats and completions": (
            openai_router(context, chats, running),
            stored_chats_router(chats),
            models_router(context),
            moderation_router(context, options.moderation_model),
            decisions_router(context),
        ),
        "OpenAI: responses": (responses_router(responses), conversations_router(responses.conversations)),
        "Anthropic": (anthropic_router(context),),
        "Ollama": (ollama_router(context, admins, page=options.page),),
        "vLLM": (vllm_router(context), scoring_router(context)),
        "Adapters": (adapters_router(context, admins),),
        "llama-server": (
            llama_server_router(context),
            slots_router(context),
            chat_control_router(running, context.orders),
            llama_embeddings_router(context),
            resumed_router(streams, context.lifecycle),
            server_tools_router(context.tools, admins, context.lifecycle),
        ),
        "TGI": (tgi_router(context),),
        "SGLang": (sglang_router(context, sessions), sessions_router(sessions)),
        "KServe and Triton": (kserve_router(context),),
        "Kobold": (kobold_router(context),),
        "SageMaker": (sagemaker_router(context),),
        "Vertex AI": (vertex_router(),),
        "text-generation-webui": (webui_router(context),),
        "Not here": (not_here_router(),),
        "Embeddings and ranking": (embeddings_router(context), cohere_router(context), rerank_router(context)),
        "Tokens and templates": (tokenize_router(context), render_router(responses)),
    }


def _methods(routes: Sequence[object], path: str) -> set[str]:
    """Those that any route takes at a path: the router tells of the first alone."""
    found: set[str] = set()
    for route in routes:
        if isinstance(route, Route):
            found |= (route.methods or set()) if route.path_regex.match(path) else set()
        else:
            inner = getattr(route, "original_router", route)
            found |= _methods(getattr(inner, "routes", ()), path)
    return found


def _paths(routes: Sequence[object]) -> Iterator[str]:
    """Of all routes."""
    for route in routes:
        if isinstance(route, Route):
            yield route.path
        else:
            yield from _paths(getattr(getattr(route, "original_router", route), "routes", ()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """The router's own refusals: no such route, no such method."""
    status = getattr(error, "status_code", 500)
    if status == 404:
        message = f"There is no route {request.method} {format_value(request.url.path)}; GET /docs lists the routes."
        error = HttpError(404, message, code="unknown_route")
    elif status == 405:
        allowed = ", ".join(sorted(_methods(request.app.routes, request.url.path)))
        message = f"The method {format_value(request.method)} is not available here; allowed: {allowed or 'see /docs'}."
        error = HttpError(405, message, code="method_not_allowed", headers={"Allow": allowed} if allowed else {})
    return error_response(error, request.scope)


def _requests_router(reports: RequestReports, admins: AdminKeys, siblings: Siblings | None) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/requests", summary="The last requests for models: tokens and times", openapi_extra=gives("application/json")
    )
    async def requests(request: Request) -> Response:
        owner = None if admins.holds_one(request.headers) else account_of(request).owner
        known = [reports.recent(owner)] if siblings is None else await siblings.requests(owner)
        return json_response({"now": time.time(), "requests": newest(known)})

    return router


def _operator_router(context: ServerContext, description: _Description) -> APIRouter:
    router = APIRouter()
    lifecycle = context.lifecycle

    def state() -> str:
        return "draining" if lifecycle.draining else context.models.state.value

    @router.get("/livez", summary="Whether the process is worth keeping", openapi_extra=gives("application/json"))
    async def livez() -> Response:
        dead = context.models.state is EngineState.STOPPED and not lifecycle.draining
        return json_response({"status": "stopped" if dead else "alive"}, 503 if dead else 200)

    @router.get("/readyz", summary="Whether requests are taken", openapi_extra=gives("application/json"))
    async def readyz() -> Response:
        ready = state() == EngineState.READY.value
        return json_response({"status": state()}, 200 if ready else 503, {} if ready else {"Retry-After": "1"})

    async def health() -> Response:
        if state() != EngineState.READY.value:
            loading = state() == EngineState.STARTING.value
            raise not_ready("Loading model" if loading else f"The server is {state()}.", "not_ready")
        return json_response({"status": "ok"})

    for path in ("/health", "/v1/health"):
        router.get(path, summary="As /readyz, for llama-server's clients", openapi_extra=gives("application/json"))(
            health
        )

    @router.get("/version", summary="The version of this server", openapi_extra=gives("application/json"))
    async def version() -> Response:
        return json_response({"version": __version__, "arithmetic_version": ARITHMETIC_VERSION})

    @router.get("/metrics", summary="Prometheus metrics", openapi_extra=gives("text/plain"))
    async def metrics() -> Response:
        return Response(await context.exposition(), media_type=_PROMETHEUS)

    @router.get("/openapi.json", summary="This API as an OpenAPI document", openapi_extra=gives("application/json"))
    async def openapi_json() -> Response:
        return await description.answer()

    return router
