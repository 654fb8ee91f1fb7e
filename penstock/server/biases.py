"""Biases of tokens as llama-server's clients write them: by id or by text; false for tokens that are never taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import WithJsonSchema

from penstock.config import limits
from penstock.config.errors import ParameterError
from penstock.server.errors import bad_value
from penstock.server.shapes import STRING, TOKEN_ID_BOUND, or_null, whole

if TYPE_CHECKING:
    from penstock.engine.frontend import Frontend

_ID: dict[str, Any] = {"type": "integer", "minimum": 0, "exclusiveMaximum": TOKEN_ID_BOUND}
_BIAS: dict[str, Any] = {"anyOf": [{"type": "number"}, {"const": False}]}
_PAIR: dict[str, Any] = {
    "type": "array",
    "prefixItems": [{"anyOf": [_ID, STRING]}, _BIAS],
    "items": False,
    "minItems": 2,
}
_BIASES: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": _PAIR, "maxItems": limits.MAX_LOGIT_BIAS},
        {"type": "object", "additionalProperties": _BIAS, "maxProperties": limits.MAX_LOGIT_BIAS},
    ]
}
Biases = Annotated[Any, WithJsonSchema(or_null(_BIASES))]


def biases(given: Any, frontend: Frontend) -> tuple[tuple[tuple[int, float], ...], list[tuple[int, ...]]]:
    """Biases by token, and tokens that are never taken, from a list of pairs or an object by id or text.

    A text stands for each of its tokens. A bias beyond the sampler's range counts as its end.

    Raises:
        RequestError: it is neither, or too much.
    """
    pairs = list(given.items()) if isinstance(given, dict) else given or []
    if not isinstance(pairs, list):
        raise bad_value("logit_bias", given, "a list of [token id or text, bias] pairs, or an object")
    if len(pairs) > limits.MAX_LOGIT_BIAS:
        raise ParameterError("logit_bias", f"{len(pairs)} entries", f"at most {limits.MAX_LOGIT_BIAS}")
    found: dict[int, float] = {}
    banned: list[tuple[int, ...]] = []
    for index, pair in enumerate(pairs):
        ids, bias = _bias(f"logit_bias[{index}]", pair, frontend, by_name=isinstance(given, dict))
        if bias is None:
            banned += [(token,) for token in ids]
        else:
            found |= dict.fromkeys(ids, bias)
    return tuple(found.items()), banned


def _bias(where: str, pair: Any, frontend: Frontend, *, by_name: bool) -> tuple[Sequence[int], float | None]:
    """Tokens, and their bias within the sampler's range; None for never."""
    token, bias = pair if isinstance(pair, (list, tuple)) and len(pair) == 2 else (None, None)
    token = whole(token)
    if by_name and token.isascii() and token.isdigit() and len(token) <= 10:
        token = int(token)
    if (
        not (bias is False or (isinstance(bias, (int, float)) and bias is not True))
        or isinstance(token, bool)
        or not isinstance(token, (int, str))
    ):
        raise bad_value(where, pair, "a token id or a text, and a number or false")
    if isinstance(token, str):
        if len(token) > limits.MAX_STOP_CHARS:
            raise ParameterError(where, f"a text of {len(token)} characters", f"at most {limits.MAX_STOP_CHARS}")
        ids = frontend.text.tokenizer.encode(token, add_special_tokens=False, parse_special=False)
    elif not 0 <= token < frontend.text.vocab_size:
        raise bad_value(where, token, f"token ids below {frontend.text.vocab_size}")
    else:
        ids = [token]
    return ids, None if bias is False else float(max(-limits.MAX_BIAS, min(bias, limits.MAX_BIAS)))
