"""Bodies of the SGLang dialect. Unknown fields are passed over, unknown sampling parameters are not, as there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from penstock.config import limits
from penstock.server.dialects.sglang.sessions.schema import SESSION_BODIES, SessionParams
from penstock.server.sampler_fields import PROCESSOR
from penstock.server.shapes import (
    STRING,
    TOKEN_ID_BOUND,
    Body,
    Exact,
    Loose,
    Name,
    StopPatterns,
    StopString,
    TokenIds,
    TokenKey,
    members,
    nothing_but,
    or_null,
    whole,
)

_KEEPS_ALL = 1 << 30  # what SGLang itself writes for a top_k that keeps all
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_ID: dict[str, Any] = {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_BOUND}
_IDS: dict[str, Any] = {"type": "array", "items": _ID, "minItems": 1}
_MANY: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": limits.MAX_PROMPTS_PER_CALL}
_TEXTS: dict[str, Any] = {"anyOf": [_TEXT, {**_MANY, "items": _TEXT}]}
_LISTS: dict[str, Any] = {"anyOf": [_IDS, {**_MANY, "items": _IDS}]}
_NULL: dict[str, Any] = {"type": "null"}
_GIVEN: dict[str, Any] = {
    "oneOf": [
        {"required": ["text"], "properties": {"text": _TEXTS, "input_ids": _NULL}},
        {"required": ["input_ids"], "properties": {"input_ids": _LISTS, "text": _NULL}},
    ]
}


def _whole_ids(value: Any) -> Any:
    listed = isinstance(value, list) and list in set(map(type, value))
    return [whole(item) for item in value] if listed else whole(value)


Texts = Annotated[Any, WithJsonSchema(or_null(_TEXTS))]
Ids = Annotated[Any, BeforeValidator(_whole_ids), WithJsonSchema(or_null(_LISTS))]
Bias = Annotated[float, Field(ge=-limits.MAX_BIAS, le=limits.MAX_BIAS)]
Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Start = Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)]
Top = Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)]
Schema = Annotated[dict[str, Any] | str, WithJsonSchema({"anyOf": [{"type": "object"}, STRING]})]

Processor = Annotated[str, Field(max_length=limits.MAX_GRAMMAR_CHARS), WithJsonSchema(PROCESSOR)]
"""The name of a registered one; what SGLang's own clients send is code, and longer."""


class SglangParams(Body):
    """How tokens are chosen, of one prompt or of all."""

    max_new_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    stop_regex: StopPatterns | Literal[""] | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Schema | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_params: dict[str, Any] | None = None
    stream_interval: int | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Bias], Field(max_length=limits.MAX_LOGIT_BIAS), members(limits.MAX_LOGIT_BIAS)] | None
    ) = None
    sampling_seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether `top_k` leaves every token."""
        return self.top_k is None or self.top_k <= 0 or self.top_k >= _KEEPS_ALL


_MANY_PARAMS = Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL)


class _Given(Exact):
    """Texts or token ids, one or many."""

    model_config = ConfigDict(extra="ignore", json_schema_extra=_GIVEN)

    text: Texts = None
    input_ids: Ids = None
    rid: Name | Annotated[list[Name], _MANY_PARAMS] | None = None
    lora_path: Annotated[str, Field(max_length=limits.MAX_MODEL_NAME_CHARS)] | None = None
    model: str | None = None


class SglangBody(_Given):
    """POST /generate, with `text` or `input_ids`. What is said of each prompt is one value, or a list of as many."""

    sampling_params: SglangParams | Annotated[list[SglangParams], _MANY_PARAMS] | None = None
    return_logprob: bool | Annotated[list[bool], _MANY_PARAMS] | None = None
    logprob_start_len: Start | Annotated[list[Start], _MANY_PARAMS, BeforeValidator(whole)] | None = None
    top_logprobs_num: Top | Annotated[list[Top], _MANY_PARAMS, BeforeValidator(whole)] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    custom_logit_processor: Processor | Annotated[list[Processor | None], _MANY_PARAMS] | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    extra_key: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None
    session_params: SessionParams | None = None


class SglangPoolingBody(_Given):
    """POST /encode, and /classify with `text` or `input_ids`."""


class AbortBody(Loose):
    """POST /abort_request."""

    rid: Name
    abort_all: Annotated[bool | None, nothing_but(False)] = None
    model: str | None = None


SGLANG_BODIES = (SglangBody, SglangPoolingBody, AbortBody, *SESSION_BODIES)
