"""Shapes that the bodies of several dialects share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from penstock.config import limits

_TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
_MESSAGE: dict[str, Any] = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(min_length=1, max_length=limits.MAX_MESSAGES),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": limits.MAX_MESSAGES}),
]
Tools = Annotated[
    list[dict[str, Any]],
    Field(max_length=limits.MAX_TOOLS),
    WithJsonSchema({"type": "array", "items": _TOOL, "maxItems": limits.MAX_TOOLS}),
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """Settings of every body: exact types, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
