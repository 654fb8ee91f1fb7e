"""Bodies of the KServe dialect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server.sampler_fields import SamplerBody
from penstock.server.sampling import SamplingBody
from penstock.server.shapes import STRING, Loose, StopString, StructuredOutputs, an_object, or_null

MAX_TENSORS = 64
_TENSOR: dict[str, Any] = an_object(
    {
        "name": {"const": "text_input"},
        "datatype": {"const": "BYTES"},
        "shape": {"const": [1]},
        "data": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1},
    }
)
_OUTPUT: dict[str, Any] = an_object(
    {"name": {"const": "text_output"}}, {"parameters": an_object({}, {"binary_data": {"type": "boolean"}})}
)
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64", "BYTES"
]


class KserveParameters(SamplerBody, SamplingBody):
    """How tokens are chosen: OpenAI's and vLLM's names, and those of Triton's models for TensorRT-LLM."""

    max_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    grammar: str | None = None
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    stop_words: StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    random_seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    min_length: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None


class KserveGenerateBody(KserveParameters):
    """POST /v2/models/MODEL/generate and generate_stream: parameters at the top, or under `parameters`."""

    text_input: Annotated[str, Field(min_length=1)]
    parameters: KserveParameters | None = None
    id: Annotated[str, Field(max_length=limits.MAX_REQUEST_ID_CHARS)] | None = None


class Tensor(Loose):
    """A tensor, whose data are here, or behind the body in binary."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=8)]
    datatype: Datatype
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class WantedTensor(Loose):
    """An output that is asked for."""

    name: str
    parameters: dict[str, Any] | None = None


class KserveInferBody(Loose):
    """POST /v2/models/MODEL/infer: `text_input` of BYTES, and parameters as tensors of one element or as such."""

    inputs: Annotated[
        list[Tensor],
        Field(min_length=1, max_length=MAX_TENSORS),
        WithJsonSchema({"type": "array", "items": _TENSOR, "minItems": 1, "maxItems": 1}),
    ]
    outputs: Annotated[
        list[WantedTensor] | None,
        Field(max_length=MAX_TENSORS),
        WithJsonSchema(or_null({"type": "array", "items": _OUTPUT, "maxItems": 1})),
    ] = None
    parameters: Annotated[
        dict[str, Any] | None,
        WithJsonSchema(or_null({"type": "object", "properties": {"x": STRING}, "maxProperties": 0})),
    ] = None
    id: Annotated[str, Field(max_length=limits.MAX_REQUEST_ID_CHARS)] | None = None


KSERVE_BODIES = (KserveGenerateBody, KserveInferBody)
