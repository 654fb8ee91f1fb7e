"""tokenizer.json read apart is what the library reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.text.tokenizer_json import _read_bpe, read_tokenizer_json

FOLDERS = ["penstock-concierge", "stories260K/hf"]


def state(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(backend.to_str())
    return document


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_byte_pair_vocabulary_is_read_apart_to_the_same_tokenizer(
    shared_data: Path, folder: str, pairs: bool
) -> None:
    document = json.loads((shared_data / "models" / folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = document["model"]
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    model["merges"] = merges if pairs else [" ".join(pair) for pair in merges]
    document["truncation"] = document["padding"] = None
    data = json.dumps(document).encode()
    found = _read_bpe(data)
    assert found is not None
    backend, size = found
    assert state(backend) == state(tokenizers.Tokenizer.from_buffer(data))
    assert size == max(backend.get_vocab(with_added_tokens=True).values()) + 1


def test_added_tokens_beyond_the_vocabulary_keep_their_ids_or_the_library_reads_them() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens([tokenizers.AddedToken("<x>", lstrip=True), tokenizers.AddedToken("<y>")])
    document = state(backend)
    data = json.dumps(document).encode()
    assert _read_bpe(data) is not None
    document["added_tokens"][1]["id"] = 9
    gap = json.dumps(document).encode()
    assert _read_bpe(gap) is None
    read, size = read_tokenizer_json(gap)
    assert state(read) == state(tokenizers.Tokenizer.from_buffer(gap))
    assert size == max(read.get_vocab(with_added_tokens=True).values()) + 1


def test_padding_truncation_and_dropout_are_left_out() -> None:
    for model in (
        tokenizers.models.BPE({"a": 0}, [], dropout=0.5),
        tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}),
        tokenizers.models.Unigram([("a", 0.0)], 0),
    ):
        backend = tokenizers.Tokenizer(model)
        backend.enable_padding()
        backend.enable_truncation(1)
        read, size = read_tokenizer_json(backend.to_str().encode())
        document = state(read)
        assert document["padding"] is document["truncation"] is None
        assert not document["model"].get("dropout")
        assert size == read.get_vocab_size()
