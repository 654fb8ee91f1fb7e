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

import tokenizers
from tokenizers import AddedToken, models

from penstock.text.tokenizer_check import check_document, read_document

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SETTINGS = (
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


def read_tokenizer_json(data: bytes) -> tuple[tokenizers.Tokenizer, int]:
    """The tokenizer of a tokenizer.json, and 1 + its largest token id. Padding, truncation and dropout are left out.

    Raises:
        ValueError: the file would make the library panic.
        Exception: whatever the library makes of another damaged file.
    """
    document = read_document(data)
    check_document(document)
    with suppress(Exception):  # anything unusual is left to the library, which has the last word on it
        found = _read_bpe(document)
        if found is not None:
            return found
    backend = tokenizers.Tokenizer.from_buffer(data)
    backend.no_padding()
    backend.no_truncation()
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None
    return backend, max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _read_bpe(file: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, int] | None:
    bpe = file["model"]
    if bpe["type"] != "BPE":
        return None
    vocab = bpe["vocab"]
    merges = bpe["merges"]
    added = file.get("added_tokens", [])
    split = isinstance(merges[0], list) if merges else True
    pairs = [tuple(pair) if split else tuple(pair.split(" ")) for pair in merges]
    backend = tokenizers.Tokenizer.from_str(json.dumps({**_EMPTY, **{name: file.get(name) for name in _PARTS}}))
    settings = {name: value for name in _SETTINGS if (value := bpe.get(name)) is not None}
    backend.model = models.BPE(vocab, pairs, **settings)
    names = {token.pop("id"): token["content"] for token in added}
    backend.add_tokens([AddedToken(**token) for token in added])
    if {index: token.content for index, token in backend.get_added_tokens_decoder().items()} != names:
        return None
    return backend, max(max(vocab.values(), default=-1), max(names, default=-1)) + 1


_EMPTY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
)
