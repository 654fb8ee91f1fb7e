"""vLLM's own routes."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.server.active_call import EventStream, complete, open_call
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.dialects.vllm.reply import TokensReply
from penstock.server.dialects.vllm.schema import TokensBody
from penstock.server.dialects.vllm.translate import tokens_call
from penstock.server.document import EVENTS, gives, takes
from penstock.server.encoding import json_answer, json_response


def vllm_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.post("/inference/v1/generate", summary="Continue tokens", openapi_extra=takes(TokensBody, EVENTS))
    async def generate(request: Request) -> Response:
        body = await read_body(request, TokensBody)
        model = await context.model(request, body.model, events=body.stream)
        model.require_ready()
        call = await translated(request, tokens_call, body)
        if call.stream and context.habits.usage:
            call = replace(call, include_usage=True)
        with param_names({"prompt": "token_ids"}):
            active = await open_call(request, model, [call.request])
        reply = TokensReply(call, active, model.frontend)
        if call.stream:
            return EventStream(reply.events(), active.aclose, context.lifecycle)
        return await complete(reply.whole(), active, request.receive, context.lifecycle)

    @router.get("/load", summary="Requests that are being answered", openapi_extra=gives("application/json"))
    async def load() -> Response:
        return json_response({"server_load": context.lifecycle.in_flight})

    _add_tokenizer(router, context)
    return router


def _add_tokenizer(router: APIRouter, context: ServerContext) -> None:
    @router.get("/tokenizer_info", summary="The tokenizer and its templates", openapi_extra=gives("application/json"))
    async def tokenizer_info(request: Request) -> Response:
        model = await context.model(request, None)
        model.require_ready()
        text = model.frontend.text
        tokenizer = text.tokenizer
        names = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        templates = dict(text.template.sources) if text.template else {}
        return await json_answer(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": text.vocab_size,
                "model_max_length": model.max_model_len(),
                **{name: None if token is None else tokenizer.piece(token) for name, token in names.items()},
                "additional_special_tokens": sorted(filter(None, map(tokenizer.piece, tokenizer.special_ids))),
                "chat_template": templates.get("default"),
                "chat_templates": templates,
            }
        )
