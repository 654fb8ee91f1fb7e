"""How well texts answer others: Jina's and Cohere's reranking, and vLLM's scores of pairs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import RequestError, format_value, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.lengths import Truncation
from penstock.engine.pooling import Pooled
from penstock.search.ranking import score_pairs
from penstock.server.body import Marked, read_body, read_either
from penstock.server.context import ModelContext, ServerContext
from penstock.server.dialects.embeddings import ONE_TOKEN, PooledBody, answered, listed
from penstock.server.document import takes
from penstock.server.encoding import json_response
from penstock.server.prompts import text_request
from penstock.server.shapes import Body, Loose
from penstock.server.truncation import truncation
from penstock.text.pairs import PairCut, text_pairs

Text = Annotated[str, Field(min_length=1)]
Instruction = Annotated[str, Field(min_length=1, max_length=limits.MAX_PROMPT_CHARS)]


class Document(Body):
    """A document as an object."""

    text: Text


class PairsBody(PooledBody):
    """Texts that are scored in pairs. `instruction` tells models that take one what to look for."""

    instruction: Instruction | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_query: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None


class RerankBody(PairsBody):
    """POST /rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None


class TextsRerankBody(Loose):
    """POST /rerank with `texts`, as Text Embeddings Inference has it: the answer is a list. Others are passed over."""

    query: Text
    texts: Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_text: bool | None = None


Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]


SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of pairs, as users of vLLM send them."""
_NAMES = dict.fromkeys(name for sides in SIDES for name in sides)
_TEXTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ]
}


class ScoreBody(PairsBody):
    """POST /score: one text with one or many, or as many with as many."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": [*sides],
                    "properties": {name: _TEXTS if name in sides else {"type": "null"} for name in _NAMES},
                }
                for sides in SIDES
            ]
        }
    )

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None

    def sides(self) -> tuple[str, str]:
        """The names of the two sides that were sent.

        Raises:
            RequestError: those are not two that go together.
        """
        sent = tuple(name for name in _NAMES if getattr(self, name) is not None)
        if len(sent) == 1:
            other = next(name for sides in SIDES if sent[0] in sides for name in sides if name != sent[0])
            raise RequestError(f"{other} is required.", param=other, code="missing_required_parameter")
        if sent not in SIDES:
            allowed = ", or ".join(" and ".join(sides) for sides in SIDES)
            told = f"The body has {', '.join(sent) or 'no texts'}; send two that go together: {allowed}."
            raise RequestError(told, param=sent[0] if sent else "text_1", code="invalid_value")
        return sent


def _told(body: PairsBody) -> str | None:
    """What the model is told to look for: the field counts where the template's variables do not say it.

    Raises:
        RequestError: other variables, which no template of pairs has.
    """
    given = body.chat_template_kwargs or {}
    if given.keys() - {"instruction"} or not isinstance(given.get("instruction", ""), str):
        told = f"chat_template_kwargs is {format_value(given)}; allowed: instruction, a string."
        raise RequestError(told, param="chat_template_kwargs", code="invalid_value")
    return given.get("instruction", body.instruction) or None


def _pair_cut(body: PairsBody, context: int) -> PairCut:
    asked = truncation(body)
    together = 0 if asked is None else context if asked.tokens is None else asked.tokens
    end = asked is not None and asked.keep_end
    return PairCut(body.max_tokens_per_query or 0, body.max_tokens_per_doc or 0, together, end)


def _maker(request: Request, body: PairsBody, cut: PairCut) -> Callable[[str | Sequence[int]], GenerationRequest]:
    """What makes a request of a text, cut as asked, or of a pair's tokens, which are cut already."""
    how = Truncation(cut.together, cut.keep_end, 0) if cut.together else None

    def make(text: str | Sequence[int]) -> GenerationRequest:
        made = text_request(request, body, text, ONE_TOKEN)
        return replace(made, truncation=how) if isinstance(text, str) else made

    return make


def rerank_router(context: ServerContext) -> APIRouter:
    """The routes over one server's context."""
    router = APIRouter()

    async def run(
        request: Request, body: PairsBody, pairs: Sequence[tuple[str, str]], field: str
    ) -> tuple[ModelContext, list[Pooled]]:
        model = await context.model(request, body.model)
        model.require_ready()
        cut = _pair_cut(body, model.max_model_len() or 0)
        activation = body.use_activation is not False
        work = score_pairs(model.frontend, pairs, _maker(request, body, cut), field, _told(body), cut, activation)
        return model, await answered(model, request, work)

    async def rerank_texts(request: Request, body: TextsRerankBody) -> Response:
        asked = RerankBody(model=body.model, query=body.query, documents=list(body.texts))
        _, results = await run(request, asked, [(body.query, text) for text in body.texts], "texts")
        scores = [result.values[-1] for result in results]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        told: list[dict[str, Any]] = [{"index": index, "score": scores[index]} for index in best]
        for entry in told if body.return_text else ():
            entry["text"] = body.texts[entry["index"]]
        return json_response(told)

    async def rerank(request: Request) -> Response:
        body: RerankBody | TextsRerankBody = await read_either(request, RerankBody, Marked("texts", TextsRerankBody))
        if isinstance(body, TextsRerankBody):
            return await rerank_texts(request, body)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        model, results = await run(request, body, [(body.query, text) for text in texts], "documents")
        scores = [result.values[-1] for result in results]
        best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
        shows = body.return_documents if body.return_documents is not None else not request.url.path.startswith("/v2")
        ranked: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in best]
        for entry in ranked if shows else ():
            entry["document"] = {"text": texts[entry["index"]]}
        tokens = sum(result.prompt_tokens for result in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        head = {"id": f"rerank-{uuid.uuid4().hex}", "object": "list", "model": model.model, "usage": usage}
        return json_response({**head, "results": ranked})

    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreBody)
        first, second = body.sides()
        with param_names({"text_1": first}):
            pairs = text_pairs(getattr(body, first), getattr(body, second))
        model, results = await run(request, body, pairs, second)
        data: list[dict[str, Any]] = [
            {"index": index, "object": "score", "score": result.values[-1]} for index, result in enumerate(results)
        ]
        return json_response(listed(model, "score", results, data))

    shape = takes(RerankBody, others=(TextsRerankBody,))
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
        router.post(path, summary="Order documents by a query", openapi_extra=shape)(rerank)
    for prefix in ("", "/v1"):
        router.post(f"{prefix}/score", summary="Score pairs of texts", openapi_extra=takes(ScoreBody))(score)
    return router
