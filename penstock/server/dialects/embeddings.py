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
from penstock.config.errors import OverloadedError, ParameterError, RequestError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.core.request import FinishReason
from penstock.engine.pooling import Pooled, pool_all
from penstock.server.account import account_of
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.connected import while_connected
from penstock.server.context import ModelContext, ServerContext
from penstock.server.conversation import checked_messages, template_kwargs
from penstock.server.document import takes
from penstock.server.embedding_fields import ForeignEmbeddingBody, Form, wanted
from penstock.server.encoding import json_response, made_answer
from penstock.server.handed_on import handed_on
from penstock.server.late_chunking import late_chunks
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


class EmbeddingBody(InputBody, ForeignEmbeddingBody):
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

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None


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


def _told(body: EmbeddingBody, form: Form, result: Pooled, params: PoolingParams) -> Any:
    """A vector, or a list of one a token."""
    parts = [written(part, form, body.embed_dtype, body.endianness) for part in _each_token(result, params)]
    return parts if params.kind is PoolingKind.ALL else parts[0]


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
        pooling = model.frontend.text.pooling
        texts = pooling.prompted(texts, wanted(body, pooling.prompts.texts).prompt_name, body.prompt)
    return [text_request(request, body, text, ONE_TOKEN) for text in texts]


async def pooled_inputs(request: Request, model: ModelContext, body: InputBody, params: PoolingParams) -> list[Pooled]:
    """What a model makes of each of a body's inputs."""
    model.check_template(body.chat_template)
    model.require_ready()
    sent = await translated(request, _requests, request, model, body, params)
    field = "input" if body.messages is None else "messages"
    foreign = isinstance(body, EmbeddingBody)
    cut = wanted(body, model.frontend.text.pooling.prompts.texts).cut if foreign else truncation(body)
    asked = [replace(each, truncation=cut) for each in sent]
    params = activated(params, body.use_activation)
    if isinstance(body, EmbeddingBody) and body.late_chunking:
        if body.messages is not None or params.kind is PoolingKind.ALL or params.classify:
            raise ParameterError("late_chunking", True, "only where each text of input has one vector")
        return await answered(model, request, late_chunks(model.frontend, asked, params, field))
    return await answered(model, request, pool_all(model.frontend, asked, [params] * len(asked), field))


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
        pooling = model.frontend.text.pooling
        asked = wanted(body, pooling.prompts.texts)
        with param_names({"dimensions": asked.dimensions_field}):
            params = pooling.embedding(asked.dimensions, asked.normalize, each_token=body.return_multivector or None)
        results = await pooled_inputs(request, model, body, params)
        name = "embeddings" if body.return_multivector else "embedding"

        def made() -> dict[str, Any]:
            data: list[dict[str, Any]] = [
                {"object": "embedding", "index": index, name: _told(body, asked.form, result, params)}
                for index, result in enumerate(results)
            ]
            return listed(model, "embd", results, data)

        return await made_answer(made)

    @router.post("/pooling", summary="Pooled states of texts", openapi_extra=takes(PoolingBody))
    async def pooled(request: Request) -> Response:
        body = await read_body(request, PoolingBody)
        model = await context.model(request, body.model)
        pooling = model.frontend.text.pooling
        task = body.task or ("classify" if pooling.labels else "token_embed" if body.dimensions is None else "embed")
        asked = wanted(body.model_copy(update={"task": None}), pooling.prompts.texts)
        with param_names({"dimensions": asked.dimensions_field}):
            if task.endswith("classify") and asked.dimensions is not None:
                raise ParameterError("dimensions", asked.dimensions, "only for embeddings; leave it out")
            if task.endswith("classify"):
                params = pooling.classification(each_token=task == "token_classify")
            else:
                params = pooling.embedding(asked.dimensions, asked.normalize, each_token=task == "token_embed")
        results = await pooled_inputs(request, model, body.model_copy(update={"task": None}), params)

        def made() -> dict[str, Any]:
            data: list[dict[str, Any]] = [
                {"object": "pooling", "index": index, "data": _told(body, asked.form, result, params)}
                for index, result in enumerate(results)
            ]
            return listed(model, "pool", results, data)

        return await made_answer(made)

    return router
