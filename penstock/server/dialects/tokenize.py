"""vLLM's routes for turning text or chats into token ids and back."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict
from starlette.responses import Response

from penstock.config.errors import RequestError
from penstock.core.request import GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.conversation import checked_messages, checked_tools, prompted, template_kwargs
from penstock.server.document import takes
from penstock.server.encoding import made_answer
from penstock.server.errors import bad_value
from penstock.server.shapes import Body, Messages, Objects, TokenIds, Tools


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


def tokenize_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody)
        model = await context.model(request, body.model)
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
            return {"prompt": model.frontend.detokenize(body.tokens)}

        return await made_answer(made)

    for prefix in ("", "/v1"):
        router.post(f"{prefix}/tokenize", summary="Text to token ids", openapi_extra=takes(TokenizeBody))(tokenize)
        router.post(f"{prefix}/detokenize", summary="Token ids to text", openapi_extra=takes(DetokenizeBody))(
            detokenize
        )
    return router
