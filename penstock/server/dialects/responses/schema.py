"""Bodies and queries of the Responses API. Ranges come from `config.limits`, as those of chat completions do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server.sampling import Alternatives, Count, SamplingBody
from penstock.server.shapes import FUNCTION_NAME, Body, Query, RequestBody

LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_ITEM: dict[str, Any] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": {"type": "string"},
    },
}
_INPUT: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": limits.MAX_MESSAGES}]
}
_TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, "name": FUNCTION_NAME},
}
Input = Annotated[Any, WithJsonSchema(_INPUT)]
ResponseTools = Annotated[
    list[dict[str, Any]],
    Field(max_length=limits.MAX_TOOLS),
    WithJsonSchema({"type": "array", "items": _TOOL, "maxItems": limits.MAX_TOOLS}),
]
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Label = Annotated[str, Field(max_length=limits.MAX_USER_CHARS)]


class Reasoning(Body):
    """How much the model thinks, and whether its reasoning is told as a summary."""

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(Body):
    """The answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Body):
    """Accepted; this server adds no padding to its events."""

    include_obfuscation: bool | None = None


class InputTokensBody(RequestBody):
    """POST /v1/responses/input_tokens: what makes up a prompt."""

    input: Input = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: ResponseTools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesBody(InputTokensBody, SamplingBody):
    """POST /v1/responses."""

    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    include: list[Include] | None = None
    top_logprobs: Alternatives | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt: Any = None

    # Accepted because OpenAI accepts them and nothing in the answer depends on them.
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None


class RetrieveQuery(Query):
    """GET /v1/responses/{response_id}."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None
    include: list[Include] | None = None


class ItemsQuery(Query):
    """GET /v1/responses/{response_id}/input_items."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    include: list[Include] | None = None
