"""Shapes that the bodies of several dialects share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

from penstock.config import limits
from penstock.config.errors import ParameterError

FUNCTION_NAME: dict[str, Any] = {"type": "string", "pattern": r"^[\w.:/-]{1,128}$"}
"""Letters are those of all alphabets."""
STRING: dict[str, Any] = {"type": "string"}


def an_object(required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The JSON schema of an object, from those of its properties."""
    return {"type": "object", "required": [*required], "properties": {**required, **optional}}


def members(most: int) -> Any:
    """Annotates an object of at most so many members, which are counted before any of them is looked at."""

    def counted(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            told = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", told)
        return value

    return BeforeValidator(counted)


def or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema that takes null as well."""
    return {"anyOf": [schema, {"type": "null"}]}


def whole(value: Any) -> Any:
    """A number that is whole, or those of a list, as an int; anything else as it is."""
    if type(value) is float and value.is_integer():
        return int(value)
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


def _whole_prompts(value: Any) -> Any:
    listed = isinstance(value, list) and list in set(map(type, value))
    return [whole(item) for item in value] if listed else whole(value)


TEXT_PART: dict[str, Any] = an_object({"type": {"const": "text"}, "text": STRING})
_PART: dict[str, Any] = {"anyOf": [TEXT_PART, an_object({"type": {"const": "refusal"}, "refusal": STRING})]}
_FUNCTION: dict[str, Any] = an_object(
    {"name": FUNCTION_NAME},
    {
        "description": or_null(STRING),
        "parameters": or_null({"type": "object"}),
        "strict": or_null({"type": "boolean"}),
    },
)
FUNCTION_TOOL: dict[str, Any] = an_object({"type": {"const": "function"}, "function": _FUNCTION})
CUSTOM_FIELDS: dict[str, Any] = {
    "description": or_null(STRING),
    "format": or_null(an_object({"type": {"const": "text"}})),
}
"""Of a tool whose input is a text; grammars that inputs are held to are beyond what the document can say."""
_CUSTOM_TOOL: dict[str, Any] = an_object(
    {"type": {"const": "custom"}, "custom": an_object({"name": FUNCTION_NAME}, CUSTOM_FIELDS)}
)
_CONTENT: dict[str, Any] = {"anyOf": [STRING, {"type": "array", "items": _PART}]}
_ARGUMENTS: dict[str, Any] = {"anyOf": [STRING, {"type": "object"}, {"type": "null"}]}
_CALL: dict[str, Any] = an_object(
    {"function": an_object({"name": STRING}, {"arguments": _ARGUMENTS})},
    {"id": or_null(STRING), "type": or_null(STRING)},
)
_CALLS: dict[str, Any] = {"type": "array", "items": _CALL}
_TEXTS: dict[str, Any] = {
    name: or_null(STRING) for name in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal")
}
_SAID: dict[str, Any] = {"content": _CONTENT}
_MESSAGE: dict[str, Any] = {
    "anyOf": [
        an_object(
            {"role": {"type": "string", "minLength": 1, "maxLength": 64}, **_SAID},
            {**_TEXTS, "tool_calls": or_null(_CALLS)},
        ),
        an_object(
            {"role": {"const": "assistant"}, "content": {"type": "null"}}, {**_TEXTS, "tool_calls": or_null(_CALLS)}
        ),
        an_object(
            {"role": {"const": "assistant"}, "tool_calls": {**_CALLS, "minItems": 1}},
            {**_TEXTS, "content": or_null(_CONTENT)},
        ),
    ]
}
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=limits.MAX_MESSAGES, fail_fast=True)]
Tool = Annotated[dict[str, Any], WithJsonSchema({"anyOf": [FUNCTION_TOOL, _CUSTOM_TOOL]})]
Tools = Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)]
Functions = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_FUNCTION)]], Field(max_length=limits.MAX_TOOLS, fail_fast=True)
]
TOKEN_ID_BOUND = 2**31
"""Above every vocabulary's; the document has the model's own in its place."""
TokenId = Annotated[int, Field(ge=0, lt=TOKEN_ID_BOUND)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(whole)]
_IDS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_BOUND},
    "minItems": 1,
}
_MANY: dict[str, Any] = {"type": "array", "minItems": 1, "maxItems": limits.MAX_PROMPTS_PER_CALL}
PROMPT: dict[str, Any] = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        _IDS,
        {**_MANY, "items": {"type": "string", "minLength": 1}},
        {**_MANY, "items": _IDS},
    ]
}
Prompt = Annotated[Any, BeforeValidator(_whole_prompts), WithJsonSchema(PROMPT)]
PromptOrNull = Annotated[Any, BeforeValidator(_whole_prompts), WithJsonSchema(or_null(PROMPT))]


_NAMED: dict[str, Any] = an_object({"function": an_object({"name": STRING})})
_CHOICE: dict[str, Any] = {
    "anyOf": [
        {"enum": ["auto", "none", "required", "any"]},
        {**_NAMED, "not": {"required": ["type"], "properties": {"type": {"const": "allowed_tools"}}}},
        {**an_object({"type": {"const": "function"}, "name": STRING}), "not": {"required": ["function"]}},
        an_object(
            {
                "type": {"const": "allowed_tools"},
                "allowed_tools": an_object({"tools": {"type": "array", "items": _NAMED}}),
            }
        ),
    ]
}
Choice = Annotated[str | dict[str, Any], WithJsonSchema(_CHOICE)]
"""Of tools: of those a body has, which the document cannot say."""
_CALLED: dict[str, Any] = {"anyOf": [{"enum": ["auto", "none", "required", "any"]}, an_object({"name": STRING})]}
FunctionCall = Annotated[str | dict[str, Any], WithJsonSchema(_CALLED)]
"""The same of functions, as it was before there were tools."""


class ResponseFormat(BaseModel):
    """The wished form of the answer; see `server.structured`."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"


_STRUCTURED: dict[str, Any] = {
    "json": {"anyOf": [{"type": "object"}, STRING, {"const": True}, {"type": "null"}]},
    "regex": or_null(STRING),
    "choice": or_null({"type": "array", "items": STRING, "minItems": 1}),
    "grammar": or_null(STRING),
    "json_object": or_null({"type": "boolean"}),
    "structural_tag": {"anyOf": [{"type": "object"}, STRING, {"type": "null"}]},
    "whitespace_pattern": or_null(STRING),
    **{
        f"disable_{name}": or_null({"type": "boolean"})
        for name in ("any_whitespace", "additional_properties", "fallback")
    },
}
StructuredOutputs = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "properties": _STRUCTURED, "additionalProperties": False}),
]


def either(*choices: Mapping[str, Any]) -> ConfigDict:
    """Settings of a body that has one of these fields at least, each given with its JSON schema."""
    fitting: list[Any] = [{"required": [*choice], "properties": {**choice}} for choice in choices]
    return ConfigDict(json_schema_extra={"anyOf": fitting})


def nothing_but(*harmless: Any) -> Any:
    """Annotates a field of something that is not available: the values that ask for none of it, null among them."""
    return WithJsonSchema({"enum": [*harmless, None]})


Unavailable = Annotated[Any, nothing_but()]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16), members(16)
]
StopString = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
_StopPattern = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_REGEX_CHARS)]
StopPatterns = _StopPattern | Annotated[list[_StopPattern], Field(max_length=limits.MAX_STOP_REGEXES)]
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


class Exact(BaseModel):
    """Settings of what bodies are made of: exact types. A whole number may be written as 3.0, as JSON has one kind."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, data: Any) -> Any:
        """With whole numbers as such, and of the fields that are unknown one: telling of each would take long."""
        if not isinstance(data, dict):
            return data
        known = cls.model_fields
        if cls.model_config.get("extra") == "forbid" and len(data) > len(known):
            unknown = next(name for name in data if name not in known)
            data = {name: data[name] for name in known if name in data} | {unknown: data[unknown]}
        written = {
            name: whole(value) for name, value in data.items() if type(value) is float and _takes_whole(cls, name)
        }
        return data | written if written else data


def _takes_whole(model: type[BaseModel], name: str) -> bool:
    return name in model.model_fields and _has_int(model.model_fields[name].annotation)


def _has_int(annotation: Any) -> bool:
    return annotation is int or any(map(_has_int, get_args(annotation)))


class Loose(Exact):
    """Settings of bodies whose unknown fields are passed over, as the API that they are of has it."""

    model_config = ConfigDict(extra="ignore")


class Body(Exact):
    """Settings of every body: no unknown field."""

    model_config = ConfigDict(extra="forbid")


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


def check_one_answer(answers: int) -> None:
    """Raises ParameterError for more than one answer in a stream whose events have no place to name theirs."""
    if answers > 1:
        raise ParameterError("n", answers, "1 in a stream, whose events do not say which answer they are of")


def check_stream_options(stream: bool | None, options: BaseModel | None) -> None:
    """Raises ParameterError for options of a stream that was not asked for."""
    if options is not None and not stream:
        raise ParameterError("stream_options", options.model_dump(exclude_none=True), "only together with stream: true")
