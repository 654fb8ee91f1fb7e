"""Bodies of the Anthropic dialect: the fields of its API, of which hints to a hosted service have no effect here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from penstock.config import limits
from penstock.server.sampling import TopP
from penstock.server.shapes import (
    FUNCTION_NAME,
    STRING,
    TEXT_PART,
    Body,
    Exact,
    StopString,
    Unavailable,
    an_object,
    nothing_but,
)

_CONTENT: dict[str, Any] = {"anyOf": [STRING, {"type": "array", "items": TEXT_PART, "minItems": 1}]}
_MESSAGE = an_object({"role": {"enum": ["user", "assistant"]}, "content": _CONTENT})
_TOOL = an_object({"name": FUNCTION_NAME, "input_schema": {"type": "object"}}, {"description": STRING})
Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]],
    Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True),
]
Tools = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TOOL)]], Field(max_length=limits.MAX_TOOLS)]
Blocks = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(TEXT_PART)]], Field(fail_fast=True)]


class Part(Exact):
    """Settings of what lies within a body: exact types; what later versions of the API add is passed over."""

    model_config = ConfigDict(extra="ignore")


class Metadata(Part):
    """Who asks; nothing depends on it."""

    user_id: Annotated[str, Field(max_length=limits.MAX_USER_CHARS)] | None = None


class ThinkingConfig(Part):
    """Whether the model reasons before it answers, for how many tokens, and whether that is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=limits.MAX_TOKENS)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicToolChoice(Part):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Part):
    """The schema that the answer's text follows."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Part):
    """The form of the answer, and how much the model should do for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens: a prompt."""

    model: str
    messages: Messages
    system: str | Blocks | None = None
    tools: Tools | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    # Not available; anything but null or nothing is refused.
    container: Unavailable = None
    mcp_servers: Annotated[list[Any] | None, nothing_but([])] = None
    thread: Annotated[dict[str, Any] | None, nothing_but({})] = None

    # Accepted because Anthropic accepts them; the prefix cache needs no marks, and there is one kind of service.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages. With `max_tokens` 0 the prompt is computed, and cached, and nothing answered."""

    max_tokens: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
    stop_sequences: Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


ANTHROPIC_BODIES = (MessagesBody, CountTokensBody)
