"""llama-server's own embeddings: a list of vectors a prompt, under a norm of the client's choice."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from penstock.config.errors import RequestError
from penstock.engine.pooling import pool_all
from penstock.server.auth import owner_of
from penstock.server.body import read_body, translated
from penstock.server.context import ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered
from penstock.server.document import takes
from penstock.server.encoding import made_answer
from penstock.server.mixed_prompts import MIXED_PROMPTS, MixedPromptsOrNull, mixed_prompts
from penstock.server.shapes import Exact
from penstock.server.vectors import written

_INT16 = 32760.0  # the largest number under the norm 0, as llama.cpp has it


class LlamaEmbeddingBody(Exact):
    """POST /embedding, under either name of the field."""

    model_config = ConfigDict(
        extra="ignore",
        json_schema_extra={
            "oneOf": [
                {"required": [one], "properties": {one: MIXED_PROMPTS, other: {"type": "null"}}}
                for one, other in (("content", "input"), ("input", "content"))
            ]
        },
    )

    model: str | None = None
    content: MixedPromptsOrNull = None
    input: MixedPromptsOrNull = None
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = None
    encoding_format: Literal["float", "base64"] | None = None


def scaled(values: Sequence[float], norm: int) -> array[float]:
    """A vector divided by its norm: -1 none, 0 the largest number (which becomes 32760), 1 the sum, 2 Euclid's, p."""
    if norm == -1:
        return array("f", values)
    if norm == 0:
        size = max(map(abs, values), default=0.0) / _INT16
    else:
        largest = max(map(abs, values), default=0.0) or 1.0  # lest powers overflow
        size = largest * sum((abs(value) / largest) ** norm for value in values) ** (1 / norm)
    return array("f", [value / size for value in values] if size else values)


def llama_embeddings_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def embedding(request: Request) -> Response:
        body = await read_body(request, LlamaEmbeddingBody, any_type="origin" not in request.headers)
        field = "input" if body.input is not None else "content"
        if (body.content is None) == (body.input is None):
            raise RequestError("Send exactly one of content and input.", param="content", code="invalid_value")
        model = await context.model(request, body.model)
        model.require_ready()
        params = model.frontend.text.pooling.embedding(None, normalize=False)
        sent = await translated(request, mixed_prompts, getattr(body, field), field, model.frontend)
        owner = owner_of(request)
        asked = [replace(each, sampling=ONE_TOKEN, owner=owner) for each in sent]
        found = await answered(model, request, pool_all(model.frontend, asked, [params] * len(asked), field))
        norm = 2 if body.embd_normalize is None else body.embd_normalize

        def made() -> list[dict[str, Any]]:
            vectors = [written(scaled(result.values, norm), body.encoding_format) for result in found]
            return [{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)]

        return await made_answer(made)

    for path in ("/embedding", "/embeddings"):
        router.post(path, summary="Embed prompts", openapi_extra=takes(LlamaEmbeddingBody))(embedding)

    return router
