"""What the body of an error is in each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.server.spoken import Dialect

_MAX_MESSAGE_CHARS = 600
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
_LLAMA_SERVER_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        501: "not_supported_error",
        503: "unavailable_error",
    }
)
_TGI_TYPES: Mapping[int, str] = MappingProxyType({424: "generation", 429: "overloaded", 503: "healthcheck"})


@dataclass(frozen=True, slots=True)
class Failure:
    """What a client is told of an error, whatever its dialect."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


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


def status_in(dialect: Dialect, failure: Failure) -> int:
    """The HTTP status of a failure, which is another than ours in some dialects."""
    if dialect is Dialect.TGI:
        return 424 if failure.code == "generation_failed" else 422 if failure.status == 400 else failure.status
    return failure.status


def body_in(dialect: Dialect, failure: Failure, request_id: str) -> dict[str, Any]:
    """The body that tells of a failure."""
    return _SHAPES[dialect](failure, request_id)


def _cut(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE_CHARS else message[: _MAX_MESSAGE_CHARS - 3] + "..."


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
    """KServe's too."""
    return {"error": _named(failure)}


def _llama_server(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = _LLAMA_SERVER_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "server_error")
    if failure.code == "context_length_exceeded":
        kind = "exceed_context_size_error"
    return {"error": {"code": failure.status, "message": _named(failure), "type": kind}}


def _tgi(failure: Failure, request_id: str) -> dict[str, Any]:
    status = status_in(Dialect.TGI, failure)
    kind = _TGI_TYPES.get(status, "validation" if status < 500 else "generation")
    return {"error": _named(failure), "error_type": kind}


def _sglang(failure: Failure, request_id: str) -> dict[str, Any]:
    told = {"type": error_type(failure.status), "code": failure.status}
    return {"error": {"message": _named(failure), **told, "retryable": failure.status in (429, 503)}}


def _kobold(failure: Failure, request_id: str) -> dict[str, Any]:
    kind = {400: "bad_input", 503: "service_unavailable"}.get(failure.status, error_type(failure.status))
    return {"detail": {"msg": _named(failure), "type": kind}}


_SHAPES: Mapping[Dialect, Callable[[Failure, str], dict[str, Any]]] = MappingProxyType(
    {
        Dialect.OPENAI: _openai,
        Dialect.ANTHROPIC: _anthropic,
        Dialect.OLLAMA: _ollama,
        Dialect.LLAMA_SERVER: _llama_server,
        Dialect.TGI: _tgi,
        Dialect.SGLANG: _sglang,
        Dialect.KSERVE: _ollama,
        Dialect.KOBOLD: _kobold,
    }
)
