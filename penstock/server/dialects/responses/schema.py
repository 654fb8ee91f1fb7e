"""Bodies and queries of the Responses API. Ranges come from `config.limits`, as those of chat completions do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server import shapes
from penstock.server.pages import PageQuery
from penstock.server.sampling import Alternatives, Count, HintedBody, Label

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
Includes = Annotated[list[Include], Field(fail_fast=True)]
ITEM = shapes.an_object({"role": {"enum": ["system", "developer", "user", "assistant"]}, "content": shapes.STRING})
_ITEMS: dict[str, Any] = {"type": "array", "items": ITEM, "minItems": 1, "maxItems": limits.MAX_MESSAGES}
_TOOL = {
    "anyOf": [
        shapes.an_object({"type": {"const": "function"}, "name": shapes.FUNCTION_NAME}),
        shapes.an_object({"type": {"const": "custom"}, "name": shapes.FUNCTION_NAME}, shapes.CUSTOM_FIELDS),
    ]
}
Input = Annotated[Any, WithJsonSchema({"anyOf": [shapes.STRING, _ITEMS]})]
ResponseTools = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TOOL)]], Field(max_length=limits.MAX_TOOLS)]
Detail = Literal["auto", "concise", "detailed"]


class Reasoning(shapes.Body):
    """How much the model thinks, and whether its reasoning is told as a summary."""

    effort: str | None = None
    summary: Detail | None = None
    generate_summary: Detail | None = None


class TextConfig(shapes.Body):
    """The answer's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationName(shapes.Body):
    """A conversation, named by an object."""

    id: str


class ResponseStreamOptions(shapes.Body):
    """Accepted; this server adds no padding to its events."""

    include_obfuscation: bool | None = None


class InputTokensBody(shapes.RequestBody):
    """POST /v1/responses/input_tokens: what makes up a prompt, some of which is there or goes on from what was."""

    model_config = shapes.either(
        {"input": {"not": {"type": "null"}}},
        *({name: {"not": {"type": "null"}}} for name in ("previous_response_id", "conversation")),
    )
    input: Input = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: ResponseTools | None = None
    tool_choice: shapes.Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    conversation: str | ConversationName | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """Of the conversation it belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class ResponsesBody(InputTokensBody, HintedBody):
    """POST /v1/responses."""

    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    metadata: shapes.Metadata | None = None
    include: Includes | None = None
    top_logprobs: Alternatives | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt: shapes.Unavailable = None
    prompt_cache_options: dict[str, Any] | None = None


class CompactBody(InputTokensBody):
    """POST /v1/responses/compact: the conversation that is made short."""

    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_retention: Label | None = None
    prompt_cache_options: dict[str, Any] | None = None


class RetrieveQuery(shapes.Query):
    """GET /v1/responses/{response_id}."""

    stream: bool = False
    starting_after: Annotated[int, Field(ge=0)] | None = None
    include: Includes | None = None


class ItemsQuery(PageQuery):
    """GET /v1/responses/{response_id}/input_items."""

    include: Includes | None = None
