"""Bodies of the Kobold dialect. Unknown fields are passed over, null means the default."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from penstock.config import limits
from penstock.server.sampler_fields import SamplerBody, within
from penstock.server.shapes import Loose, TokenKey, members, nothing_but

Share = Annotated[float, Field(ge=0, le=1)]
Stops = Annotated[
    list[Annotated[str, Field(max_length=limits.MAX_STOP_CHARS)]], Field(max_length=256)  # as many as KoboldCpp reads
]
Bias = Annotated[float, Field(ge=-limits.MAX_BIAS, le=limits.MAX_BIAS)]


class KoboldBody(SamplerBody):
    """POST /api/v1/generate and /api/extra/generate/stream."""

    model_config = ConfigDict(extra="ignore")

    prompt: Annotated[str, Field(min_length=1)]
    memory: str | None = None
    max_context_length: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    max_length: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    presence_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    rep_pen: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    rep_pen_range: Annotated[int, within("repeat_last_n")] | None = None
    sampler_seed: Annotated[int, Field(ge=-1, le=limits.MAX_SEED)] | None = None
    stop_sequence: Stops | None = None
    trim_stop: bool | None = None
    bypass_eos: bool | None = None
    use_default_badwordsids: bool | None = None
    render_special: bool | None = None
    logit_bias: (
        Annotated[dict[TokenKey, Bias], Field(max_length=limits.MAX_LOGIT_BIAS), members(limits.MAX_LOGIT_BIAS)] | None
    ) = None
    grammar: str | None = None
    images: Annotated[Any, nothing_but([])] = None
    genkey: Annotated[str, Field(max_length=limits.MAX_REQUEST_ID_CHARS)] | None = None


class GenkeyBody(Loose):
    """POST /api/extra/generate/check and /api/extra/abort: which answer is meant."""

    genkey: Annotated[str, Field(max_length=limits.MAX_REQUEST_ID_CHARS)] | None = None


class TokenCountBody(Loose):
    """POST /api/extra/tokencount."""

    prompt: str
    special: bool | None = None
    model: str | None = None


KOBOLD_BODIES = (KoboldBody, GenkeyBody, TokenCountBody)
