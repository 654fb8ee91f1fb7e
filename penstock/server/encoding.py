"""Answers as JSON: small ones at once, large ones beside the event loop and piece by piece.

The encoder keeps all other threads waiting until it is done, so what it gets in one go is small.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping

import msgspec
from starlette.responses import Response

_FEW = 2048  # values and hundreds of characters that are encoded in one go: a millisecond at most
_CHARS_A_VALUE = 100
_TOGETHER = 32  # elements of a list that are looked at together


def encode_json(body: object) -> bytes:
    """Compact UTF-8 JSON; a character UTF-8 cannot carry is replaced rather than failing the answer."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON, compact, UTF-8."""
    return _response(encode_json(body), status, headers)


async def json_answer(body: object) -> Response:
    """As `json_response`, for what may be large."""
    return _response(await asyncio.to_thread(joined_json, body) if is_large(body) else encode_json(body))


async def made_answer(make: Callable[[], object]) -> Response:
    """As `json_answer`, for what takes long to make as well."""
    return _response(await asyncio.to_thread(lambda: joined_json(make())))


def _response(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, headers=dict(headers or {}), media_type="application/json")


def is_large(root: object) -> bool:
    """Whether a tree has more than a few values; looks at no more of them than that."""
    left, level = _FEW, [root]
    while level and left > 0:
        item = level.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item) // _CHARS_A_VALUE
        elif isinstance(item, (dict, list, tuple)):
            left -= len(item)
            if left > 0:
                level += item.values() if isinstance(item, dict) else item
                left += len(item)
    return left <= 0


def joined_json(body: object) -> bytes:
    """As `encode_json`, piece by piece, for a thread beside the event loop."""
    return b"".join(_pieces(body))


def _pieces(value: object) -> Iterator[bytes]:
    if not isinstance(value, (dict, list, tuple)) or not is_large(value):
        yield encode_json(value)
    elif isinstance(value, dict):
        before = b"{"
        for name, item in value.items():
            yield before + encode_json(str(name)) + b":"
            yield from _pieces(item)
            before = b","
        yield b"}"
    else:
        before = b"["
        for start in range(0, len(value), _TOGETHER):
            some = value[start : start + _TOGETHER]
            if not is_large(some):
                yield before + encode_json(some)[1:-1]
            else:
                for item in some:
                    yield before
                    yield from _pieces(item)
                    before = b","
            before = b","
        yield b"]"
