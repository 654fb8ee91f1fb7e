"""Errors as clients see them: OpenAI error objects, with no path, class name or traceback."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from penstock.config.errors import EngineDeadError, OverloadedError, RequestError, TemplateError

_MAX_MESSAGE_CHARS = 600


class HttpError(RequestError):
    """A refusal by the server itself, with its own status and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed its connection; there is nobody left to answer."""


def not_ready(message: str, code: str, retry_after: int = 1) -> HttpError:
    """A 503 that tells the client when to come back (seconds)."""
    return HttpError(503, message, code=code, headers={"Retry-After": str(retry_after)})


def shown(value: object) -> str:
    """A value as it may appear in a message: at most 80 characters, whatever its size."""
    short = reprlib.Repr()
    short.maxlevel, short.maxlist, short.maxdict, short.maxstring, short.maxother, short.maxlong = 2, 4, 3, 70, 70, 40
    text = short.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def bad_value(param: str, value: object, allowed: str, code: str = "invalid_value") -> RequestError:
    """A 400 that names the field, its value and what is allowed."""
    return RequestError(f"{param} is {shown(value)}; allowed: {allowed}.", param=param, code=code)


def error_type(status: int) -> str:
    """OpenAI's `error.type` of an HTTP status."""
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable" if status == 503 else "server_error"


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body every error has."""
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[: _MAX_MESSAGE_CHARS - 3] + "..."
    return {"error": {"message": message, "type": error_type(status), "param": param, "code": code}}


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for an exception; anything unforeseen becomes a 500 that says nothing of its cause."""
    headers: dict[str, str] = {}
    if isinstance(error, HttpError):
        headers = error.headers
    elif isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.retry_after)}
    if isinstance(error, RequestError):
        return error.status, error_object(error.status, str(error), error.param, error.code), headers
    if isinstance(error, TemplateError):
        return 400, error_object(400, str(error), "messages", "template_error"), headers
    if isinstance(error, EngineDeadError):
        message = "The engine is not available at the moment; it restarts by itself. Retry in a few seconds."
        return 503, error_object(503, message, code="engine_unavailable"), {"Retry-After": "2"}
    if isinstance(error, HTTPException):
        return error.status_code, error_object(error.status_code, str(error.detail)), dict(error.headers or {})
    message = "The server met an unexpected error; its log names this request by its X-Request-Id."
    return 500, error_object(500, message, code="internal_error"), headers


def error_response(error: BaseException) -> Response:
    """The HTTP answer to an exception."""
    status, body, headers = describe(error)
    return json_response(body, status, headers)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON, compact, UTF-8."""
    return Response(encode_json(body), status, headers=dict(headers or {}), media_type="application/json")


def encode_json(body: object) -> bytes:
    """Compact UTF-8 JSON; a character UTF-8 cannot carry is replaced rather than failing the answer."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
