"""Prompts that clients send as rows of the model's embedding, under vLLM's names: `torch.save` of them, in base64."""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Annotated, Any, Final

from pydantic import WithJsonSchema

from penstock.config import limits
from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.config.generation import GenerationRequest
from penstock.config.given_rows import GivenRows
from penstock.server.errors import bad_value
from penstock.server.prompts import prompts_of
from penstock.server.shapes import STRING, PromptOrNull, RequestBody, Strings, or_null
from penstock.server.torch_archive import ArchiveError, read_tensor
from penstock.text.given_rows import FIELD, row_mark

_ONE: dict[str, Any] = {**STRING, "contentEncoding": "base64", "minLength": 1}
_MANY: dict[str, Any] = {"type": "array", "items": _ONE, "minItems": 1, "maxItems": limits.MAX_PROMPTS_PER_CALL}
ENCODED: dict[str, Any] = {"anyOf": [_ONE, _MANY]}
_PIECE: Final = 1 << 18  # characters, a multiple of four
_ALLOWED: Final = "torch.save of a tensor [tokens, hidden size] of float32, bfloat16 or float16, in base64"
PART: dict[str, Any] = {
    "type": "object",
    "required": ["type", "data"],
    "properties": {"type": {"const": FIELD}, "data": STRING},
}
"""Of a message's content."""


class EmbedsBody(RequestBody):
    """Prompts may be rows, texts, or some of each: those that are rows are answered first."""

    prompt: PromptOrNull = None
    prompt_embeds: Annotated[str | Strings | None, WithJsonSchema(or_null(ENCODED))] = None


def rows_of(encoded: str, field: str) -> GivenRows:
    """The rows that a client has sent.

    Raises:
        RequestError: they are no base64, no tensor, of another type or shape, or not all finite; `field` has them.
    """
    try:
        tensor = read_tensor(_decoded(encoded))
    except (ValueError, binascii.Error):
        raise bad_value(field, encoded, _ALLOWED) from None
    except ArchiveError as error:
        raise RequestError(f"{field} {error}; allowed: {_ALLOWED}.", param=field, code="invalid_value") from None
    shape = tensor.shape[1:] if len(tensor.shape) == 3 and tensor.shape[0] == 1 else tensor.shape
    if len(shape) != 2 or 0 in shape:
        raise ParameterError(field, f"a tensor of shape {format_value(list(tensor.shape))}", _ALLOWED)
    rows = GivenRows(tensor.dtype, shape[1], tensor.data)
    if not rows.finite:
        raise ParameterError(field, "a tensor with values that are infinite or no numbers", "finite values")
    return rows


def _decoded(encoded: str) -> bytes:
    """Base64's bytes, piece by piece: decoding holds the interpreter's lock, which an event loop waits for.

    Raises:
        ValueError: it is none.
    """
    if "=" in encoded[:-2]:
        raise ValueError
    whole = BytesIO()
    for begin in range(0, len(encoded), _PIECE):
        whole.write(binascii.a2b_base64(encoded[begin : begin + _PIECE].encode("ascii"), strict_mode=True))
    return whole.getvalue()


def all_prompts(body: EmbedsBody, **without: object) -> Sequence[str | Sequence[int] | GivenRows]:
    """A body's prompts, those that are rows first. An empty text beside rows is none: OpenAI's client has to send one.

    Args:
        body: the body.
        without: fields with which there can be no rows, by name, and what the body has of them.

    Raises:
        RequestError: there is none, or one cannot be read; or rows come with such a field.
    """
    given = body.prompt_embeds
    if given is None and body.prompt is None:
        raise RequestError("prompt is required.", param="prompt", code="missing_required_parameter")
    if given is None:
        return prompts_of(body.prompt, "prompt")
    _check_without(without)
    listed = [given] if isinstance(given, str) else given
    if not 0 < len(listed) <= limits.MAX_PROMPTS_PER_CALL:
        raise ParameterError(FIELD, f"{len(listed)} prompts", f"1 to {limits.MAX_PROMPTS_PER_CALL}")
    names = [FIELD] if isinstance(given, str) else [f"{FIELD}[{number}]" for number in range(len(listed))]
    rows = [rows_of(encoded, name) for encoded, name in zip(listed, names, strict=True)]
    texts = () if body.prompt in (None, "", [], [""]) else prompts_of(body.prompt, "prompt")
    if len(rows) + len(texts) > limits.MAX_PROMPTS_PER_CALL:
        told = f"{len(rows) + len(texts)} prompts together with {FIELD}"
        raise ParameterError("prompt", told, f"at most {limits.MAX_PROMPTS_PER_CALL}")
    return [*rows, *texts]


def _check_without(fields: Mapping[str, object]) -> None:
    for field, value in fields.items():
        if value:
            told = f"{field} is only possible without {FIELD}, whose rows are no tokens; leave one of them out."
            raise RequestError(told, param=field, code="unsupported_parameter")


def marked(
    messages: Sequence[Mapping[str, Any]], request_id: str, **without: object
) -> tuple[Sequence[Mapping[str, Any]], tuple[GivenRows, ...]]:
    """A chat's messages with marks in the place of parts that are rows, and the rows; `without` as of `all_prompts`.

    Raises:
        RequestError: a part's rows cannot be read, or come with a field of those.
    """
    rows: list[GivenRows] = []
    result: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        parts = message.get("content")
        if isinstance(parts, list) and any(map(_is_rows, parts)):
            _check_without(without)
            content = []
            for number, part in enumerate(parts):
                if _is_rows(part):
                    field = f"messages[{index}].content[{number}].data"
                    if not isinstance(part.get("data"), str):
                        raise bad_value(field, part.get("data"), _ALLOWED)
                    part = {"type": "text", "text": row_mark(request_id, len(rows))}
                    rows.append(rows_of(parts[number]["data"], field))
                content.append(part)
            message = {**message, "content": content}
        result.append(message)
    return result, tuple(rows)


def check_tokens(requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
    """The same requests; raises RequestError where rows stand among a prompt's tokens, which are all to be told."""
    if any(request.rows for request in requests):
        told = f"{FIELD} cannot be rendered: rows are no tokens. Send the prompt as text."
        raise RequestError(told, param=FIELD, code="unsupported_parameter")
    return requests


def _is_rows(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == FIELD
