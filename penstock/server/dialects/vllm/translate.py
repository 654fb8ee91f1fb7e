"""A prompt of tokens to the internal request. Pure: no engine, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.dialects.vllm.schema import TokensBody
from penstock.server.prompts import text_request
from penstock.server.shapes import check_stream_options

# Bytes, which JSON has none of: made of dry_sequence_breakers, and of the prompt where there is token_healing.
_MADE = frozenset({"dry_breaker_mask", "begins_with"})
_KNOWN = frozenset(field.name for field in fields(SamplingParams)) - _MADE
# Of vLLM's sampling parameters, those that change nothing here, and the values at which others ask for nothing.
_HARMLESS: Mapping[str, tuple[Any, ...] | None] = MappingProxyType(
    {
        **dict.fromkeys(("detokenize", "spaces_between_special_tokens", "output_kind", "flat_logprobs", "skip_clone")),
        **dict.fromkeys(("extra_args", "structured_outputs", "repetition_detection"), ({}, [])),
        **dict.fromkeys(("skip_reading_prefix_cache", "watermarking"), (False,)),
        **dict.fromkeys(_MADE, ("",)),
        "thinking_token_budget": (),
    }
)


@dataclass(frozen=True, slots=True)
class TokensCall:
    """A translated call.

    Attributes:
        id: the answer's.
        request: to run.
        text: the answer's text is told besides its tokens.
        tells_prompt: the prompt's tokens are told.
        stream, include_usage: how the answer is told.
    """

    id: str
    request: GenerationRequest
    text: bool
    tells_prompt: bool
    stream: bool
    include_usage: bool


def tokens_call(body: TokensBody) -> TokensCall:
    """Translates a call.

    Raises:
        RequestError: a sampling parameter that is not here, or a value of one that is not allowed.
    """
    check_stream_options(body.stream, body.stream_options)
    request = text_request(None, body, body.token_ids, _sampling(body.sampling_params))
    return TokensCall(
        id=body.request_id or request.request_id,
        request=request,
        text=body.output_mode == "text",
        tells_prompt=bool(body.return_token_ids),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    chosen = {}
    for name, value in given.items():
        if name in _KNOWN:
            chosen[name] = value
            continue
        harmless = _HARMLESS.get(name, ())
        if name not in _HARMLESS:
            told = (
                f"sampling_params has {format_value(name)}, which is none of vLLM's that are known here; leave it out."
            )
            raise RequestError(told, param="sampling_params", code="unknown_parameter")
        if value is not None and harmless is not None and value not in harmless:
            told = f"sampling_params has {name}: {format_value(value)}, which is not available here; leave it out."
            raise RequestError(told, param="sampling_params", code="unsupported_parameter")
    several = chosen.get("n")
    if isinstance(several, int) and several > limits.MAX_N:
        raise ParameterError("n", several, f"at most {limits.MAX_N}")
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})
