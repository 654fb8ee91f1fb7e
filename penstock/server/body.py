"""Request bodies: read under limits, parsed strictly, validated with messages that name field, value and remedy."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive

from penstock.config import limits
from penstock.config.errors import RequestError, shown
from penstock.server.errors import HttpError
from penstock.server.patience import patience
from penstock.server.shapes import PATTERNS

_INLINE_BYTES = 64 * 2**10  # larger bodies are read and translated in a thread, so that running streams go on
_SURROGATE = re.compile("[\ud800-\udfff]")
_Made = TypeVar("_Made")
_Model = TypeVar("_Model", bound=BaseModel)


def limited(receive: Receive, declared: int | None) -> Receive:
    """An ASGI `receive` that refuses a body which is too large (413) or comes too slowly (408).

    Args:
        receive: the server's own.
        declared: the Content-Length, or None for a chunked body, which is counted as it comes in.
    """
    received, complete, waited = 0, False, 0.0

    def refuse() -> NoReturn:
        limit = limits.MAX_BODY_BYTES
        raise HttpError(413, f"The request body is larger than {limit} bytes; send less.", code="body_too_large")

    async def bounded() -> Message:
        nonlocal received, complete, waited
        if complete:
            return await receive()
        if declared is not None and declared > limits.MAX_BODY_BYTES:
            refuse()
        try:
            allowed = limits.BODY_TIMEOUT_S + received / limits.SLOWEST_BODY_BYTES_PER_S
            async with patience(allowed - waited) as timer:
                message = await receive()
                waited += timer.elapsed()
        except TimeoutError:
            raise HttpError(408, "The request body came in too slowly; send it in one go.", code="timeout") from None
        received += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if received > limits.MAX_BODY_BYTES:
            refuse()
        return message

    return bounded


async def read_json(request: Request, *, any_type: bool = False) -> dict[str, Any]:
    """The JSON object in the body; with `any_type` whatever content type it says to be.

    Raises:
        HttpError: 415 for a content type other than JSON or a compressed body, 413, 408.
        RequestError: not UTF-8, not JSON, not an object, nested too deeply, or with values JSON does not have.
    """
    _check_type(request, any_type)
    raw = await request.body()
    return parse_json(raw) if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(parse_json, raw)


async def translated(request: Request, work: Callable[..., _Made], *args: Any) -> _Made:
    """What `work` makes of these and a request's body; beside the event loop if that is large."""
    return work(*args) if len(await request.body()) <= _INLINE_BYTES else await asyncio.to_thread(work, *args)


def _check_type(request: Request, any_type: bool) -> None:
    kind, _, options = request.headers.get("content-type", "").partition(";")
    if not any_type and kind.strip().lower() != "application/json":
        message = f"Content-Type is {shown(kind.strip())}; allowed: application/json."
        raise HttpError(415, message, code="unsupported_media_type")
    charset = re.search(r'charset\s*=\s*"?([^\s";]+)', options, re.IGNORECASE)
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
        message = f"The charset is {shown(charset[1])}; allowed: utf-8."
        raise HttpError(415, message, code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"Content-Encoding is {shown(encoding)}; allowed: identity. Send the body uncompressed."
        raise HttpError(415, message, code="unsupported_media_type")


def parse_json(raw: bytes) -> dict[str, Any]:
    """Parses strictly: no NaN or Infinity, no number a double cannot hold, no repeated key, no lone surrogate."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not valid UTF-8") from None
    if raw.count(b",") > limits.MAX_JSON_ITEMS:  # each value becomes an object many times its size here
        raise _malformed(f"it has more than {limits.MAX_JSON_ITEMS} values")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _malformed(f"it is nested deeper than {limits.MAX_JSON_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        long_number = "digits" in str(error)
        raise _malformed("a number has too many digits" if long_number else str(error)[:100]) from None
    if text.count("[") + text.count("{") > limits.MAX_JSON_DEPTH or "\\u" in text:
        _check_tree(value)
    if not isinstance(value, dict):
        raise _malformed(f"it is {shown(value)}; allowed: an object")
    return value


def _malformed(reason: str) -> RequestError:
    return RequestError(f"The request body is not acceptable JSON: {reason}.", code="invalid_json")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"the key {shown(repeated)} appears twice in one object")
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, strict=True)


def _check_tree(root: object) -> None:
    """Depth and surrogates, level by level, without recursion."""
    level: list[object] = [root]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and _SURROGATE.search(item):
                raise _malformed("it contains half of a surrogate pair")
        if not inner:
            return
        level = inner
    raise _malformed(f"it is nested deeper than {limits.MAX_JSON_DEPTH} levels")


def validate(model: type[_Model], data: dict[str, Any]) -> _Model:
    """Checks a body against its schema.

    Raises:
        RequestError: naming the first offending field, its value and what is allowed.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _from_validation(error, data, list(model.model_fields)) from None


def read_query(model: type[_Model], request: Request) -> _Model:
    """Checks a query against its schema; of a name that is repeated the last counts, `name[]` gives a list.

    Raises:
        RequestError: as `validate`.
    """
    given: dict[str, Any] = dict(request.query_params)
    for name in [name for name in given if name.endswith("[]")]:
        given[name[:-2]] = request.query_params.getlist(name)
        del given[name]
    return validate(model, given)


def _entries(least: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: f"{least} {found[key]} {'entry' if found[key] == 1 else 'entries'}"


def _bound(side: str, key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: f"{side} {found[key]:g}" if isinstance(found[key], float) else f"{side} {found[key]}"


def _fixed(words: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda found: words


_ALLOWED: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "string_type": _fixed("a string"),
        "int_type": _fixed("an integer"),
        "int_from_float": _fixed("an integer"),
        "float_type": _fixed("a number"),
        "finite_number": _fixed("a finite number"),
        "bool_type": _fixed("true or false"),
        "list_type": _fixed("a list"),
        "dict_type": _fixed("an object"),
        "model_type": _fixed("an object"),
        "model_attributes_type": _fixed("an object"),
        "too_short": _entries("at least", "min_length"),
        "too_long": _entries("at most", "max_length"),
        "string_too_short": _fixed("a string that is not empty"),
        "string_too_long": lambda found: f"a string of at most {found['max_length']} characters",
        "string_pattern_mismatch": lambda found: PATTERNS[found["pattern"]],
        "literal_error": lambda found: str(found["expected"]).replace("'", '"'),
        "greater_than": _bound("more than", "gt"),
        "greater_than_equal": _bound("at least", "ge"),
        "less_than": _bound("less than", "lt"),
        "less_than_equal": _bound("at most", "le"),
    }
)
"""What is allowed, in plain words, by pydantic's type of error."""


def _from_validation(error: ValidationError, data: Mapping[str, Any], known: Sequence[str]) -> RequestError:
    found = error.errors(include_url=False)
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        param = field[:64] if len(first["loc"]) == 1 else _spell(first["loc"], data)
        near = difflib.get_close_matches(param, known, n=1)
        hint = f" Did you mean {shown(near[0])}?" if near else ""
        return RequestError(f"Unknown parameter: {shown(param)}.{hint}", param=param, code="unknown_parameter")
    same = [item for item in found if item["loc"][0] == field]
    if len(same) > 1:  # of a union's members, the one that got furthest is the one that was meant
        first = max(same, key=lambda item: len(item["loc"]))
        same = [item for item in same if item["loc"] == first["loc"]] if len(first["loc"]) > 2 else same
    param = _spell(first["loc"], data)
    if first["type"] == "missing":
        return RequestError(f"{param} is required.", param=param, code="missing_required_parameter")
    allowed = " or ".join(dict.fromkeys(_allowed(item) for item in same[:4]))
    said = f"{param} is {shown(first['input'])}"
    if first["loc"][-1] == "[key]":
        param = _spell(first["loc"][:-2], data)
        said = f"{param} has the key {shown(first['input'])}"
    return RequestError(f"{said}; allowed: {allowed}.", param=param, code="invalid_value")


def _allowed(item: Mapping[str, Any]) -> str:
    words = _ALLOWED.get(item["type"])
    return words(item.get("ctx", {})) if words else str(item["msg"]).removeprefix("Input should be ")[:120]


def _spell(loc: Sequence[int | str], data: Mapping[str, Any]) -> str:
    """`stop[2]` for ("stop", "list[str]", 2): of pydantic's path only the parts that the client wrote or left out."""
    text, value = str(loc[0])[:64], data.get(str(loc[0]))
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict):
            text += f".{part[:64]}" if part.isidentifier() else f"[{shown(part)}]"
            value = value.get(part)
    return text
