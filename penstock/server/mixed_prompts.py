"""Prompts as llama-server's clients write them: texts, token ids, both mixed, objects, or a list of such."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import WithJsonSchema

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.server.errors import bad_value
from penstock.server.shapes import TOKEN_ID_BOUND, an_object, or_null, whole

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_IDS: dict[str, Any] = {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_BOUND}
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_MIXED: dict[str, Any] = {
    "type": "array",
    "items": {"anyOf": [_TEXT, _IDS]},
    "contains": {"type": "integer"},
    "minItems": 1,
    "maxItems": limits.MAX_PROMPTS_PER_CALL,
}
_OBJECT: dict[str, Any] = an_object({"prompt_string": _TEXT}, {"multimodal_data": {"enum": [[], None]}})
_ONE: dict[str, Any] = {"anyOf": [_TEXT, _MIXED, _OBJECT]}
_MANY: dict[str, Any] = {
    "type": "array",
    "items": _ONE,
    "not": {"contains": {"type": "integer"}},
    "minItems": 1,
    "maxItems": limits.MAX_PROMPTS_PER_CALL,
}
MIXED_PROMPTS: dict[str, Any] = {"anyOf": [_TEXT, _MIXED, _OBJECT, _MANY]}
MixedPrompts = Annotated[Any, WithJsonSchema(MIXED_PROMPTS)]
MixedPromptsOrNull = Annotated[Any, WithJsonSchema(or_null(MIXED_PROMPTS))]


def mixed_prompts(prompt: Any, field: str, frontend: Frontend) -> list[GenerationRequest]:
    """A request for each prompt, without sampling: a text, token ids, both mixed, or an object with `prompt_string`.

    Raises:
        RequestError: it is none of these, or there are too many.
    """
    several = isinstance(prompt, list) and not set(map(type, prompt)) & {int, float, bool}
    prompts = prompt if several else [prompt]
    if not prompts or len(prompts) > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError(field, f"{len(prompts)} prompts", f"1 to {limits.MAX_PROMPTS_PER_CALL}")
    return [_prompt(f"{field}[{index}]" if several else field, one, frontend) for index, one in enumerate(prompts)]


def _prompt(where: str, prompt: Any, frontend: Frontend) -> GenerationRequest:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data") not in (None, []):
            raise bad_value(f"{where}.multimodal_data", prompt["multimodal_data"], "none (this model takes text)")
        prompt = prompt.get("prompt_string")
    request = GenerationRequest(uuid.uuid4().hex, SamplingParams())
    if isinstance(prompt, str):
        return replace(request, prompt=prompt)
    pieces = whole(prompt)
    if not isinstance(pieces, list) or not set(map(type, pieces)) <= {int, str} or not pieces:
        raise bad_value(where, prompt, "a string, token ids, both mixed in a list, or an object with prompt_string")
    return replace(request, prompt_ids=tuple(mixed_ids(pieces, where, frontend)))


def mixed_ids(
    pieces: Sequence[str | int], where: str, frontend: Frontend, *, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """The token ids of texts and token ids; special tokens go before a text that comes first.

    Raises:
        RequestError: there are too many texts, or too long ones.
    """
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) > limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError(where, f"{len(texts)} texts", f"at most {limits.MAX_PROMPTS_PER_CALL}")
    frontend.check_length(where, sum(map(len, texts)))
    ids: list[int] = []
    for index, piece in enumerate(pieces):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            special = add_special and index == 0
            ids += frontend.text.tokenizer.encode(piece, add_special_tokens=special, parse_special=parse_special)
    return ids
