"""The TGI dialect's routes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock import __version__
from penstock.config import limits
from penstock.config.errors import param_names
from penstock.engine.frontend import Frontend
from penstock.server.active_call import EventStream, event, open_call
from penstock.server.body import read_body, translated
from penstock.server.connected import while_connected
from penstock.server.context import ServerContext
from penstock.server.dialects.openai.schema import ChatBody
from penstock.server.dialects.openai.translate import chat_call, sent_names
from penstock.server.dialects.tgi.reply import TgiReply
from penstock.server.dialects.tgi.schema import TgiBody
from penstock.server.dialects.tgi.translate import SENT, in_tokens, tgi_call
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_answer, json_response, made_answer
from penstock.server.errors import describe


async def tgi_answer(
    request: Request, context: ServerContext, body: TgiBody, *, stream: bool, listed: bool = False
) -> Response:
    """The answer to a body: events, or one object, in a list of its own where it is `listed`."""
    adapter = body.parameters.adapter_id if body.parameters else None
    model = await context.model(request, body.model, events=stream, adapter=adapter)
    model.require_ready()
    frontend = model.frontend
    with param_names(SENT):
        call = await translated(request, lambda: tgi_call(body, frontend.text.defaults, stream=stream))
        ids = await frontend.tokenize(call.request)
        call = in_tokens(call, ids, body.parameters.truncate if body.parameters else None)
        active = await open_call(request, model, [call.request], best=call.best_of)
    reply = TgiReply(call, active, frontend)
    if stream:
        return EventStream(
            reply.events(),
            active.aclose,
            context.lifecycle,
            failed=lambda error: event(describe(error, request.scope)[1]),
        )
    async with active:
        told = await while_connected(reply.whole(), request.receive, context.lifecycle)
    return await json_answer([told] if listed else told)


def tgi_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.post("/", summary="Continue a text, in events or not", openapi_extra=takes(TgiBody, EVENTS))
    async def compat_generate(request: Request) -> Response:
        body = await read_body(request, TgiBody)
        return await tgi_answer(request, context, body, stream=bool(body.stream), listed=True)

    @router.post("/generate_stream", summary="Continue a text, in events", openapi_extra=takes(TgiBody, EVENTS))
    async def generate_stream(request: Request) -> Response:
        return await tgi_answer(request, context, await read_body(request, TgiBody), stream=True)

    @router.post("/chat_tokenize", summary="The prompt of a chat, in tokens", openapi_extra=takes(ChatBody))
    async def chat_tokenize(request: Request) -> Response:
        body = await read_body(request, ChatBody)
        model = await context.model(request, body.model)
        model.check_template(body.chat_template)
        model.require_ready()
        frontend = model.frontend
        with param_names(sent_names(body)):
            chat = (await translated(request, chat_call, body, frontend.text.defaults)).requests[0]
            prompt = await asyncio.to_thread(frontend.render, chat)
            ids = await frontend.tokenize(chat)
        return await made_answer(
            lambda: {"tokenize_response": simple_tokens(frontend, prompt, ids), "templated_text": prompt}
        )

    @router.get("/info", summary="What the server and its model are, as TGI", openapi_extra=gives("application/json"))
    async def info(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        return json_response(_info(model.frontend))

    return router


def _info(frontend: Frontend) -> dict[str, Any]:
    """The model's properties; of its files nothing but the name is told."""
    info = frontend.info
    return {
        "model_id": frontend.served_name,
        "model_sha": None,
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": info.max_num_seqs,
        "max_best_of": limits.MAX_N,
        "max_stop_sequences": limits.MAX_STOP_STRINGS,
        "max_input_tokens": info.max_model_len - 1,
        "max_input_length": info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "max_batch_total_tokens": info.num_blocks * info.block_size,
        "max_batch_size": info.max_num_seqs,
        "max_client_batch_size": limits.MAX_PROMPTS_PER_CALL,
        "validation_workers": 1,
        "router": "penstock",
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def simple_tokens(frontend: Frontend, text: str, ids: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens with their place in a text, characters; those that stand for nothing in it have no length."""
    raw, told = text.encode("utf-8", "replace"), []
    at, begin = 0, 0
    for token in ids:
        piece = frontend.token_bytes(token)
        bare = piece.lstrip(b" ")  # tokenizers that put a space before the text
        found = next((one for one in (piece, bare) if one and raw.startswith(one, at)), b"")
        end = begin + sum(byte & 0xC0 != 0x80 for byte in found)  # bytes that begin a character
        told.append({"id": token, "text": piece.decode("utf-8", "replace"), "start": begin, "stop": end})
        at, begin = at + len(found), end
    return told
