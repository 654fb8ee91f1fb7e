"""Prompts with something behind them: what is generated stands between, by the tokens a model has for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError
from penstock.config.generation import GenerationRequest
from penstock.server.errors import bad_value
from penstock.text.infill import InfillText, InfillTokens, infill_ids

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_UNCUT = 2**62  # tokens; what is too long is refused with the context's length, and never cut


def infilled(
    requests: Sequence[GenerationRequest], suffix: str | None, frontend: Frontend
) -> tuple[GenerationRequest, ...]:
    """Requests of texts as requests of what stands between each text and the suffix; as they are without one.

    Tokenises: where the body is large, beside the event loop.

    Raises:
        RequestError: the model has no tokens for this, a prompt is no text, a text is far too long, or the suffix is
            too long for so many prompts.
    """
    if not suffix:
        return tuple(requests)
    tokenizer = frontend.text.tokenizer
    tokens = InfillTokens.of(tokenizer)
    if tokens.missing:
        raise RequestError(
            f"suffix cannot be followed: this model's vocabulary has no {', '.join(tokens.missing)} token for filling "
            "in the middle. Leave it out, or ask a model that was trained for it.",
            param="suffix",
            code="unsupported_parameter",
        )
    if len(requests) > 1 and len(suffix) * len(requests) > limits.MAX_SHARED_WORK:
        most = limits.MAX_SHARED_WORK // len(requests)
        told = f"at most {most} with {len(requests)} prompts; send fewer of them"
        raise ParameterError("suffix", f"{len(suffix)} characters", told)
    plain, result = replace(tokens, repository=None, file=None), []  # there are no other files
    for request in requests:
        if request.prompt is None:
            raise bad_value("prompt", list(request.prompt_ids or ()), "a text, or texts, together with suffix")
        if request.truncation is not None:
            told = "only without suffix, since it would cut the marks between the texts"
            raise ParameterError("truncate_prompt_tokens", request.truncation.tokens, told)
        frontend.check_length("prompt", len(request.prompt) + len(suffix))
        ids = infill_ids(tokenizer, plain, InfillText(request.prompt, suffix), _UNCUT)
        ends = tuple(dict.fromkeys((*request.sampling.stop_token_ids, *tokens.ends)))
        sampling = replace(request.sampling, stop_token_ids=ends)
        result.append(replace(request, prompt=None, prompt_ids=tuple(ids), sampling=sampling))
    return tuple(result)
