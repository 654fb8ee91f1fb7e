"""What clients of Jina, Voyage and NVIDIA's services say of embeddings, under their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from penstock.config.errors import ParameterError, RequestError
from penstock.config.lengths import Truncation
from penstock.server.truncation import CutBody, truncation

_QUERY: Final = ("query", "search_query", "retrieval.query")
_DOCUMENT: Final = ("document", "passage", "search_document", "retrieval.passage")
PROMPT_NAMES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        **{kind: (kind, *_QUERY) for kind in ("search_query", "query", "retrieval.query")},
        **{kind: (kind, *_DOCUMENT) for kind in ("search_document", "document", "passage", "retrieval.passage")},
        "classification": ("classification",),
        "clustering": ("clustering",),
        "separation": ("separation", "clustering"),
        "text-matching": ("text-matching", "sts", "STS"),
        **{
            f"{kind}.{side}": (f"{kind}.{side}", *names)
            for kind in ("code", "nl2code", "qa", "code2code", "code2nl", "code2completion")
            for side, names in (("query", _QUERY), ("passage", _DOCUMENT))
        },
    }
)
"""What services call kinds of texts → names that models have for the prompts before them, the usual ones first."""

Form = Literal["float", "base64", "binary", "ubinary"]


def prompt_of(kind: str, known: Mapping[str, str]) -> str | None:
    """The model's prompt for a kind of texts, None where it has none."""
    return next((name for name in PROMPT_NAMES.get(kind, (kind,)) if name in known), None)


class ForeignEmbeddingBody(CutBody):
    """Fields of Jina's, Voyage's and NVIDIA's clients."""

    task: str | None = None
    input_type: str | None = None
    late_chunking: bool | None = None
    truncation: bool | None = None
    truncate: bool | Literal["NONE", "START", "END"] | None = None
    output_dtype: Literal["float", "binary", "ubinary"] | None = None
    embedding_type: Form | Annotated[list[Form], Field(min_length=1, max_length=1)] | None = None
    output_dimension: int | None = None
    normalized: bool | None = None
    return_multivector: bool | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a body asks for, under one name each.

    Attributes:
        dimensions: of the vectors, None for all.
        normalize: None as the model's files say.
        form: of a vector in the answer.
        prompt_name: the model's prompt that goes before each text; None for its own choice.
        cut: how texts are cut that are too long.
        dimensions_field: the name under which `dimensions` came.
    """

    dimensions: int | None
    normalize: bool | None
    form: Form
    prompt_name: str | None
    cut: Truncation | None
    dimensions_field: str


def wanted(body: Any, prompts: Mapping[str, str]) -> Wanted:
    """What an embedding's body asks for.

    Args:
        body: an EmbeddingBody.
        prompts: the model's, by name.

    Raises:
        RequestError: one thing is said twice and differently, or a kind of texts is not known.
    """
    kind = body.embedding_type[0] if isinstance(body.embedding_type, list) else body.embedding_type
    dimensions = _one(body, {"dimensions": body.dimensions, "output_dimension": body.output_dimension})
    normalize = _one(body, {"normalize": body.normalize, "normalized": body.normalized})
    forms = {"output_dtype": body.output_dtype, "embedding_type": kind, "encoding_format": body.encoding_format}
    if body.output_dtype == "float" or (body.output_dtype is not None and body.encoding_format == "float"):
        forms.pop("output_dtype" if body.encoding_format == "base64" else "encoding_format")
    field = "dimensions" if body.output_dimension is None else "output_dimension"
    form: Form = _one(body, forms) or "float"
    return Wanted(dimensions, normalize, form, _prompt(body, prompts), _cut(body), field)


def _one(body: Any, given: Mapping[str, Any]) -> Any:
    """The value of whichever names were sent, which is one."""
    sent = {name: value for name, value in given.items() if value is not None}
    if len(set(sent.values())) > 1:
        (first, one), (second, other), *_ = sent.items()
        raise RequestError(
            f"{first} is {one!r} and {second} is {other!r}, which are the same here; send one of them.",
            param=first,
            code="invalid_value",
        )
    return next(iter(sent.values()), None)


def _prompt(body: Any, prompts: Mapping[str, str]) -> str | None:
    """The prompt's name, as it was sent or as the kind of texts has it."""
    if body.prompt_name is not None or body.prompt is not None:
        return body.prompt_name if isinstance(body.prompt_name, str) else None
    for field in ("input_type", "task"):
        if (kind := getattr(body, field)) is None:
            continue
        if kind not in PROMPT_NAMES and kind not in prompts:
            allowed = ", ".join(dict.fromkeys((*prompts, *PROMPT_NAMES)))
            raise ParameterError(field, kind, allowed)
        if (name := prompt_of(kind, prompts)) is not None:
            return name
    return None


def _cut(body: Any) -> Truncation | None:
    """How texts are cut: as vLLM's fields say, else as the service's do; to the context unless a number says so."""
    asked = truncation(body)
    if asked is not None:
        return asked
    if body.truncate in (True, "START", "END") or body.truncation is True:
        return Truncation(None, body.truncate == "START", 0)
    return None
