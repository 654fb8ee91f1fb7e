"""Text or chats into token ids and back, as vLLM and llama-server have it: the fields of a body tell which is meant."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, WithJsonSchema
from starlette.responses import Response

from penstock.config.errors import RequestError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.server.body import Marked, read_body, read_either, translated
from penstock.server.context import ModelContext, ServerContext
from penstock.server.conversation import checked_messages, checked_tools, prompted, template_kwargs
from penstock.server.dialects.tgi.routes import simple_tokens
from penstock.server.dialects.tgi.schema import TgiTokenizeBody
from penstock.server.document import takes
from penstock.server.encoding import made_answer
from penstock.server.errors import bad_value
from penstock.server.mixed_prompts import mixed_ids
from penstock.server.shapes import STRING, Body, Loose, Messages, Objects, TokenIds, Tools, whole
from penstock.server.spoken import Dialect


class TokenizeBody(Body):
    """A text, or a chat in the model's own template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    return_token_strs: bool | None = None


_CONTENT: dict[str, Any] = {
    "anyOf": [STRING, {"type": "array", "items": {"anyOf": [STRING, {"type": "integer", "minimum": 0}]}}]
}


class LlamaTokenizeBody(Loose):
    """llama-server's body: a text under `content`, or a list of texts and token ids. Unknown fields are passed over."""

    content: Annotated[Any, WithJsonSchema(_CONTENT)]
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: TokenIds


def _request(body: TokenizeBody) -> GenerationRequest:
    """What /tokenize asks, as a request that is never run."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Send exactly one of prompt and messages.", param="prompt", code="invalid_value")
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=SamplingParams(),
        prompt=body.prompt,
        messages=None if body.messages is None else checked_messages(body.messages),
        tools=checked_tools(body.tools),
        add_generation_prompt=prompted(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=template_kwargs(
            body.chat_template_kwargs, None, chat_template=body.chat_template, documents=body.documents
        ),
        add_special_tokens=body.add_special_tokens,
    )


def _text_tokens(body: LlamaTokenizeBody, frontend: Frontend) -> dict[str, Any]:
    """llama-server's answer: ids, or each with its text, or with its bytes where they are no text."""
    pieces, vocab_size = whole(body.content), frontend.info.vocab_size
    pieces = [pieces] if isinstance(pieces, str) else pieces
    if not isinstance(pieces, list) or not set(map(type, pieces)) <= {int, str}:
        raise bad_value("content", body.content, "a string, or a list of strings and token ids")
    special = body.parse_special is not False
    ids = mixed_ids(pieces, "content", frontend, add_special=bool(body.add_special), parse_special=special)
    for index, piece in enumerate(pieces):
        if isinstance(piece, int) and not 0 <= piece < vocab_size:
            raise bad_value(f"content[{index}]", piece, f"token ids below {vocab_size}")
    return {"tokens": [{"id": token, "piece": _piece(frontend, token)} for token in ids] if body.with_pieces else ids}


def _piece(frontend: Frontend, token: int) -> str | list[int]:
    raw = frontend.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


async def _tgi_tokens(model: ModelContext, body: TgiTokenizeBody) -> Response:
    """TGI's answer: each token with its text and place."""
    model.require_ready()
    added = body.add_special_tokens is not False
    asked = GenerationRequest(uuid.uuid4().hex, SamplingParams(), prompt=body.inputs, add_special_tokens=added)
    with param_names({"prompt": "inputs"}):
        ids = await model.frontend.tokenize(asked)
    return await made_answer(lambda: simple_tokens(model.frontend, body.inputs, ids))


def tokenize_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def tokenize(request: Request) -> Response:
        llama, tgi = Marked("content", LlamaTokenizeBody), Marked("inputs", TgiTokenizeBody, Dialect.TGI)
        body: TokenizeBody | LlamaTokenizeBody | TgiTokenizeBody = await read_either(request, TokenizeBody, llama, tgi)
        model = await context.model(request, body.model)
        if isinstance(body, TgiTokenizeBody):
            return await _tgi_tokens(model, body)
        if isinstance(body, LlamaTokenizeBody):
            model.require_ready()
            return await made_answer(partial(_text_tokens, body, model.frontend))
        model.check_template(body.chat_template)
        model.require_ready()
        try:
            ids = await model.frontend.tokenize(await translated(request, _request, body))
        except RequestError:
            if body.prompt != "":  # which cannot be continued, but can be counted
                raise
            ids = ()

        def made() -> dict[str, Any]:
            pieces = list(map(model.frontend.text.tokenizer.piece, ids)) if body.return_token_strs else None
            counts = {"count": len(ids), "max_model_len": model.max_model_len()}
            return {**counts, "tokens": list(ids), "token_strs": pieces}

        return await made_answer(made)

    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody)
        model = await context.model(request, body.model)
        model.require_ready()
        vocab_size = model.frontend.info.vocab_size

        def made() -> dict[str, Any]:
            if max(body.tokens, default=0) >= vocab_size:
                index = next(index for index, token in enumerate(body.tokens) if token >= vocab_size)
                raise bad_value(f"tokens[{index}]", body.tokens[index], f"token ids below {vocab_size}")
            text = model.frontend.detokenize(body.tokens)
            return {"prompt": text, "content": text}  # vLLM's name and llama-server's

        return await made_answer(made)

    for prefix in ("", "/v1"):
        router.post(
            f"{prefix}/tokenize",
            summary="Text to token ids",
            openapi_extra=takes(TokenizeBody, others=(LlamaTokenizeBody, TgiTokenizeBody)),
        )(tokenize)
        router.post(f"{prefix}/detokenize", summary="Token ids to text", openapi_extra=takes(DetokenizeBody))(
            detokenize
        )
    return router
