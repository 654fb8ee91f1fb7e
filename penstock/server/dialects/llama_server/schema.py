"""Bodies of the llama-server dialect. Unknown fields are passed over, null means the default."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from penstock.config import limits
from penstock.server.adapter_fields import AdapterBody
from penstock.server.biases import Biases
from penstock.server.mixed_prompts import MixedPrompts
from penstock.server.sampler_fields import SamplerBody
from penstock.server.sampling import Alternatives
from penstock.server.shapes import Loose, StopString

Share = Annotated[float, Field(ge=0, le=1)]
Tokens = Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)]
Whole = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
Stops = Annotated[
    list[Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]], Field(max_length=limits.MAX_STOP_STRINGS)
]


class LlamaSampling(SamplerBody, AdapterBody):
    """How tokens are chosen, and what is told of them."""

    model_config = ConfigDict(extra="ignore")

    n_predict: Tokens | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    temperature: Annotated[float, Field(le=limits.MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    logit_bias: Biases = None
    ignore_eos: bool | None = None
    stop: StopString | Stops | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    n_probs: Alternatives | None = None
    logprobs: Alternatives | None = None
    post_sampling_probs: bool | None = None
    n_indent: Whole | None = None
    drafts: Annotated[Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None, Field(alias="speculative.n_max")] = None
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=2**53)] | None = None
    cache_prompt: bool | None = None
    id_slot: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    sse_ping_interval: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    response_fields: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=128)] | None = None


class LlamaCompletionBody(LlamaSampling):
    """POST /completion."""

    prompt: MixedPrompts


class InfillExtra(Loose):
    """A file, or a piece of one, that goes before what is filled in."""

    text: str
    filename: str | None = None


class InfillBody(LlamaSampling):
    """POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[InfillExtra], Field(max_length=limits.MAX_PROMPTS_PER_CALL)] | None = None
    prompt: str | None = None


class PropsBody(Loose):
    """POST /props, which has no fields yet."""


LLAMA_BODIES = (LlamaCompletionBody, InfillBody, PropsBody)
