"""Prompts that a body asks to be cut where they are too long, under vLLM's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.config import limits
from penstock.config.lengths import Truncation
from penstock.server.shapes import RequestBody, or_null

_ALLOWED = f"-1 or an integer from 1 to {limits.MAX_TOKENS}"


def _some(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("no_tokens", _ALLOWED)
    return value


_KEPT: dict[str, Any] = {"type": "integer", "minimum": -1, "maximum": limits.MAX_TOKENS, "not": {"const": 0}}
Kept = Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS), AfterValidator(_some)]


class CutBody(RequestBody):
    """A prompt that is too long may be cut; without these fields it is refused."""

    truncate_prompt_tokens: Annotated[Kept | None, WithJsonSchema(or_null(_KEPT))] = None
    truncation_side: Literal["left", "right"] | None = None


def truncation(body: CutBody, *, reserved: int = 0, keep_end: bool = False) -> Truncation | None:
    """How the prompts of a body are cut, None for not at all.

    Args:
        body: the body.
        reserved: tokens of the context that the answer needs.
        keep_end: the side that is kept where the body does not say.
    """
    if (most := body.truncate_prompt_tokens) is None:
        return None
    if body.truncation_side is not None:
        keep_end = body.truncation_side == "left"
    return Truncation(None if most == -1 else most, keep_end, reserved)
