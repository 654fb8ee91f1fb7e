"""OpenAI's embeddings, and vLLM's routes for classifying and for pooled states."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.core.pooling import PoolingKind, PoolingParams
from penstock.core.request import GenerationRequest
from penstock.core.sampling import SamplingParams
from penstock.engine.pooling import Pooled, pool
from penstock.server.answer import Service, while_connected
from penstock.server.body import read_json, validate
from penstock.server.dialects.openai.translate import prompts_of
from penstock.server.document import takes
from penstock.server.errors import json_response
from penstock.server.shapes import Body, Prompt


class InputBody(Body):
    """Texts or token ids."""

    model: str | None = None
    input: Prompt
    user: Annotated[str, Field(max_length=limits.MAX_USER_CHARS)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=limits.MIN_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None


class EmbeddingBody(InputBody):
    """POST /v1/embeddings. `normalize` overrides what the model's files say."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None


class PoolingBody(EmbeddingBody):
    """POST /pooling: the states a model ends with, one a text or one a token, or its labels' scores."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyBody(InputBody):
    """POST /classify."""


async def _pool_all(service: Service, body: InputBody, params: PoolingParams) -> list[Pooled]:
    """One result an input, all computed together; the first refusal cancels the rest."""
    sampling = SamplingParams(max_tokens=1)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                pool(
                    service.frontend,
                    GenerationRequest(
                        request_id=uuid.uuid4().hex,
                        sampling=sampling,
                        prompt=prompt if isinstance(prompt, str) else None,
                        prompt_ids=None if isinstance(prompt, str) else tuple(prompt),
                        add_special_tokens=body.add_special_tokens is not False,
                        priority=body.priority or 0,
                        cache_salt=body.cache_salt or "",
                    ),
                    params,
                )
            )
            for prompt in prompts_of(body.input, "input")
        ]
    return [task.result() for task in tasks]


def _written(values: array[float], encoding: str | None) -> Any:
    """Numbers, or base64 of little-endian float32."""
    if encoding != "base64":
        return values.tolist()
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def _each_token(result: Pooled, params: PoolingParams) -> Sequence[array[float]]:
    if params.kind is not PoolingKind.ALL:
        return [result.values]
    size = len(result.values) // result.prompt_tokens
    return [result.values[start : start + size] for start in range(0, len(result.values), size)]


def _listed(service: Service, kind: str, results: Sequence[Pooled], data: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(result.prompt_tokens for result in results)
    cached = {"cached_tokens": sum(result.cached_tokens for result in results)}
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": cached}
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": service.model}
    return {**head, "data": data, "usage": usage}


def embeddings_router(service: Service) -> APIRouter:
    """The routes over one service."""
    router, pooling = APIRouter(), service.frontend.text.pooling

    async def run(request: Request, body: InputBody, params: PoolingParams) -> list[Pooled]:
        service.require_ready()
        try:
            return await while_connected(_pool_all(service, body, params), request.receive, service.lifecycle)
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    @router.post("/v1/embeddings", summary="Embed texts", openapi_extra=takes(EmbeddingBody))
    async def embeddings(request: Request) -> Response:
        body = validate(EmbeddingBody, await read_json(request))
        service.check_model(body.model)
        results = await run(request, body, pooling.embedding(body.dimensions, body.normalize))
        data: list[dict[str, Any]] = [
            {"object": "embedding", "index": index, "embedding": _written(result.values, body.encoding_format)}
            for index, result in enumerate(results)
        ]
        return json_response(_listed(service, "embd", results, data))

    @router.post("/classify", summary="Classify texts", openapi_extra=takes(ClassifyBody))
    async def classify(request: Request) -> Response:
        body = validate(ClassifyBody, await read_json(request))
        service.check_model(body.model)
        results, data = await run(request, body, pooling.classification()), []
        for index, result in enumerate(results):
            best = max(range(len(result.values)), key=result.values.__getitem__)
            entry = {"index": index, "label": pooling.labels[best], "probs": result.values.tolist()}
            data.append({**entry, "num_classes": len(result.values)})
        return json_response(_listed(service, "classify", results, data))

    @router.post("/pooling", summary="Pooled states of texts", openapi_extra=takes(PoolingBody))
    async def pooled(request: Request) -> Response:
        body = validate(PoolingBody, await read_json(request))
        service.check_model(body.model)
        task = body.task or ("classify" if pooling.labels else "token_embed" if body.dimensions is None else "embed")
        if task == "classify" and body.dimensions is not None:
            raise ParameterError("dimensions", body.dimensions, "only for embeddings; leave it out")
        if task == "classify":
            params = pooling.classification()
        else:
            params = pooling.embedding(body.dimensions, body.normalize, each_token=task == "token_embed")
        results, data = await run(request, body, params), []
        for index, result in enumerate(results):
            values = [_written(part, body.encoding_format) for part in _each_token(result, params)]
            data.append({"object": "pooling", "index": index, "data": values if task == "token_embed" else values[0]})
        return json_response(_listed(service, "pool", results, data))

    return router
