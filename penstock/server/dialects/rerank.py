"""How well texts answer others: Jina's and Cohere's reranking, and vLLM's scores of pairs."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.engine.pooling import Pooled, score_pairs
from penstock.server.body import read_body
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, answered, listed
from penstock.server.document import takes
from penstock.server.encoding import json_response
from penstock.server.prompts import text_request
from penstock.server.shapes import Body, RequestBody
from penstock.text.pairs import text_pairs

Text = Annotated[str, Field(min_length=1)]
Instruction = Annotated[str, Field(min_length=1, max_length=limits.MAX_PROMPT_CHARS)]


class Document(Body):
    """A document as an object."""

    text: Text


class RerankBody(RequestBody):
    """POST /rerank. `instruction` tells models that take one what to look for."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: Instruction | None = None


Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]


class ScoreBody(RequestBody):
    """POST /score: one text with one or many, or as many with as many."""

    text_1: Texts
    text_2: Texts
    instruction: Instruction | None = None


def rerank_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def run(
        request: Request, body: RerankBody | ScoreBody, pairs: Sequence[tuple[str, str]], field: str
    ) -> tuple[ModelContext, list[Pooled]]:
        model = await context.model(request, body.model)
        model.require_ready()
        make = functools.partial(text_request, request, body, sampling=ONE_TOKEN)
        work = score_pairs(model.frontend, pairs, make, field, body.instruction)
        return model, await answered(model, request, work)

    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankBody)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        model, results = await run(request, body, [(body.query, text) for text in texts], "documents")
        scores = [result.values[-1] for result in results]
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
        shows = body.return_documents if body.return_documents is not None else not request.url.path.startswith("/v2")
        ranked: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        for entry in ranked if shows else ():
            entry["document"] = {"text": texts[entry["index"]]}
        tokens = sum(result.prompt_tokens for result in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "model": model.model, "usage": usage}
        return json_response({**head, "results": ranked})

    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody)
        model, results = await run(request, body, text_pairs(body.text_1, body.text_2), "text_2")
        data: list[dict[str, Any]] = [
            {"index": index, "object": "score", "score": result.values[-1]} for index, result in enumerate(results)
        ]
        return json_response(listed(model, "score", results, data))

    for prefix in ("", "/v1", "/v2"):
        router.post(f"{prefix}/rerank", summary="Order documents by a query", openapi_extra=takes(RerankBody))(rerank)
    for prefix in ("", "/v1"):
        router.post(f"{prefix}/score", summary="Score pairs of texts", openapi_extra=takes(ScoreBody))(score)
    return router
