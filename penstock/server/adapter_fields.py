"""Adapters as fields of bodies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.config import limits
from penstock.server.shapes import Exact, RequestBody

MOST_SCALES = 1024  # of a body: of those that count a request has few


class AdapterScale(Exact):
    """How much of an adapter counts."""

    id: int
    scale: float


class AdapterBody(RequestBody):
    """Bodies that may name adapters by their numbers, as llama-server's clients do."""

    lora: Annotated[list[AdapterScale], Field(max_length=MOST_SCALES)] | None = None


class NamedAdapterBody(AdapterBody):
    """Bodies that may also name one adapter beside their model, as SGLang's clients do."""

    lora_path: Annotated[str, Field(max_length=limits.MAX_MODEL_NAME_CHARS)] | None = None
