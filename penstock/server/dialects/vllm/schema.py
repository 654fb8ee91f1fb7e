"""Bodies of vLLM's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.server.dialects.openai.schema import StreamOptions
from penstock.server.shapes import Name, RequestBody, TokenIds


class TokensBody(RequestBody):
    """POST /inference/v1/generate: a prompt of token ids, and how to go on with it."""

    token_ids: Annotated[TokenIds, Field(min_length=1)]
    sampling_params: dict[str, Any]
    request_id: Name | None = None
    output_mode: Literal["tokens", "text"] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


VLLM_BODIES = (TokensBody,)
