"""vLLM's /generative_scoring: how probable certain next tokens are after a query together with each of many items."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.config.errors import ParameterError, param_names
from penstock.config.generation import GenerationRequest
from penstock.config.logprobs import WHOLE_VOCABULARY, check_mode
from penstock.config.sampling import SamplingParams
from penstock.engine.api import Delta
from penstock.server.active_call import ActiveCall, complete, open_call
from penstock.server.body import read_body
from penstock.server.context import ModelContext, ServerContext
from penstock.server.document import takes
from penstock.server.logprobs import alternatives
from penstock.server.prompts import text_request
from penstock.server.shapes import Name, RequestBody, TokenIds

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[TokenIds, Field(min_length=1)]
_TOGETHER = 16  # items that are tokenised before others get their turn
_SENT = {"logprob_token_ids": "label_token_ids", "logprobs": "label_token_ids", "prompt": "items"}


class ScoringBody(RequestBody):
    """POST /generative_scoring: a query, items, and the tokens whose probability behind both is asked for."""

    query: Text | Ids
    items: (
        Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]
        | Annotated[list[Ids], Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)]
    )
    label_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=limits.MAX_LOGPROB_TOKEN_IDS)]
    apply_softmax: bool | None = None
    item_first: bool | None = None
    request_id: Name | None = None


def scoring_router(context: ServerContext) -> APIRouter:
    """The route over one server's context."""
    router = APIRouter()

    @router.post(
        "/generative_scoring", summary="How probable next tokens are after texts", openapi_extra=takes(ScoringBody)
    )
    async def generative_scoring(request: Request) -> Response:
        body = await read_body(request, ScoringBody)
        model = await context.model(request, body.model)
        model.require_ready()
        check_mode(model.frontend.info.logprobs_mode, "/generative_scoring")
        with param_names(_SENT):
            active = await open_call(request, model, await _requests(request, model, body))
        return await complete(_answer(body, active, model), active, request.receive, context.lifecycle)

    return router


async def _requests(request: Request, model: ModelContext, body: ScoringBody) -> list[GenerationRequest]:
    """One for each item: its tokens and the query's, one behind the other, each tokenised by itself."""
    size = model.frontend.text.vocab_size
    wrong = [token for token in body.label_token_ids if token >= size]
    if wrong:
        raise ParameterError("label_token_ids", wrong[0], f"token ids from 0 to {size - 1}")
    labels = tuple(dict.fromkeys(body.label_token_ids))
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=labels)

    async def tokens(prompt: str | Sequence[int], *, special: bool) -> tuple[int, ...]:
        made = text_request(request, body, prompt, sampling)
        return await model.frontend.tokenize(replace(made, add_special_tokens=special))

    with param_names({"prompt": "query"}):
        query = await tokens(body.query, special=body.add_special_tokens is not False)
    items: Sequence[str | Sequence[int]] = body.items
    made: list[GenerationRequest] = []
    context = model.frontend.info.max_model_len
    for number, item in enumerate(items, 1):
        ids = await tokens(item, special=False)
        if len(query) + len(ids) >= context:  # before the query is written once more for each item
            allowed = f"fewer than {context} tokens together with the query, which is this model's context"
            raise ParameterError(f"items[{number - 1}]", f"{len(query) + len(ids)} tokens", allowed)
        made.append(text_request(request, body, ids + query if body.item_first else query + ids, sampling))
        if number % _TOGETHER == 0:
            await asyncio.sleep(0)
    return made


async def _answer(body: ScoringBody, active: ActiveCall, model: ModelContext) -> dict[str, Any]:
    scores = [0.0] * len(active.requests)
    generated = 0
    async for index, delta in active.deltas():
        generated += len(delta.token_ids)
        if delta.logprobs:
            scores[index] = _score(delta, softmax=body.apply_softmax is not False)
    prompt = active.prompt_tokens
    return {
        "id": f"generative-scoring-{body.request_id or active.requests[0].request_id}",
        "object": "list",
        "created": int(time.time()),
        "model": model.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }


def _score(delta: Delta, *, softmax: bool) -> float:
    """The probability of the first label; among the labels alone with `softmax`."""
    values = [value for _, value in alternatives(delta.logprobs[0], WHOLE_VOCABULARY)]
    if not softmax:
        return math.exp(values[0])
    largest = max(values)
    if largest == -math.inf:
        return 1 / len(values)
    return math.exp(values[0] - largest) / math.fsum(math.exp(value - largest) for value in values)
