"""Bodies of the OpenAI dialect. Ranges come from `config.limits`; what is checked here is also what /docs shows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.config import limits
from penstock.server.sampling import Alternatives, Count, HintedBody
from penstock.server.shapes import (
    Body,
    Choice,
    FunctionCall,
    Functions,
    Messages,
    Name,
    Objects,
    Prompt,
    Strings,
    StructuredOutputs,
    Tools,
    nothing_but,
)


class StreamOptions(Body):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(BaseModel):
    """The wished form of the answer; see `server.structured`."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"


class Sampling(HintedBody):
    """Fields that chat and text completions share."""

    n: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Alternatives | None = None
    request_id: Name | None = None
    return_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=limits.MAX_N)] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[Strings, Field(min_length=1)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None

    # Accepted as those of HintedBody are.
    store: Annotated[bool | None, nothing_but(False)] = None
    metadata: dict[str, Any] | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
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
    modalities: Annotated[Strings | None, nothing_but([], ["text"])] = None
    audio: Annotated[dict[str, Any] | None, nothing_but()] = None
    functions: Functions | None = None
    function_call: FunctionCall | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    include_reasoning: bool | None = None
    web_search_options: Annotated[dict[str, Any] | None, nothing_but()] = None


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, nothing_but("")] = None
