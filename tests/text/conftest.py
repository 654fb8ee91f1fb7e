"""Vocabularies for the text tests, each read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.text.tokenizer import Tokenizer
from penstock.weights.readers.gguf_file import read_gguf_file


@pytest.fixture(scope="session")
def gguf_metadata(shared_data: Path) -> Callable[[str], Mapping[str, Any]]:
    """Metadata of a vocabulary file by name, for example "llama-spm"."""

    @cache
    def read(name: str) -> Mapping[str, Any]:
        return read_gguf_file(shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf").metadata

    return read


@pytest.fixture(scope="session")
def tokenizer(shared_data: Path, gguf_metadata: Callable[[str], Mapping[str, Any]]) -> Callable[[str], Tokenizer]:
    """A tokenizer by name: "concierge" and "stories" from tokenizer.json, all others from GGUF metadata."""
    folders = {"concierge": "penstock-concierge", "stories": "stories260K/hf"}

    @cache
    def build(name: str) -> Tokenizer:
        if name in folders:
            return Tokenizer.from_folder(shared_data / "models" / folders[name])
        return Tokenizer.from_gguf(gguf_metadata(name))

    return build
