"""The SGLang dialect's routes."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.config.errors import param_names
from penstock.config.generation import GenerationRequest
from penstock.config.pooling import PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.engine.pooling import pool_all
from penstock.server.active_call import EventStream, complete, event, open_call
from penstock.server.auth import owner_of
from penstock.server.body import Marked, read_body, read_either, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, ClassifyBody, answered, classified
from penstock.server.dialects.sglang.reply import RunningReplies, SglangReply
from penstock.server.dialects.sglang.schema import AbortBody, SglangBody, SglangPoolingBody
from penstock.server.dialects.sglang.sessions.kept import Sessions
from penstock.server.dialects.sglang.translate import SENT, given_prompts, is_many, names_of, sglang_call
from penstock.server.dialects.tgi.routes import tgi_answer
from penstock.server.dialects.tgi.schema import TgiBody
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_response, made_answer
from penstock.server.errors import HttpError, describe
from penstock.server.prompts import text_request
from penstock.server.shapes import RequestBody
from penstock.server.spoken import Dialect

_ABORT: Final = "abort, as SGLang"


def sglang_router(context: ServerContext, sessions: Sessions) -> APIRouter:
    """The routes over one server's context."""
    router, running = APIRouter(), RunningReplies()
    context.orders.learn(_ABORT, running.abort)

    async def answer(request: Request, body: SglangBody) -> Response:
        model = await context.model(request, body.model, events=body.stream, adapter=body.lora_path)
        model.require_ready()
        frontend = model.frontend
        with param_names(SENT if body.text is not None else {**SENT, "prompt": "input_ids"}):
            turn = await sessions.take(owner_of(request), body, frontend)
            call = await translated(request, sglang_call, turn.body, frontend.text.defaults)
            active = await turn.opened(open_call(request, model, call.requests), partial(_end, context, request, model))
        reply, owner = SglangReply(call, active, frontend), owner_of(request)
        running.add(owner, reply)

        async def ended() -> None:
            running.remove(owner, reply)
            await turn.end(reply.tokens)

        if not body.stream:
            try:
                return await complete(reply.whole(), active, request.receive, context.lifecycle)
            finally:
                await ended()

        async def close() -> None:
            await ended()
            await active.aclose()

        return EventStream(
            reply.events(),
            close,
            context.lifecycle,
            failed=lambda error: event(describe(error, request.scope)[1]) + b"data: [DONE]\n\n",
        )

    @router.post(
        "/generate",
        summary="Continue texts, as SGLang; or as TGI, with inputs",
        openapi_extra=takes(SglangBody, EVENTS, others=(TgiBody,)),
    )
    async def generate(request: Request) -> Response:
        tgi = Marked("inputs", TgiBody, Dialect.TGI)
        body: SglangBody | TgiBody = await read_either(request, SglangBody, tgi)
        if isinstance(body, TgiBody):
            return await tgi_answer(request, context, body, stream=False)
        return await answer(request, body)

    _add_abort(router, context)
    _add_pooling(router, context)
    _add_about(router, context)
    return router


async def _end(context: ServerContext, request: Request, model: ModelContext, rid: str) -> None:
    of = GenerationRequest(rid, SamplingParams(), owner=owner_of(request))
    await context.orders.give(_ABORT, of.owner, rid)
    model.frontend.client.cancel(of.live_id)


def _add_abort(router: APIRouter, context: ServerContext) -> None:
    @router.post("/abort_request", summary="End a request by its rid", openapi_extra=takes(AbortBody))
    async def abort(request: Request) -> Response:
        body = await read_body(request, AbortBody)
        if body.abort_all:
            raise HttpError(400, "abort_all is true; allowed: false. Send the rid of each request.", param="abort_all")
        await _end(context, request, await context.model(request, body.model), body.rid)
        return json_response({"success": True})


def _add_pooling(router: APIRouter, context: ServerContext) -> None:
    @router.post("/encode", summary="Embed texts, as SGLang", openapi_extra=takes(SglangPoolingBody))
    async def encode(request: Request) -> Response:
        body = await read_body(request, SglangPoolingBody)
        model = await context.model(request, body.model)
        return await sglang_pooled(request, model, body, model.frontend.text.pooling.embedding())

    async def classify(request: Request) -> Response:
        sglang = [Marked(mark, SglangPoolingBody, Dialect.SGLANG) for mark in ("text", "input_ids")]
        body: ClassifyBody | SglangPoolingBody = await read_either(request, ClassifyBody, *sglang)
        if isinstance(body, ClassifyBody):
            return await classified(request, context, body)
        model = await context.model(request, body.model)
        return await sglang_pooled(request, model, body, model.frontend.text.pooling.classification())

    for path in ("/classify", "/v1/classify"):
        about = takes(ClassifyBody, others=(SglangPoolingBody,))
        router.post(path, summary="Classify texts, as vLLM; or as SGLang, with text", openapi_extra=about)(classify)


async def sglang_pooled(
    request: Request, model: ModelContext, body: SglangPoolingBody, params: PoolingParams
) -> Response:
    """A vector of each text; one text is told as one object."""
    model.require_ready()
    prompts = await translated(request, given_prompts, body)
    field = "text" if body.text is not None else "input_ids"
    sent = [text_request(request, RequestBody(), prompt, ONE_TOKEN) for prompt in prompts]
    names = names_of(body, len(prompts))
    found = await answered(model, request, pool_all(model.frontend, sent, [params] * len(sent), field))

    def made() -> Any:
        told = [
            {"embedding": result.values.tolist(), "meta_info": {"id": name, "prompt_tokens": result.prompt_tokens}}
            for name, result in zip(names, found, strict=True)
        ]
        return told if is_many(body) else told[0]

    return await made_answer(made)


def _add_about(router: APIRouter, context: ServerContext) -> None:
    began = time.time()

    async def model_info(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        frontend = model.frontend
        return json_response(
            {
                "model_path": model.model,
                "served_model_name": model.model,
                "tokenizer_path": model.model,
                "is_generation": not frontend.text.pooling.labels,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "architectures": [frontend.info.architecture],
            }
        )

    async def server_info(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        info, stats = model.frontend.info, await model.frontend.client.stats()
        state = {"num_running_reqs": stats.running, "num_waiting_reqs": stats.waiting}
        return json_response(
            {
                "model_path": model.model,
                "served_model_name": model.model,
                "context_length": info.max_model_len,
                "max_running_requests": info.max_num_seqs,
                "max_total_num_tokens": info.num_blocks * info.block_size,
                "chunked_prefill_size": info.max_num_batched_tokens,
                "page_size": info.block_size,
                "dtype": info.dtype,
                "device": info.device,
                "internal_states": [state],
                "startup_time": began,
                "version": __version__,
            }
        )

    for path in ("/get_model_info", "/model_info"):
        router.get(path, summary="The model, as SGLang", openapi_extra=gives("application/json"))(model_info)
    for path in ("/get_server_info", "/server_info"):
        router.get(path, summary="The server, as SGLang", openapi_extra=gives("application/json"))(server_info)

    @router.get("/health_generate", summary="Whether a token can be generated", openapi_extra=gives("application/json"))
    async def health_generate(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        asked = GenerationRequest(uuid.uuid4().hex, replace(ONE_TOKEN, temperature=0.0), prompt_ids=(0,))
        async with await open_call(request, model, [asked]) as active:
            async for _ in active.deltas():
                pass
        return json_response({"status": "ok"})
