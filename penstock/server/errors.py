"""Errors as clients see them: in the shape of the dialect they speak, with no path, class name or traceback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from penstock.config.errors import (
    AbortedError,
    EngineDeadError,
    ModelUnavailableError,
    OverloadedError,
    RequestError,
    TemplateError,
    format_value,
)
from penstock.server.encoding import json_response
from penstock.server.error_shapes import Failure, body_in, status_in
from penstock.server.spoken import Dialect, dialect_of_scope

REQUEST_ID = "penstock.request_id"
"""Key of a request's id in its ASGI scope."""
Unavailable = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields of a body, the values of each that change nothing, and what to do instead of any other."""


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


def failure_of(error: BaseException) -> Failure:
    """What to tell of an exception; anything unforeseen becomes a 500 that says nothing of its cause."""
    if isinstance(error, RequestError):
        headers: Mapping[str, str] = error.headers if isinstance(error, HttpError) else {}
        if isinstance(error, (AbortedError, OverloadedError, ModelUnavailableError)):
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
    dialect = Dialect.OPENAI if scope is None else dialect_of_scope(scope)
    body = body_in(dialect, failure, str((scope or {}).get(REQUEST_ID, "")))
    return status_in(dialect, failure), body, dict(failure.headers)


def error_response(error: BaseException, scope: Scope) -> Response:
    """The HTTP answer to an exception."""
    status, body, headers = describe(error, scope)
    return json_response(body, status, headers)
