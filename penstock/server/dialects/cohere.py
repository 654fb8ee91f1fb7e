"""Cohere's route for embedding texts (API version 2)."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import param_names
from penstock.config.lengths import Truncation
from penstock.engine.pooling import pool_all
from penstock.server.body import read_body
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered
from penstock.server.document import takes
from penstock.server.embedding_fields import Form, prompt_of
from penstock.server.encoding import made_answer
from penstock.server.prompts import text_request
from penstock.server.shapes import RequestBody
from penstock.server.vectors import written

Kind = Literal["search_query", "search_document", "classification", "clustering"]


class CohereEmbedBody(RequestBody):
    """POST /v2/embed. `input_type` chooses the model's prompt for such texts, where it has one.

    A text that is too long is cut at its end unless `truncate` says otherwise, as at Cohere.
    """

    texts: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)
    ]
    input_type: Kind | None = None
    embedding_types: Annotated[list[Form], Field(min_length=1, max_length=4)] | None = None
    output_dimension: int | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None


def _most(body: CohereEmbedBody, model: ModelContext) -> int | None:
    """Tokens that a text is cut to, None for the context's."""
    return None if body.max_tokens is None else min(body.max_tokens, model.max_model_len() or body.max_tokens)


def cohere_router(context: ServerContext) -> APIRouter:
    """The route over one service."""
    router = APIRouter()

    @router.post("/v2/embed", summary="Embed texts, as Cohere does", openapi_extra=takes(CohereEmbedBody))
    async def embed(request: Request) -> Response:
        body = await read_body(request, CohereEmbedBody)
        model = await context.model(request, body.model)
        model.require_ready()
        pooling = model.frontend.text.pooling
        with param_names({"dimensions": "output_dimension"}):
            params = pooling.embedding(body.output_dimension)
        name = None if body.input_type is None else prompt_of(body.input_type, pooling.prompts.texts)
        cut = None if body.truncate == "NONE" else Truncation(_most(body, model), body.truncate == "START", 0)
        texts = pooling.prompted(body.texts, name)
        sent = [replace(text_request(request, body, text, ONE_TOKEN), truncation=cut) for text in texts]
        work = pool_all(model.frontend, sent, [params] * len(sent), "texts")
        results = await answered(model, request, work)
        forms = dict.fromkeys(body.embedding_types or ("float",))
        tokens = sum(result.prompt_tokens for result in results)
        meta = {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}
        answer = {"id": str(uuid.uuid4()), "response_type": "embeddings_by_type", "texts": body.texts, "meta": meta}
        return await made_answer(
            lambda: {
                **answer,
                "embeddings": {form: [written(result.values, form) for result in results] for form in forms},
            }
        )

    return router
