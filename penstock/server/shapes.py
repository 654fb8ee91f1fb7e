"""Shapes that the bodies of several dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from penstock.config import limits
from penstock.config.errors import ParameterError

FUNCTION_NAME: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
"""As the document has it; letters of other alphabets are taken too."""
STRING: dict[str, Any] = {"type": "string"}


def an_object(required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The JSON schema of an object, from those of its properties."""
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


TEXT_PART: dict[str, Any] = an_object({"type": {"const": "text"}, "text": STRING})
FUNCTION_TOOL: dict[str, Any] = an_object(
    {"type": {"const": "function"}, "function": an_object({"name": FUNCTION_NAME})}
)
_CONTENT: list[dict[str, Any]] = [STRING, {"type": "array", "items": TEXT_PART}]
_CALL: dict[str, Any] = an_object({"function": an_object({"name": STRING, "arguments": STRING})})
_MESSAGE: dict[str, Any] = {
    "anyOf": [
        an_object({"role": {"enum": ["system", "developer", "user", "tool"]}, "content": {"anyOf": _CONTENT}}),
        an_object(
            {"role": {"const": "assistant"}, "content": {"anyOf": [*_CONTENT, {"type": "null"}]}},
            {"tool_calls": {"type": "array", "items": _CALL}},
        ),
    ]
}
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES)]
Tool = Annotated[dict[str, Any], WithJsonSchema(FUNCTION_TOOL)]
Tools = Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
_IDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "minItems": 1,
}
_STRINGS_OR_IDS: dict[str, Any] = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
Prompt = Annotated[Any, WithJsonSchema(_STRINGS_OR_IDS)]
StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
_NAME = rf"^[A-Za-z0-9._:\-]{{1,{limits.MAX_REQUEST_ID_CHARS}}}$"
_TOKEN_KEY = r"^[0-9]{1,10}$"
_DURATION = r"^[-+]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h))+)$"
PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        _NAME: f"1 to {limits.MAX_REQUEST_ID_CHARS} letters, digits and the characters . _ : -",
        _TOKEN_KEY: "token ids, in digits",
        _DURATION: "a duration with its unit, as in 30s, 5m, 1h30m",
    }
)
"""Every pattern a body is held to, in plain words."""
Name = Annotated[str, Field(pattern=_NAME)]
Duration = Annotated[str, Field(pattern=_DURATION, max_length=100)]
"""As Go writes them."""
TokenKey = Annotated[str, Field(pattern=_TOKEN_KEY)]


class Body(BaseModel):
    """Settings of every body: exact types, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Query(BaseModel):
    """Settings of queries, which are text: numbers and truth values are read from it, unknown names are left alone."""

    model_config = ConfigDict(extra="ignore")


class RequestBody(Body):
    """What every request to the model may say."""

    model: str | None = None
    user: Annotated[str, Field(max_length=limits.MAX_USER_CHARS)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=limits.MIN_PRIORITY, le=limits.MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=limits.MAX_CACHE_SALT_CHARS)] | None = None


def check_stream_options(stream: bool | None, options: BaseModel | None) -> None:
    """Raises ParameterError for options of a stream that was not asked for."""
    if options is not None and not stream:
        raise ParameterError("stream_options", options.model_dump(exclude_none=True), "only together with stream: true")
