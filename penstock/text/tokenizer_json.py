"""Reads tokenizer.json (https://huggingface.co/docs/tokenizers) quickly.

The library's own reader takes a file apart twice; for byte-pair vocabularies, the largest ones, the vocabulary is
decoded apart here and handed over, and the library reads the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final

import msgspec
import tokenizers
from tokenizers import AddedToken, models


class _File(msgspec.Struct):
    model: msgspec.Raw
    added_tokens: list[dict[str, Any]] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


_SETTINGS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


class _Bpe(msgspec.Struct, tag="BPE"):
    vocab: dict[str, int]
    merges: list[str | tuple[str, str]]
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


def read_tokenizer_json(data: bytes) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer of a tokenizer.json, and 1 + its largest token id. Padding, truncation and dropout are left out.

    Raises:
        Exception: whatever the library makes of a damaged file.
    """
    with suppress(Exception):  # anything unusual is left to the library, which has the last word on it
        found = _read_bpe(data)
        if found is not None:
            return found
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_padding()
    backend.no_truncation()
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None
    return backend, max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _read_bpe(data: bytes) -> tuple[tokenizers.Tokenizer, int] | None:
    file = msgspec.json.decode(data, type=_File)
    bpe = msgspec.json.decode(file.model, type=_Bpe)
    merges: list[Any] = bpe.merges
    if merges and isinstance(merges[0], str):
        merges = [tuple(line.split(" ")) for line in merges]
    parts = {name: msgspec.json.decode(getattr(file, name)) for name in _File.__struct_fields__[2:]}
    backend = tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, **parts}))
    settings = {name: value for name in _SETTINGS if (value := getattr(bpe, name)) is not None}
    backend.model = models.BPE(bpe.vocab, merges, **settings)
    ids = [token.pop("id") for token in file.added_tokens]
    backend.add_tokens([AddedToken(**token) for token in file.added_tokens])
    added = {index: token["content"] for index, token in zip(ids, file.added_tokens, strict=True)}
    if {index: token.content for index, token in backend.get_added_tokens_decoder().items()} != added:
        return None
    return backend, max(max(bpe.vocab.values(), default=-1), max(ids, default=-1)) + 1


_EMPTY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
)
