"""Bodies of the Ollama dialect. As in Ollama, fields and options that are unknown are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock.config import limits
from penstock.server.sampler_fields import within
from penstock.server.shapes import (
    FUNCTION_NAME,
    STRING,
    Duration,
    Loose,
    StopString,
    TokenIds,
    an_object,
    either,
    nothing_but,
    or_null,
)

_CALL = an_object({"function": an_object({"name": STRING, "arguments": {"type": "object"}})})
_MESSAGE = an_object(
    {"role": {"enum": ["system", "user", "assistant", "tool"]}},
    {
        "content": or_null(STRING),
        "thinking": or_null(STRING),
        "tool_name": or_null(STRING),
        "tool_calls": or_null({"type": "array", "items": _CALL}),
    },
)
_TOOL = an_object({"function": an_object({"name": FUNCTION_NAME})}, {"type": {"const": "function"}})
Messages = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], Field(max_length=limits.MAX_MESSAGES, fail_fast=True)
]
Tools = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TOOL)]], Field(max_length=limits.MAX_TOOLS)]
Format = Annotated[
    Literal["", "json"] | dict[str, Any], WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]})
]


Text = Annotated[str, Field(min_length=1)]
_NOT_EMPTY = {"type": "string", "minLength": 1}


class Options(Loose):
    """How to sample. Those that load a model another way (num_ctx, num_gpu …) have no effect on one that is loaded."""

    num_predict: Annotated[int, Field(ge=-2, le=limits.MAX_TOKENS)] | None = None
    draft_num_predict: Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOP_K)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=limits.MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    repeat_last_n: Annotated[int, within("repeat_last_n")] | None = None
    tfs_z: Annotated[float, Field(ge=0)] | None = None
    mirostat: Annotated[int, within("mirostat")] | None = None
    mirostat_tau: Annotated[float, within("mirostat_tau")] | None = None
    mirostat_eta: Annotated[float, within("mirostat_eta")] | None = None
    presence_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None


class NamedBody(Loose):
    """A model, which stays loaded as long as `keep_alive` says where the server has several."""

    model: str
    keep_alive: float | Duration | None = None
    options: Options | None = None


class AnswerBody(NamedBody):
    """What generating and chatting share."""

    stream: bool | None = None
    format: Format | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)] | None = None


class GenerateBody(AnswerBody):
    """POST /api/generate. Without a prompt it only says that the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: TokenIds | None = None
    suffix: str | None = None
    images: Annotated[list[Any] | None, nothing_but([])] = None


class OllamaChatBody(AnswerBody):
    """POST /api/chat. Without messages it only says that the model is loaded."""

    messages: Messages | None = None
    tools: Tools | None = None


class EmbedBody(NamedBody):
    """POST /api/embed. Nothing is cut: a text that is too long is refused, whatever `truncate` says."""

    input: Text | Annotated[list[Text], Field(max_length=limits.MAX_PROMPTS_PER_CALL)]
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(NamedBody):
    """POST /api/embeddings, the older form, of one text."""

    prompt: Text


class ShowBody(Loose):
    """POST /api/show: under the one name or the other."""

    model_config = either({"model": _NOT_EMPTY}, {"name": _NOT_EMPTY})

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


OLLAMA_BODIES = (GenerateBody, OllamaChatBody, EmbedBody, OllamaEmbeddingsBody, ShowBody)
