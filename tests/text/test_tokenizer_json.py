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
    found = _read_bpe(json.loads(data))
    assert found is not None
    backend, size = found
    assert state(backend) == state(tokenizers.Tokenizer.from_buffer(data))
    assert size == max(backend.get_vocab(with_added_tokens=True).values()) + 1


def test_added_tokens_beyond_the_vocabulary_keep_their_ids_or_the_library_reads_them() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens([tokenizers.AddedToken("<x>", lstrip=True), tokenizers.AddedToken("<y>")])
    document = state(backend)
    data = json.dumps(document).encode()
    assert _read_bpe(json.loads(data)) is not None
    document["added_tokens"][1]["id"] = 9
    gap = json.dumps(document).encode()
    assert _read_bpe(json.loads(gap)) is None
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


normal, decoders = tokenizers.normalizers, tokenizers.decoders
PARTS: list[tuple[str, Any]] = [
    ("normalizer", normal.BertNormalizer()),
    (
        "normalizer",
        normal.Sequence([normal.NFKD(), normal.Lowercase()]),
    ),
    ("normalizer", normal.NFC()),
    ("normalizer", normal.NFD()),
    ("normalizer", normal.NFKC()),
    ("normalizer", normal.Nmt()),
    ("normalizer", normal.Prepend("\u2581")),
    ("normalizer", normal.Replace(tokenizers.Regex("[ab]+"), "\u00e9\U0001f389")),
    ("normalizer", normal.Strip(left=True, right=False)),
    ("normalizer", normal.StripAccents()),
    ("normalizer", normal.ByteLevel()),
    ("pre_tokenizer", tokenizers.pre_tokenizers.BertPreTokenizer()),
    ("pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ("pre_tokenizer", tokenizers.pre_tokenizers.CharDelimiterSplit("a")),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Digits(individual_digits=True)),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Punctuation("contiguous")),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\d{1,3}(?=(?:\d{3})*\b)"), "removed")),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Split("b", "merged_with_next", invert=True)),
    ("pre_tokenizer", tokenizers.pre_tokenizers.UnicodeScripts()),
    ("pre_tokenizer", tokenizers.pre_tokenizers.Whitespace()),
    ("pre_tokenizer", tokenizers.pre_tokenizers.WhitespaceSplit()),
    ("post_processor", tokenizers.processors.BertProcessing(("b", 1), ("a", 0))),
    ("post_processor", tokenizers.processors.RobertaProcessing(("b", 1), ("a", 0))),
    ("post_processor", tokenizers.processors.TemplateProcessing("b $A a", "b $A a $B", [("a", 0), ("b", 1)])),
    ("post_processor", tokenizers.processors.ByteLevel(trim_offsets=False)),
    ("decoder", decoders.ByteLevel()),
    ("decoder", decoders.Metaspace(prepend_scheme="never")),
    ("decoder", decoders.WordPiece(prefix="##", cleanup=False)),
    (
        "decoder",
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    ),
    ("decoder", decoders.BPEDecoder(suffix="</w>")),
    ("decoder", decoders.CTC()),
]
TEXT = "  Abba 1234567 éß\u0301 中文!? a-b\tﬁ "


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_every_part_of_the_library_is_kept(name: str, part: Any) -> None:
    vocab = {char: index for index, char in enumerate("ab123 é中!\u2581Ġ")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="a"))
    setattr(backend, name, part)
    found = _read_bpe(json.loads(backend.to_str()))
    assert found is not None
    assert state(found[0]) == state(backend)
    assert found[0].encode(TEXT).ids == backend.encode(TEXT).ids
    assert found[0].decode([0, 1, 9, 2], skip_special_tokens=False) == backend.decode([0, 1, 9, 2])
