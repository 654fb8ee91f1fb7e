"""The gRPC service itself."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import grpc

from penstock.config import limits
from penstock.config.errors import ConfigError, PenstockError
from penstock.server.kserve_grpc.inside import Answer, Asking, Header, events
from penstock.server.kserve_grpc.messages import SERVICE, message
from penstock.server.kserve_grpc.translate import (
    failed,
    final_answer,
    infer_answer,
    infer_body,
    parsed,
    stream_body,
    streamed_answer,
    text_of,
    wants_empty_final,
    whole_answer,
)

log = logging.getLogger("penstock.server")
MAX_MESSAGE_BYTES: Final = 4 * 2**20
"""Of one request, gRPC's own default; prompts of models served here are shorter."""
_INLINE_BYTES: Final = 16_384  # smaller messages are read at once
_HEAD: Final = b"inference-header-content-length"
_PASSED_ON: Final = ("authorization", "x-api-key", "x-request-id", "traceparent", "x-request-timeout")
_GRACE_S: Final = 1.0
_CODES: Final[Mapping[int, grpc.StatusCode]] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
Context = Any
"""grpc.aio.ServicerContext, whose types are not published."""


class KserveGrpc:
    """Answers calls by the routes below /v2 of an application."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    def handler(self) -> grpc.GenericRpcHandler:
        """What grpc.aio needs to know of the service."""
        unary = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
        }
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                call,
                request_deserializer=message(f"{name}Request").FromString,
                response_serializer=message(f"{name}Response").SerializeToString,
            )
            for name, call in unary.items()
        }
        # Messages of tensors are read beside the event loop, once it is known how much is in them.
        methods["ModelInfer"] = grpc.unary_unary_rpc_method_handler(
            self.infer, response_serializer=message("ModelInferResponse").SerializeToString
        )
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self.stream_infer, response_serializer=message("ModelStreamInferResponse").SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def server_live(self, asked: Any, context: Context) -> Any:
        status, _ = await self._get("/v2/health/live", context)
        return message("ServerLiveResponse")(live=status == 200)

    async def server_ready(self, asked: Any, context: Context) -> Any:
        status, _ = await self._get("/v2/health/ready", context)
        return message("ServerReadyResponse")(ready=status == 200)

    async def server_metadata(self, asked: Any, context: Context) -> Any:
        told = await self._known("/v2", context)
        return message("ServerMetadataResponse")(**told)

    async def model_ready(self, asked: Any, context: Context) -> Any:
        status, told = await self._get(f"{_model(asked.name, asked.version)}/ready", context)
        if status not in (200, 503):
            await _refuse(context, status, told)
        return message("ModelReadyResponse")(ready=status == 200)

    async def model_metadata(self, asked: Any, context: Context) -> Any:
        told = await self._known(_model(asked.name, asked.version), context)
        return message("ModelMetadataResponse")(**told)

    async def infer(self, raw: bytes, context: Context) -> Any:
        """ModelInfer."""
        try:
            asked = await _read(raw)
            body, head = infer_body(asked)
        except PenstockError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text_of(error))
        answer = await self._inferred(asked, body, head, context)
        if isinstance(answer, tuple):
            await _refuse(context, *answer)
        return answer

    async def stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[Any]:
        """ModelStreamInfer: one request after the other, each with its answers."""
        async for raw in requests:
            try:
                asked = await _read(raw)
                body = stream_body(asked)
            except PenstockError as error:
                yield failed(text_of(error))
                continue
            if body is None:
                answer = await self._inferred(asked, *infer_body(asked), context)
                yield failed(answer[1]) if isinstance(answer, tuple) else whole_answer(answer)
                continue
            async for told in self._streamed(asked, body, context):
                yield told

    async def _streamed(self, asked: Any, body: bytes, context: Context) -> AsyncIterator[Any]:
        path = f"{_model(asked.model_name, asked.model_version)}/generate_stream"
        headers = [*_headers(context), (b"content-type", b"application/json")]
        last: dict[str, Any] = {}
        async with Asking(self._app, "POST", path, headers, body, _peer(context)) as answer:
            if answer.status != 200:
                yield failed(await _text(answer))
                return
            async for event in events(answer):
                last = event
                yield streamed_answer(event)
        if wants_empty_final(asked) and "error" not in last:
            yield final_answer(last)

    async def _inferred(self, asked: Any, body: bytes, head: int, context: Context) -> Any:
        """A ModelInferResponse, or the HTTP status and text of a refusal."""
        path = f"{_model(asked.model_name, asked.model_version)}/infer"
        own = [(b"content-type", b"application/octet-stream"), (_HEAD, str(head).encode())]
        async with Asking(self._app, "POST", path, [*_headers(context), *own], body, _peer(context)) as answer:
            if answer.status != 200:
                return answer.status, await _text(answer)
            told = await answer.body()
            return infer_answer(told, int(answer.header(_HEAD) or len(told)))

    async def _known(self, path: str, context: Context) -> Any:
        status, told = await self._get(path, context)
        if status != 200:
            await _refuse(context, status, told)
        return json.loads(told)

    async def _get(self, path: str, context: Context) -> tuple[int, str]:
        async with Asking(self._app, "GET", path, _headers(context), client=_peer(context)) as answer:
            if answer.status != 200:
                return answer.status, await _text(answer)
            return 200, (await answer.body()).decode()


async def _read(raw: bytes) -> Any:
    return parsed(raw) if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(parsed, raw)


async def _text(answer: Answer) -> str:
    """What an error of the HTTP routes says."""
    return str(json.loads(await answer.body())["error"])


async def _refuse(context: Context, status: int, text: str) -> None:
    await context.abort(_CODES.get(status, grpc.StatusCode.INTERNAL), text)


def _model(name: str, version: str) -> str:
    return f"/v2/models/{name}/versions/{version}" if version else f"/v2/models/{name}"


def _headers(context: Context) -> Sequence[Header]:
    """What a client says beside its message: its key, an id, and how long it waits."""
    given = dict(context.invocation_metadata() or ())
    headers = [(name, given[name]) for name in _PASSED_ON if isinstance(given.get(name), str)]
    left = context.time_remaining()
    if left is not None and "x-request-timeout" not in given:
        headers.append(("x-request-timeout", f"{max(left, 0.001):.3f}"))
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers]


def _peer(context: Context) -> tuple[str, int] | None:
    """The client's address; None for one that has none."""
    kind, _, rest = unquote(str(context.peer())).partition(":")
    host, _, port = rest.rpartition(":")
    return (host.strip("[]"), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


async def start(app: Callable[..., Any], host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """Listens for calls.

    Args:
        app: the HTTP application that answers them.
        host, port: where; port 0 lets the system choose.

    Returns:
        The server and its port.

    Raises:
        ConfigError: the address cannot be used.
    """
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", limits.MAX_BODY_BYTES),
        ("grpc.max_metadata_size", limits.MAX_HEADER_BYTES),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=limits.MAX_QUEUED_REQUESTS)
    server.add_generic_rpc_handlers((KserveGrpc(app).handler(),))
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
        await server.start()
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"--grpc-port: cannot listen on {address}: {error}. Choose another port.") from None
    return server, bound


async def stop(server: grpc.aio.Server) -> None:
    """Ends what is left of calls."""
    await server.stop(_GRACE_S)
