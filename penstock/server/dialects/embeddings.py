"""OpenAI's embeddings, and vLLM's routes for classifying and for pooled states."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import OverloadedError, ParameterError, RequestError
from penstock.config.sampling import SamplingParams
from penstock.core.pooling import PoolingKind, PoolingParams
from penstock.core.request import FinishReason, GenerationRequest
from penstock.engine.pooling import Pooled, pool_all
from penstock.server.account import account_of
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.conversation import checked_messages, template_kwargs
from penstock.server.document import takes
from penstock.server.encoding import json_response, made_answer
from penstock.server.handed_on import handed_on
from penstock.server.prompts import cache_salt, prompts_of, text_request
from penstock.server.shapes import PROMPT, Messages, Name, PromptOrNull
from penstock.server.truncation import CutBody, truncation
from penstock.server.vectors import written

ONE_TOKEN = SamplingParams(max_tokens=1)  # a request must have some, also one that generates nothing


class PooledBody(CutBody):
    """What vLLM's clients may say wherever nothing is generated."""

    request_id: Name | None = None
    use_activation: bool | None = None


class InputBody(PooledBody):
    """Texts or token ids; or a chat in the model's template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["input"], "properties": {"input": PROMPT, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "input": {"type": "null"}}},
            ]
        }
    )

    input: PromptOrNull = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class EmbeddingBody(InputBody):
    """POST /v1/embeddings. `normalize` overrides what the model's files say; `prompt_name` names one of its prompts."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    endianness: Literal["native", "little", "big"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(min_length=1)] | None = None
    prompt: Annotated[str, Field(max_length=limits.MAX_PROMPT_CHARS)] | None = None


class PoolingBody(EmbeddingBody):
    """POST /pooling: the states a model ends with, one a text or one a token, or its labels' scores."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyBody(InputBody):
    """POST /classify."""


async def answered(model: ModelContext, request: Request, work: Coroutine[Any, Any, list[Pooled]]) -> list[Pooled]:
    """Waits for results while the client is there, and counts them."""
    started = time.monotonic()
    try:
        model.frontend.client.check_room(owner_of(request))
    except OverloadedError:
        work.close()
        raise
    results = await while_connected(work, request.receive, model.lifecycle)
    account = account_of(request)
    account.model = model.model
    account.prompt_tokens = sum(result.prompt_tokens for result in results)
    account.cached_tokens = sum(result.cached_tokens for result in results)
    account.finished[FinishReason.STOP.value] += len(results)
    for result in results:
        model.metrics.pooled(result.prompt_tokens, time.monotonic() - started)
    return results


def _each_token(result: Pooled, params: PoolingParams) -> Sequence[array[float]]:
    if params.kind is not PoolingKind.ALL:
        return [result.values]
    size = len(result.values) // result.prompt_tokens
    return [result.values[start : start + size] for start in range(0, len(result.values), size)]


def listed(model: ModelContext, kind: str, results: Sequence[Pooled], data: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(result.prompt_tokens for result in results)
    cached = {"cached_tokens": sum(result.cached_tokens for result in results)}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": cached}
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model.model}
    return {**head, "data": data, "usage": usage}


def _embeddings(model: ModelContext, body: EmbeddingBody, results: Sequence[Pooled]) -> dict[str, Any]:
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _encoded(result.values, body)}
        for index, result in enumerate(results)
    ]
    return listed(model, "embd", results, data)


def _states(model: ModelContext, body: PoolingBody, results: Sequence[Pooled], params: PoolingParams) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for index, result in enumerate(results):
        values = [_encoded(part, body) for part in _each_token(result, params)]
        told = values if params.kind is PoolingKind.ALL else values[0]
        data.append({"object": "pooling", "index": index, "data": told})
    return listed(model, "pool", results, data)


def _encoded(values: array[float], body: EmbeddingBody) -> Any:
    return written(values, body.encoding_format, body.embed_dtype, body.endianness)


def activated(params: PoolingParams, asked: bool | None) -> PoolingParams:
    """Pooling whose last function, of scores the softmax, of vectors the length, is left out or not as asked."""
    if asked is None or (asked and (params.classify or params.choices)):
        return params
    return replace(params, normalize=asked and not params.classify and not params.choices, activation="")


def _chat(request: Request, body: InputBody) -> GenerationRequest:
    """A chat of which the states are wanted, of which nothing is asked to go on."""
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=ONE_TOKEN,
        messages=checked_messages(body.messages or ()),
        add_generation_prompt=bool(body.add_generation_prompt),
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=template_kwargs(body.chat_template_kwargs, None, chat_template=body.chat_template),
        add_special_tokens=body.add_special_tokens,
        priority=body.priority or 0,
        cache_salt=cache_salt(body),
        owner=owner_of(request),
    )


def _requests(request: Request, model: ModelContext, body: InputBody, params: PoolingParams) -> list[GenerationRequest]:
    if (body.input is None) == (body.messages is None):
        raise RequestError("Send exactly one of input and messages.", param="input", code="invalid_value")
    if body.messages is not None:
        if body.add_generation_prompt and body.continue_final_message:
            raise ParameterError("continue_final_message", True, "only with add_generation_prompt: false")
        return [_chat(request, body)]
    texts = prompts_of(body.input, "input")
    if isinstance(body, EmbeddingBody) and not params.classify:
        texts = model.frontend.text.pooling.prompted(texts, body.prompt_name, body.prompt)
    return [text_request(request, body, text, ONE_TOKEN) for text in texts]


async def pooled_inputs(request: Request, model: ModelContext, body: InputBody, params: PoolingParams) -> list[Pooled]:
    """What a model makes of each of a body's inputs."""
    model.check_template(body.chat_template)
    model.require_ready()
    sent = await translated(request, _requests, request, model, body, params)
    field = "input" if body.messages is None else "messages"
    cut = truncation(body)
    asked = [replace(each, truncation=cut) for each in sent]
    pooled = [activated(params, body.use_activation)] * len(asked)
    return await answered(model, request, pool_all(model.frontend, asked, pooled, field))


async def classified(request: Request, context: ServerContext, body: ClassifyBody) -> Response:
    """The labels of texts, as vLLM tells them."""
    model = await context.model(request, body.model)
    pooling = model.frontend.text.pooling
    results, data = await pooled_inputs(request, model, body, pooling.classification()), []
    for index, result in enumerate(results):
        best = max(range(len(result.values)), key=result.values.__getitem__)
        entry = {"index": index, "label": pooling.labels[best], "probs": result.values.tolist()}
        data.append({**entry, "num_classes": len(result.values)})
    return json_response(listed(model, "classify", results, data))


def embeddings_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    @router.post("/v1/embeddings", summary="Embed texts", openapi_extra=takes(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        if (answer := await handed_on(request, context, "/embeddings")) is not None:
            return answer
        body = await read_body(request, EmbeddingBody)
        model = await context.model(request, body.model)
        params = model.frontend.text.pooling.embedding(body.dimensions, body.normalize)
        results = await pooled_inputs(request, model, body, params)
        return await made_answer(lambda: _embeddings(model, body, results))

    @router.post("/pooling", summary="Pooled states of texts", openapi_extra=takes(PoolingBody))
    async def pooled(request: Request) -> Response:
        body = await read_body(request, PoolingBody)
        model = await context.model(request, body.model)
        pooling = model.frontend.text.pooling
        task = body.task or ("classify" if pooling.labels else "token_embed" if body.dimensions is None else "embed")
        if task == "classify" and body.dimensions is not None:
            raise ParameterError("dimensions", body.dimensions, "only for embeddings; leave it out")
        if task == "classify":
            params = pooling.classification()
        else:
            params = pooling.embedding(body.dimensions, body.normalize, each_token=task == "token_embed")
        results = await pooled_inputs(request, model, body, params)
        return await made_answer(lambda: _states(model, body, results, params))

    return router
