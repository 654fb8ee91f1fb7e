"""Bodies of the TGI dialect. Unknown fields are passed over, null means the default."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server.shapes import STRING, Loose, StopString, an_object, or_null

Above = Annotated[float, Field(gt=0, le=1)]
_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, STRING]}
_GRAMMAR: dict[str, Any] = {
    "anyOf": [
        an_object({"type": {"const": "json"}, "value": _SCHEMA}),
        an_object({"type": {"const": "regex"}, "value": STRING}),
        an_object({"type": {"const": "json_schema"}, "value": an_object({"schema": _SCHEMA}, {"name": STRING})}),
    ]
}


class TgiParameters(Loose):
    """How tokens are chosen, and what is told of them."""

    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    temperature: Annotated[float, Field(gt=0, le=limits.MAX_TEMPERATURE)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    top_k: Annotated[int, Field(ge=1, le=limits.MAX_TOP_K)] | None = None
    top_p: Above | None = None
    typical_p: Above | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    return_full_text: bool | None = None
    stop: Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    truncate: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Field(ge=0, le=limits.MAX_SEED)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None
    grammar: Annotated[dict[str, Any] | None, WithJsonSchema(or_null(_GRAMMAR))] = None
    adapter_id: Annotated[str, Field(max_length=limits.MAX_MODEL_NAME_CHARS)] | None = None


class TgiBody(Loose):
    """POST /generate and /generate_stream, and / which is either of them."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: TgiParameters | None = None
    stream: bool | None = None
    add_special_tokens: bool | None = None
    model: str | None = None


class TgiTokenizeBody(Loose):
    """POST /tokenize with `inputs`."""

    inputs: Annotated[str, Field(min_length=1)]
    add_special_tokens: bool | None = None
    model: str | None = None


TGI_BODIES = (TgiBody, TgiTokenizeBody)
