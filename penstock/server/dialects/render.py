"""What a request becomes before it runs: vLLM's render routes, llama-server's /apply-template, counts of tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.config.errors import param_names
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.body import read_body, translated
from penstock.server.context import ModelContext
from penstock.server.dialects.anthropic.routes import read_messages
from penstock.server.dialects.anthropic.routes import sent_names as message_names
from penstock.server.dialects.anthropic.schema import MessagesBody
from penstock.server.dialects.anthropic.translate import messages_call
from penstock.server.dialects.openai.routes import named
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody, Sampling
from penstock.server.dialects.openai.translate import OpenAICall, chat_call, completion_call, sent_names
from penstock.server.dialects.responses.schema import InputTokensBody, ResponsesBody
from penstock.server.dialects.responses.service.responses import Responses
from penstock.server.dialects.responses.translate import sent_names as response_names
from penstock.server.document import takes
from penstock.server.encoding import json_answer, json_response, made_answer
from penstock.server.infilling import infilled
from penstock.server.prompt_embeds import check_tokens
from penstock.server.prompts import check_shared


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat as it would run: its model, its body and call, its prompt and the prompt's tokens."""

    context: ModelContext
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
            check_tokens(call.requests)
            prompt = await asyncio.to_thread(model.frontend.render, call.requests[0])
            return _Chat(model, body, call, prompt, await model.frontend.tokenize(call.requests[0]))

    @router.post("/v1/chat/completions/render", summary="A chat as it would run", openapi_extra=takes(ChatBody))
    async def render_chat(request: Request) -> Response:
        chat = await chat_request(request)
        call = chat.call
        told = _rendered(chat.body, chat.context.model, call.id, call.requests[0], chat.prompt, chat.ids)
        offsets = await asyncio.to_thread(_offsets, chat.body, chat.context, chat.prompt, chat.ids)
        return await json_answer({**told, "token_offsets": offsets})

    @router.post("/v1/completions/render", summary="Texts as they would run", openapi_extra=takes(CompletionBody))
    async def render_texts(request: Request) -> Response:
        body = await read_body(request, CompletionBody)
        model = await context.model(request, body.model)
        model.require_ready()
        frontend = model.frontend
        with param_names(sent_names(body)):
            call = named(await translated(request, completion_call, body, frontend.text.defaults), request)
            check_shared(check_tokens(call.requests))
            requests = await translated(request, infilled, call.requests, body.suffix, frontend)
            found = [(item, await frontend.tokenize(item)) for item in requests]

        def made() -> list[dict[str, Any]]:
            result = []
            for index, (item, ids) in enumerate(found):
                prompt = frontend.detokenize(ids) if item.prompt is None else item.prompt
                told = _rendered(body, model.model, f"{call.id}-{index}", item, prompt, ids)
                result.append({**told, "token_offsets": _offsets(body, model, prompt, ids)})
            return result

        return await made_answer(made)

    @router.post("/apply-template", summary="The prompt of a chat", openapi_extra=takes(ChatBody))
    async def apply_template(request: Request) -> Response:
        return await json_answer({"prompt": (await chat_request(request)).prompt})

    async def input_tokens(request: Request) -> Response:
        ids = (await chat_request(request)).ids
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    for prefix in ("/v1", ""):
        path = f"{prefix}/chat/completions/input_tokens"
        router.post(path, summary="Count a chat's tokens", openapi_extra=takes(ChatBody))(input_tokens)

    _count_responses(router, responses)
    _render_turns(router, responses)
    return router


def _render_turns(router: APIRouter, responses: Responses) -> None:
    """The routes for bodies of Responses and of Messages, which always tell where tokens stood."""
    context = responses.context

    async def rendered(
        body: ResponsesBody | MessagesBody, model: ModelContext, name: str, request: GenerationRequest
    ) -> Response:
        model.require_ready()
        prompt = await asyncio.to_thread(model.frontend.render, request)
        ids = await model.frontend.tokenize(request)

        def made() -> dict[str, Any]:
            told = _told(model.model, name, request, prompt, ids)
            return {**told, "stream": bool(body.stream), "token_offsets": _places(model, prompt, ids)}

        return await made_answer(made)

    @router.post("/v1/responses/render", summary="A response as it would run", openapi_extra=takes(ResponsesBody))
    async def render_response(request: Request) -> Response:
        body = await read_body(request, ResponsesBody)
        model = await context.model(request, body.model)
        model.require_ready()
        with param_names(response_names(body)):
            call = await responses.call(request, body, model)
            return await rendered(body, model, call.id, call.request)

    @router.post("/v1/messages/render", summary="Messages as they would run", openapi_extra=takes(MessagesBody))
    async def render_messages(request: Request) -> Response:
        body = await read_messages(request, MessagesBody)
        model = await context.model(request, body.model)
        with param_names(message_names(body)):
            call = await translated(request, messages_call, body, model.frontend.text.defaults)
            return await rendered(body, model, f"msg_{call.request.request_id}", call.request)


def _offsets(body: Sampling, model: ModelContext, prompt: str, ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """Places of tokens, where they are asked for."""
    return _places(model, prompt, ids) if body.return_token_offsets else None


def _places(model: ModelContext, prompt: str, ids: Sequence[int]) -> list[tuple[int, int]] | None:
    """The characters that each token stands for, from the first to behind the last.

    None where tokens do not spell the prompt as it is: it was cut, or its letters are made small. Each of several
    tokens that make up one character has all of it.
    """
    pieces = [model.frontend.token_bytes(token) for token in ids]
    if b"".join(pieces) != prompt.encode():
        return None
    starts = [byte & 0xC0 != 0x80 for piece in pieces for byte in piece]  # the first byte of a character
    seen = [0, *accumulate(starts)]  # characters that have begun before each byte, and before the end
    found, place = [], 0
    for piece in pieces:
        inside = bool(piece) and not starts[place]
        end = place + len(piece)
        found.append((seen[place] - inside, seen[end]))
        place = end
    return found


def _rendered(
    body: Sampling, model: str, name: str, request: GenerationRequest, prompt: str, ids: tuple[int, ...]
) -> dict[str, Any]:
    options = body.stream_options
    return {
        **_told(model, name, request, prompt, ids),
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(),
    }


def _told(model: str, name: str, request: GenerationRequest, prompt: str, ids: tuple[int, ...]) -> dict[str, Any]:
    return {
        "request_id": name,
        "model": model,
        "prompt": prompt,
        "token_ids": ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(request.sampling),
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
            prompt = (await responses.prompt(request, body, SamplingParams())).request
            ids = await model.frontend.tokenize(prompt)
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})
