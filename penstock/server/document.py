"""The OpenAPI document of the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.server.differences import DIFFERENCES, Difference
from penstock.server.meanings import meaning
from penstock.server.paths import FORMS
from penstock.server.shapes import TOKEN_ID_BOUND
from penstock.server.spoken import ALSO, Dialect, dialect_of

EVENTS = "text/event-stream"
_DIMENSIONS = ("dimensions", "output_dimension")
_LIBRARY = ".ollama.models."
_REF = "#/components/schemas/{model}"
_STATUSES: dict[str, str] = {
    "400": "The request is not acceptable; `error.param` names the field. Beyond what the schema says: fields that "
    "only go together or contradict each other, prompts longer than the context, grammars, schemas and patterns that "
    "cannot be followed, messages that the model's template refuses, and what the model cannot do.",
    "401": "No valid API key.",
    "403": "The Host header is not allowed.",
    "404": "No such route or model.",
    "405": "The route has no such method.",
    "408": "The request came in too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "417": "The request expects something else than 100-continue.",
    "431": "The headers are too large.",
    "500": "The server failed.",
    "501": "The request's body has a transfer coding other than chunked, or the route is not available yet.",
    "503": "Not ready, overloaded or shutting down; see Retry-After.",
}


_TGI_STATUSES: dict[str, str] = {
    "422": "The request is not acceptable, as 400 elsewhere.",
    "424": "The generation failed.",
    "429": "Overloaded; see Retry-After.",
}


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error but those of dialects that have their own below."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong, in Anthropic's API; `details.error_code` says it shortly."""

    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorBody(BaseModel):
    """The body of errors in Anthropic's API."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(BaseModel):
    """The body of errors in the APIs of Ollama and KServe."""

    error: str


class LlamaServerErrorDetail(BaseModel):
    """What went wrong, in llama-server's API: the status as a number."""

    code: int
    message: str
    type: str


class LlamaServerErrorBody(BaseModel):
    """The body of errors in llama-server's API."""

    error: LlamaServerErrorDetail


class TgiErrorBody(BaseModel):
    """The body of errors in TGI's API."""

    error: str
    error_type: str


class SglangErrorDetail(BaseModel):
    """What went wrong, in SGLang's API: the status as a number."""

    message: str
    type: str
    code: int
    retryable: bool


class SglangErrorBody(BaseModel):
    """The body of errors in SGLang's API."""

    error: SglangErrorDetail


class KoboldErrorDetail(BaseModel):
    """What went wrong, in KoboldCpp's API."""

    msg: str
    type: str


class KoboldErrorBody(BaseModel):
    """The body of errors in KoboldCpp's API."""

    detail: KoboldErrorDetail


_ERRORS: Mapping[Dialect, type[BaseModel]] = MappingProxyType(
    {
        Dialect.OPENAI: ErrorBody,
        Dialect.ANTHROPIC: AnthropicErrorBody,
        Dialect.OLLAMA: OllamaErrorBody,
        Dialect.LLAMA_SERVER: LlamaServerErrorBody,
        Dialect.TGI: TgiErrorBody,
        Dialect.SGLANG: SglangErrorBody,
        Dialect.KSERVE: OllamaErrorBody,
        Dialect.KOBOLD: KoboldErrorBody,
    }
)


def takes(model: type[BaseModel], *media_types: str, others: Sequence[type[BaseModel]] = ()) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route that parses its own body, of this shape or another, and what it gives."""
    schema = _one_of(model, *others)
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, **gives("application/json", *media_types)}


def _one_of(*models: type[BaseModel]) -> dict[str, Any]:
    """The schema of what has one of these shapes."""
    schemas = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def asks(model: type[BaseModel], *media_types: str) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route whose query has this shape."""
    shape, parameters = model.model_json_schema(), []
    needed = shape.get("required", ())
    for name, schema in shape["properties"].items():
        kinds = [
            kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"
        ]  # a query string cannot state null
        told = {"name": name, "in": "query", "schema": kinds[0]}
        parameters.append({**told, "required": True} if name in needed else told)
    return {"parameters": parameters, **gives("application/json", *media_types)}


def gives(*media_types: str) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of a route that answers with these media types."""
    return {"responses": {"200": {"content": {media_type: {} for media_type in media_types}}}}


@dataclass(frozen=True, slots=True)
class ServedModelFacts:
    """What the document says of the model that is served.

    Attributes:
        names: what it is called; of many models, what each is.
        called: what Ollama's API takes besides: the same names with and without a tag.
        vocab_size: above every token id; None where models differ.
        templates: names of its chat templates, None where requests may bring their own, or models differ.
        dimensions: of its embeddings; None where models differ.
    """

    names: Sequence[str]
    called: Sequence[str]
    vocab_size: int | None = None
    templates: Sequence[str] | None = None
    dimensions: int | None = None


def openapi(
    app: FastAPI, models: Sequence[type[BaseModel]], facts: ServedModelFacts, *, secured: bool
) -> dict[str, Any]:
    """The document of an app's routes.

    Args:
        app: whose.
        models: the bodies `takes` refers to.
        facts: of the model.
        secured: keys are asked for.
    """
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    shapes: list[tuple[type[BaseModel], Literal["validation"]]] = [(model, "validation") for model in models]
    shapes += [(model, "validation") for model in _ERRORS.values()]
    _, schemas = models_json_schema(shapes, ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas["$defs"])
    for model in models:
        schema = components["schemas"][model.__name__]
        if _LIBRARY not in model.__module__:  # whose bodies name models that are not there yet, or no more
            _tell(schema, facts, ".ollama." in model.__module__)
        for field, difference in DIFFERENCES.get(model.__name__, {}).items():
            schema["properties"][field] = _harmless(difference)
    for name, schema in components["schemas"].items():
        for field, about in schema.get("properties", {}).items():
            if (told := meaning(name, field)) is not None:
                about["description"] = told
    _bound(components["schemas"], TOKEN_ID_BOUND if facts.vocab_size is None else facts.vocab_size)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            spoken = (dialect_of(path, method.upper()), *ALSO.get(path, ()))
            failure = {"application/json": {"schema": _one_of(*(_ERRORS[dialect] for dialect in spoken))}}
            _tell_places(operation, path)
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model" and parameter["in"] == "path":
                    parameter["schema"] = {"enum": list(facts.names)}
                elif parameter["name"] == "version":
                    parameter["schema"] = {"enum": ["1"]}
                elif parameter["name"] in FORMS:
                    parameter["schema"] = {"type": "string", "pattern": FORMS[parameter["name"]]}
            operation["responses"].pop("422", None)
            for status, about in (_STATUSES | (_TGI_STATUSES if Dialect.TGI in spoken else {})).items():
                operation["responses"].setdefault(status, {"description": about, "content": failure})
    if secured:
        key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}, "key": key}
        document["security"] = [{"bearer": []}, {"key": []}]
    return document


def _tell_places(operation: dict[str, Any], path: str) -> None:
    """Tells of the parts of a path that its function does not ask for, as a document has to."""
    told = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
    for name in re.findall(r"\{(\w+)\}", path):
        if name not in told:
            place = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            operation.setdefault("parameters", []).append(place)


def _harmless(difference: Difference) -> dict[str, Any]:
    """The JSON schema of a field that does nothing: the values that are taken."""
    return {} if difference.harmless is None else {"enum": [*difference.harmless, None]}


def _tell(schema: dict[str, Any], facts: ServedModelFacts, ollama: bool) -> None:
    """Says of a body's fields what they may be with this model."""
    names = list(facts.called if ollama else facts.names)
    if "name" in schema.get("properties", {}):  # one of the two may be empty
        names.append("")
    allowed: dict[str, dict[str, Any]] = {"model": {"enum": names}, "name": {"enum": names}}
    if facts.dimensions is not None:
        allowed |= {field: {"type": "integer", "minimum": 1, "maximum": facts.dimensions} for field in _DIMENSIONS}
    if facts.templates is not None:
        allowed["chat_template"] = {"enum": list(facts.templates)}
    for field, about in allowed.items():
        given = schema.get("properties", {}).get(field)
        if given is not None:
            null = {"type": "null"} in given.get("anyOf", ())
            kept = {key: given[key] for key in ("title", "default") if key in given}
            schema["properties"][field] = kept | ({"anyOf": [about, {"type": "null"}]} if null else about)


def _bound(schema: Any, vocab_size: int) -> None:
    """Bounds token ids by the vocabulary, and objects whose members' names follow a pattern to such names."""
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, (dict, list)):
            _bound(inner, vocab_size)
    if isinstance(schema, dict):
        if "patternProperties" in schema:
            schema["additionalProperties"] = False
        if schema.get("exclusiveMaximum") == TOKEN_ID_BOUND:
            schema["exclusiveMaximum"] = vocab_size
