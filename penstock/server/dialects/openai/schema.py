"""Bodies of the OpenAI dialect. Ranges come from `config.limits`; what is checked here is also what /docs shows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock.config import limits
from penstock.server.adapter_fields import NamedAdapterBody
from penstock.server.ending import EndingBody
from penstock.server.prompt_embeds import ENCODED, EmbedsBody
from penstock.server.sampler_fields import SamplerBody
from penstock.server.sampling import AnyAlternatives, HintedBody, MaxTokens
from penstock.server.shapes import (
    PROMPT,
    Body,
    Choice,
    FunctionCall,
    Functions,
    Messages,
    Name,
    Objects,
    ResponseFormat,
    Strings,
    StructuredOutputs,
    TokenIds,
    Tools,
    either,
)
from penstock.server.truncation import CutBody
from penstock.server.webui_fields import WebuiBody, WebuiChatBody


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(SamplerBody, NamedAdapterBody, HintedBody, CutBody, EndingBody, WebuiBody):
    """Fields that chat and text completions share."""

    stream_options: StreamOptions | None = None
    prompt_logprobs: AnyAlternatives | None = None
    logprob_token_ids: Annotated[TokenIds, Field(max_length=limits.MAX_LOGPROB_TOKEN_IDS)] | None = None
    request_id: Name | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_offsets: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Strings, Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    grammar: str | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    sse_ping_interval: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    json_schema: dict[str, Any] | str | None = None

    # Accepted as those of HintedBody are.
    metadata: dict[str, Any] | None = None


class ChatBody(Sampling, WebuiChatBody):
    """POST /v1/chat/completions."""

    messages: Messages
    store: bool | None = None
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: AnyAlternatives | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Objects | None = None
    functions: Functions | None = None
    function_call: FunctionCall | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    include_reasoning: bool | None = None
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    reasoning_control: bool | None = None
    reasoning_budget_tokens: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)] | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None


class CompletionBody(Sampling, EmbedsBody):
    """POST /v1/completions."""

    model_config = either({"prompt": PROMPT}, {"prompt_embeds": ENCODED})
    suffix: str | None = None
    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    logprobs: AnyAlternatives | None = None
    echo: bool | None = None
