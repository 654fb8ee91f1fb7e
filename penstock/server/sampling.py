"""How a body says which tokens are chosen: the fields that OpenAI's dialects share, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from penstock.config import limits
from penstock.config.sampling import SamplingParams
from penstock.server.retention import RetentionConfig
from penstock.server.sampler_fields import SamplerBody, sampler_options
from penstock.server.shapes import RequestBody, StopString, TokenIds, TokenKey, members, or_null

Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Fraction = Annotated[float, Field(gt=0, le=1)]
TopP = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)]
Alternatives = Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)]
AnyAlternatives = Annotated[int, Field(ge=-1, le=limits.MAX_VOCABULARY)]
Label = Annotated[str, Field(max_length=limits.MAX_USER_CHARS)]
Bias = Annotated[float, Field(ge=-limits.MAX_BIAS, le=limits.MAX_BIAS)]
_LEAST_TOP_P = 1e-9
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "stop")


def _bounded(value: Any) -> Any:
    """llama-server's clients write -1 for no bound."""
    return None if value == -1 else value


MaxTokens = Annotated[
    Count | None,
    BeforeValidator(_bounded),
    WithJsonSchema(or_null({"type": "integer", "minimum": -1, "maximum": limits.MAX_TOKENS, "not": {"const": 0}})),
]


class SamplingBody(RequestBody):
    """A field left out takes the model's own default, else OpenAI's."""

    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: TopP | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Bias], Field(max_length=limits.MAX_LOGIT_BIAS), members(limits.MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None

    # Not OpenAI's.
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=limits.MAX_BAD_WORDS)] | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None


class HintedBody(SamplingBody):
    """Hints, on which nothing in the answer depends: those to a hosted service, and how long the cache keeps what."""

    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    kv_cache_retention_config: RetentionConfig | None = None
    preserve_cache: bool | None = None


def least(top_p: float) -> float:
    """A share as the sampler takes it: 0 keeps the likeliest token alone, as with the services whose APIs these are."""
    return max(top_p, _LEAST_TOP_P)


def sampling_params(body: SamplingBody, defaults: Mapping[str, Any], **extra: Any) -> SamplingParams:
    """What a body asks for; `defaults` are the model's own, `extra` counts for more than either.

    Raises:
        ParameterError: values that do not go together.
    """
    chosen: dict[str, Any] = {name: defaults[name] for name in _FROM_MODEL if defaults.get(name) is not None}
    given = {name: getattr(body, name) for name in SamplingBody.model_fields.keys() - RequestBody.model_fields.keys()}
    chosen |= {name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None}
    if body.top_p is not None:
        chosen["top_p"] = least(body.top_p)
    if isinstance(body.stop, str):
        chosen["stop"] = (body.stop,)
    if isinstance(body, SamplerBody):
        chosen |= sampler_options(body)
    if body.logit_bias is not None:
        chosen["logit_bias"] = tuple((int(token), bias) for token, bias in body.logit_bias.items())
    return SamplingParams(**chosen | extra)
