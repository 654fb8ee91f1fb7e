"""What a request becomes before it runs: vLLM's render routes, llama-server's /apply-template, counts of tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.core.request import GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.server.body import read_body, translated
from penstock.server.dialects.openai.routes import named
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody, Sampling
from penstock.server.dialects.openai.translate import OpenAICall, chat_call, completion_call, sent_names
from penstock.server.dialects.responses.schema import InputTokensBody
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.responses.translate import sent_names as response_names
from penstock.server.document import takes
from penstock.server.encoding import json_answer, json_response, made_answer
from penstock.server.prompts import check_shared


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat as it would run: its model's name, its body and call, its prompt and the prompt's tokens."""

    model: str
    body: ChatBody
    call: OpenAICall
    prompt: str
    ids: tuple[int, ...]


def render_router(responses: Responses) -> APIRouter:
    """The routes over one server's context."""
    router, context = APIRouter(), responses.context

    async def chat_request(request: Request) -> _Chat:
        body = await read_body(request, ChatBody)
        model = await context.model(request, body.model)
        model.check_template(body.chat_template)
        model.require_ready()
        with param_names(sent_names(body)):
            call = named(await translated(request, chat_call, body, model.frontend.text.defaults), request)
            prompt = await asyncio.to_thread(model.frontend.render, call.requests[0])
            return _Chat(model.model, body, call, prompt, await model.frontend.tokenize(call.requests[0]))

    @router.post("/v1/chat/completions/render", summary="A chat as it would run", openapi_extra=takes(ChatBody))
    async def render_chat(request: Request) -> Response:
        chat = await chat_request(request)
        call = chat.call
        return await json_answer(_rendered(chat.body, chat.model, call.id, call.requests[0], chat.prompt, chat.ids))

    @router.post("/v1/completions/render", summary="Texts as they would run", openapi_extra=takes(CompletionBody))
    async def render_texts(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        model = await context.model(request, body.model)
        model.require_ready()
        frontend = model.frontend
        with param_names(sent_names(body)):
            call = named(await translated(request, completion_call, body, frontend.text.defaults), request)
            check_shared(call.requests)
            found = [(item, await frontend.tokenize(item)) for item in call.requests]

        def made() -> list[dict[str, Any]]:
            result = []
            for index, (item, ids) in enumerate(found):
                prompt = frontend.detokenize(ids) if item.prompt is None else item.prompt
                result.append(_rendered(body, model.model, f"{call.id}-{index}", item, prompt, ids))
            return result

        return await made_answer(made)

    @router.post("/apply-template", summary="The prompt of a chat", openapi_extra=takes(ChatBody))
    async def apply_template(request: Request) -> Response:
        return await json_answer({"prompt": (await chat_request(request)).prompt})

    @router.post("/v1/chat/completions/input_tokens", summary="Count a chat's tokens", openapi_extra=takes(ChatBody))
    async def input_tokens(request: Request) -> Response:
        ids = (await chat_request(request)).ids
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    _count_responses(router, responses)
    return router


def _rendered(
    body: Sampling, model: str, name: str, request: GenerationRequest, prompt: str, ids: tuple[int, ...]
) -> dict[str, Any]:
    options = body.stream_options
    return {
        "request_id": name,
        "model": model,
        "prompt": prompt,
        "token_ids": ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(request.sampling),
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(),
        "cache_salt": request.cache_salt or None,
        "priority": request.priority,
    }


def _count_responses(router: APIRouter, responses: Responses) -> None:
    context = responses.context

    @router.post("/v1/responses/input_tokens", summary="Count a prompt's tokens", openapi_extra=takes(InputTokensBody))
    async def response_tokens(request: Request) -> Response:
        body = await read_body(request, InputTokensBody)
        model = await context.model(request, body.model)
        model.require_ready()
        with param_names(response_names(body)):
            _, prompt = await responses.prompt(request, body, SamplingParams())
            ids = await model.frontend.tokenize(prompt)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})
