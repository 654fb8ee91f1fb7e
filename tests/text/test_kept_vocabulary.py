"""Tables of a vocabulary tell what the library's tokenizer tells, and encode as it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.text.kept_vocabulary import KeptVocabulary, tables_of
from penstock.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import GOLDEN

Build = Callable[[str], Tokenizer]
ODD = ("", "no such token", "\ud800", "\U0010ffff" * 3, "a" * 500)


def again(built: Tokenizer) -> Tokenizer:
    """The tokenizer as another process would have it."""
    kept = built.kept()
    facts = json.loads(json.dumps(kept.facts()))
    tables = {name: memoryview(bytes(data)) for name, data in tables_of(kept.words, kept.size).items()}
    return Tokenizer.from_kept(KeptVocabulary.of(tables, facts, lambda: built.backend))


@pytest.mark.parametrize("name", [*GOLDEN, "concierge", "stories"])
def test_tables_tell_the_same(tokenizer: Build, name: str) -> None:
    built = tokenizer(name)
    kept = again(built)
    ids = range(-2, built.vocab_size + 2)
    pieces = [built.piece(index) for index in ids]
    assert [kept.piece(index) for index in ids] == pieces
    assert [kept.token_bytes(index) for index in ids] == [built.token_bytes(index) for index in ids]
    known = [piece for piece in pieces if piece is not None][::7]
    for piece in (*known, *(piece + "x" for piece in known[::5])):
        assert kept.token_to_id(piece) == built.token_to_id(piece), piece
    assert [kept.token_to_id(text) for text in ODD[:2]] == [built.token_to_id(text) for text in ODD[:2]]
    assert all(kept.token_to_id(text) is None for text in ODD[2:4])
    for fact in ("bos_id", "eos_id", "end_ids", "special_ids", "strip_first", "begins_chats", "vocab_size"):
        assert getattr(kept, fact) == getattr(built, fact)
    assert kept.longest_piece == built.longest_piece


@pytest.mark.parametrize("name", GOLDEN)
def test_texts_are_encoded_and_decoded_alike(shared_data: Path, tokenizer: Build, name: str) -> None:
    base = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    built = tokenizer(name)
    kept = again(built)
    for text in texts:
        ids = built.encode(text)
        assert kept.encode(text) == ids
        assert kept.encode(text, parse_special=False) == built.encode(text, parse_special=False)
        assert kept.decode(ids) == built.decode(ids)
        assert kept.encode_pair(text, "b") == built.encode_pair(text, "b")


def test_nothing_is_built_before_a_text_is_encoded(tokenizer: Build) -> None:
    built, asked = tokenizer("gpt-2"), list[str]()
    kept = built.kept()
    tables = tables_of(kept.words, kept.size)

    def build() -> object:
        asked.append("built")
        return built.backend

    late = Tokenizer.from_kept(KeptVocabulary.of(tables, kept.facts(), build))  # type: ignore[arg-type]
    assert late.decode([31373, 995]) == "hello world"
    assert late.token_to_id("hello") == 31373
    assert asked == []
    assert late.encode("hello world") == [31373, 995]
    assert late.encode("hello") == [31373]
    assert asked == ["built"]
