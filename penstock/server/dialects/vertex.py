"""Vertex AI's prediction route, as SGLang has it: instances in, predictions out, over SGLang's own route."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.server.body import read_body
from penstock.server.dialects.sagemaker import HandedOver
from penstock.server.document import takes
from penstock.server.encoding import encode_json
from penstock.server.errors import bad_value
from penstock.server.shapes import STRING, Loose, an_object

_KEYS: Final = ("text", "input_ids")
_MEDIA: Final = ("image_data", "input_embeds")


class VertexBody(Loose):
    """POST /vertex_generate: texts or token ids, an instance each, and SGLang's other fields under `parameters`."""

    instances: Annotated[
        list[dict[str, Any]],
        Field(min_length=1, max_length=limits.MAX_PROMPTS_PER_CALL),
        WithJsonSchema({"type": "array", "items": an_object({"text": {**STRING, "minLength": 1}}), "minItems": 1}),
    ]
    parameters: Annotated[dict[str, Any] | None, WithJsonSchema({"type": "object", "maxProperties": 0})] = None


class _Predictions(HandedOver):
    """The answer of SGLang's route as predictions; errors as they are."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = list[bytes]()
        begun: Message | None = None

        async def wrapped(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and message["status"] == 200:
                begun = message
            elif begun is None:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = b'{"predictions":' + b"".join(parts) + b"}"
                    kept = [pair for pair in begun["headers"] if pair[0].lower() != b"content-length"]
                    headers = [*kept, (b"content-length", str(len(body)).encode())]
                    await send({**begun, "headers": headers})
                    await send({"type": "http.response.body", "body": body})

        await super().__call__(scope, receive, wrapped)


def vertex_router() -> APIRouter:
    """The route, which hands its bodies to POST /generate."""
    router = APIRouter()

    @router.post("/vertex_generate", summary="Continue instances, as Vertex AI", openapi_extra=takes(VertexBody))
    async def vertex_generate(request: Request) -> Response:
        body = await read_body(request, VertexBody)
        parameters = body.parameters or {}
        if parameters.get("stream"):
            raise bad_value("parameters.stream", True, "false; predictions are told whole")
        if clash := next((name for name in (*_KEYS, *_MEDIA, "inputs") if name in parameters), None):
            raise bad_value(f"parameters.{clash}", parameters[clash], "nothing; instances have it")
        return _Predictions(request, "/generate", encode_json({**parameters, **_inputs(body.instances)}))

    return router


def _inputs(instances: list[dict[str, Any]]) -> dict[str, Any]:
    """The instances' texts or token ids, which all have the same.

    Raises:
        RequestError: they have neither, or not all the same, or media.
    """
    for place, instance in enumerate(instances):
        if media := next((name for name in _MEDIA if instance.get(name) is not None), None):
            raise bad_value(f"instances[{place}].{media}", "media", "texts or token ids alone")
    key = next((name for name in _KEYS if instances[0].get(name) is not None), None)
    if key is None or not all(instance.get(key) is not None for instance in instances):
        told = "instances must all have text, or all input_ids."
        raise RequestError(told, param="instances", code="invalid_value")
    return {key: [instance[key] for instance in instances]}
