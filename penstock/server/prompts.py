"""Prompts of bodies: one or many, each a text or token ids, and the internal requests made of them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.given_rows import GivenRows
from penstock.config.sampling import SamplingParams
from penstock.server.auth import owner_of
from penstock.server.encoding import encode_json
from penstock.server.errors import bad_value
from penstock.server.retention import retention_of
from penstock.server.shapes import RequestBody


def text_request(
    sent: Request | None, body: RequestBody, prompt: str | Sequence[int] | GivenRows, sampling: SamplingParams
) -> GenerationRequest:
    """A request for one of a body's prompts. Its owner is who `sent` it, None where that is told later."""
    return GenerationRequest(
        request_id=uuid.uuid4().hex,
        sampling=sampling,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_ids=None if isinstance(prompt, str | GivenRows) else tuple(prompt),
        rows=(prompt,) if isinstance(prompt, GivenRows) else (),
        add_special_tokens=body.add_special_tokens,
        priority=body.priority or 0,
        **of_cache(body),
        owner="" if sent is None else owner_of(sent),
    )


def cache_salt(body: RequestBody) -> str:
    """Who may find what is computed of a body's prompts: nobody else, where it wants nothing from the cache."""
    return uuid.uuid4().hex if getattr(body, "cache_prompt", None) is False else body.cache_salt or ""


def of_cache(body: RequestBody) -> dict[str, Any]:
    """The fields of a request that say who finds its prefixes again, for how long, and which conversation it is of."""
    session = getattr(body, "prompt_cache_key", None) or getattr(body, "user", None) or ""
    return {"cache_salt": cache_salt(body), "session": str(session), "retention": retention_of(body)}


def check_shared(requests: Sequence[GenerationRequest]) -> None:
    """Refuses what makes work for each of many prompts, if it comes to more than one prompt may ask for.

    Raises:
        ParameterError: a grammar, words or token ids too many for so many prompts.
    """
    sampling, grammar = requests[0].sampling, requests[0].grammar
    words, ids = sum(map(len, sampling.bad_words)), len(sampling.allowed_token_ids or ())
    for field, size, unit in (
        ("grammar", len(grammar.source) if grammar else 0, "characters"),
        ("bad_words", words, "characters"),
        ("banned_strings", sum(map(len, sampling.banned_strings)), "characters"),
        ("allowed_token_ids", ids, "token ids"),
        ("stop", sum(map(len, sampling.stop)), "characters"),
        ("stop_token_ids", len(sampling.stop_token_ids), "token ids"),
        ("logit_bias", len(sampling.logit_bias), "entries"),
    ):
        if len(requests) > 1 and size * len(requests) > limits.MAX_SHARED_WORK:
            told = f"at most {limits.MAX_SHARED_WORK // len(requests)} with {len(requests)} prompts; send fewer of them"
            raise ParameterError(field, f"{size} {unit}", told)


def check_echoed(grammar: str | None, json_schema: Any, answers: int) -> None:
    """Refuses a grammar or schema that is too large for so many answers, each of which tells it in its settings.

    Raises:
        ParameterError: as said.
    """
    if answers == 1:
        return
    field = "grammar" if grammar else "json_schema"
    size = len(grammar) if grammar else len(encode_json(json_schema))
    if size * answers > limits.MAX_SHARED_WORK:
        allowed = f"at most {limits.MAX_SHARED_WORK // answers} with {answers} answers; send it for fewer of them"
        raise ParameterError(field, f"{size} characters", allowed)


def prompts_of(prompt: Any, field: str) -> Sequence[str | Sequence[int]]:
    """One prompt or many, each a text or token ids.

    Raises:
        RequestError: it is neither, or there are too many; `field` is its name.
    """
    if isinstance(prompt, str) or _is_ids(prompt):
        prompts: Sequence[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and (all(map(_is_text, prompt)) or all(map(_is_ids, prompt))):
        prompts = prompt
    else:
        allowed = "a non-empty string, a list of token ids, or a non-empty list of either"
        raise bad_value(field, prompt, allowed)
    if len(prompts) > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError(field, f"{len(prompts)} prompts", f"at most {limits.MAX_PROMPTS_PER_CALL}")
    return prompts


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31
