"""llama-server's routes of streams whose client has left and comes back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.config import limits
from penstock.server.active_call import EventStream
from penstock.server.auth import owner_of
from penstock.server.body import read_body, read_query
from penstock.server.document import EVENTS, asks, takes
from penstock.server.encoding import json_response
from penstock.server.errors import HttpError, bad_value
from penstock.server.lifecycle import Lifecycle
from penstock.server.resumable import ResumableStream, ResumableStreams
from penstock.server.shapes import Loose, Query

_NEVER_S = 1e9  # comments of its own would move the places of bytes; those of the stream are kept with it
Conversation = Annotated[str, Field(min_length=1, max_length=limits.MAX_CONVERSATION_CHARS)]


class StreamQuery(Query):
    """Which stream, and from which byte on."""

    conv_id: Conversation
    from_: Annotated[int, Field(ge=0, alias="from")] = 0


class StopQuery(Query):
    """Which stream."""

    conv_id: Conversation


class LookupBody(Loose):
    """POST /v1/streams/lookup."""

    conversation_ids: Annotated[list[str], Field(max_length=limits.MAX_RESUMABLE_STREAMS)]


def resumed_router(streams: ResumableStreams, lifecycle: Lifecycle) -> APIRouter:
    """The routes over the streams of this process."""
    router = APIRouter()

    @router.get("/v1/stream", summary="Go on with a stream", openapi_extra=asks(StreamQuery, EVENTS))
    async def resume(request: Request) -> Response:
        query = read_query(StreamQuery, request)
        stream = streams.find(owner_of(request), query.conv_id)
        if stream is None:
            message = "There is no such stream: no answer of this conversation runs, or has ended lately."
            raise HttpError(404, message, param="conv_id", code="stream_not_found")
        if not stream.dropped <= query.from_ <= stream.total:
            raise bad_value("from", query.from_, f"{stream.dropped} to {stream.total}, the bytes that are kept")
        return EventStream(stream.follow(query.from_), None, lifecycle, keepalive_s=_NEVER_S)

    @router.delete("/v1/stream", summary="End a stream", openapi_extra=asks(StopQuery), status_code=204)
    async def stop(request: Request) -> Response:
        streams.stop(owner_of(request), read_query(StopQuery, request).conv_id)
        return Response(status_code=204)

    @router.post("/v1/streams/lookup", summary="Which streams are there", openapi_extra=takes(LookupBody))
    async def lookup(request: Request) -> Response:
        body = await read_body(request, LookupBody, any_type="origin" not in request.headers)
        return json_response([_told(stream) for stream in streams.named(owner_of(request), body.conversation_ids)])

    return router


def _told(stream: ResumableStream) -> dict[str, Any]:
    return {
        "conversation_id": stream.name,
        "is_done": bool(stream.ended),
        "total_bytes": stream.total,
        "started_at": stream.began,
        "completed_at": stream.ended,
    }
