"""Errors as clients see them: in the shape of the dialect they speak, with no path, class name or traceback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from penstock.config.errors import (
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
    TemplateError,
    format_value,
)
from penstock.server.encoding import json_response

REQUEST_ID = "penstock.request_id"
"""Key of a request's id in its ASGI scope."""
_MAX_MESSAGE_CHARS = 600
Unavailable = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields of a body, the values of each that change nothing, and what to do instead of any other."""


class Dialect(str, Enum):
    """Whose API a route follows, which decides what its errors look like."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def dialect_of(path: str) -> Dialect:
    """The dialect of a path, whether or not there is such a route."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return Dialect.ANTHROPIC
    ollama = path == "/" or (path.startswith("/api/") and not path.startswith("/api/v1/"))  # which is LM Studio's
    return Dialect.OLLAMA if ollama else Dialect.OPENAI


def dialect_of_scope(scope: Scope) -> Dialect:
    """The dialect of a request: that of its path; of the list of models, which two have, the one its headers name."""
    path = str(scope["path"])
    if path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope):
        return Dialect.ANTHROPIC
    return dialect_of(path)


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


def bad_value(param: str, value: object, allowed: str, code: str = "invalid_value") -> RequestError:
    """A 400 that names the field, its value and what is allowed."""
    return RequestError(f"{param} is {format_value(value)}; allowed: {allowed}.", param=param, code=code)


def refuse_unavailable(body: object, unavailable: Unavailable) -> None:
    """Raises RequestError for a field of a body that asks for what is not served."""
    for name, (harmless, remedy) in unavailable.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise RequestError(f"{name} is {format_value(value)}. {remedy}", param=name, code="unsupported_parameter")


def error_type(status: int) -> str:
    """OpenAI's `error.type` of an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable" if status == 503 else "server_error"


def error_object(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body an error has in OpenAI's API."""
    return {"error": {"message": _cut(message), "type": error_type(status), "param": param, "code": code}}


_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[: _MAX_MESSAGE_CHARS - 3] + "..."


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told of an error, whatever its dialect."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def _named(failure: Failure) -> str:
    """The message with the field it is about, for shapes that have no other place for it."""
    field, message = failure.param, failure.message
    return _cut(message if field is None or field in message else f"{field}: {message}")


def _openai(failure: Failure, request_id: str) -> dict[str, Any]:
    return error_object(failure.status, failure.message, failure.param, failure.code)


def _anthropic(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": _named(failure)}
    if failure.code is not None:
        error["details"] = {"error_code": failure.code}
    return {"type": "error", "error": error, "request_id": request_id}


def _ollama(failure: Failure, request_id: str) -> dict[str, Any]:
    return {"error": _named(failure)}


_SHAPES: Mapping[Dialect, Callable[[Failure, str], dict[str, Any]]] = MappingProxyType(
    {Dialect.OPENAI: _openai, Dialect.ANTHROPIC: _anthropic, Dialect.OLLAMA: _ollama}
)


def failure_of(error: BaseException) -> Failure:
    """What to tell of an exception; anything unforeseen becomes a 500 that says nothing of its cause."""
    if isinstance(error, RequestError):
        headers: Mapping[str, str] = error.headers if isinstance(error, HttpError) else {}
        if isinstance(error, (OverloadedError, ModelUnavailableError)):
            headers = {"Retry-After": str(error.retry_after)}
        return Failure(error.status, str(error), error.param, error.code, headers)
    if isinstance(error, TemplateError):
        return Failure(400, str(error), "messages", "template_error")
    if isinstance(error, EngineDeadError):
        message = "The engine is not available at the moment; it restarts by itself. Retry in a few seconds."
        return Failure(503, message, code="engine_unavailable", headers={"Retry-After": "2"})
    if isinstance(error, HTTPException):
        return Failure(error.status_code, str(error.detail), headers=error.headers or {})
    message = "The server met an unexpected error; its log names this request by its X-Request-Id."
    return Failure(500, message, code="internal_error")


def code_of(error: BaseException) -> str:
    """A word for an exception, as clients are told it."""
    return failure_of(error).code or "http_error"


def describe(error: BaseException, scope: Scope | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers for an exception, in the dialect of the request (OpenAI's without a scope)."""
    failure = failure_of(error)
    shape = _SHAPES[Dialect.OPENAI if scope is None else dialect_of_scope(scope)]
    return failure.status, shape(failure, str((scope or {}).get(REQUEST_ID, ""))), dict(failure.headers)


def error_response(error: BaseException, scope: Scope) -> Response:
    """The HTTP answer to an exception."""
    status, body, headers = describe(error, scope)
    return json_response(body, status, headers)
