"""Tokenizers give exactly the ids their models were trained with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import limits
from penstock.config.errors import CheckpointError, RequestError
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.tokenizer import Tokenizer

Build = Callable[[str], Tokenizer]
GOLDEN = [
    "llama-bpe",
    "llama-spm",
    "qwen2",
    "qwen35",
    "gpt-2",
    "phi-3",
    "gemma-4",
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "starcoder",
    "bert-bge",
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.text(" \tab.'\n1é▁", max_size=40)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_ids(shared_data: Path, tokenizer: Build, name: str) -> None:
    base = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    golden = [[int(i) for i in line.split()] for line in Path(f"{base}.out").read_text().splitlines()]
    texts = texts[: len(golden)]
    assert len(texts) == len(golden) >= 40
    built = tokenizer(name)
    assert [built.encode(text, add_special_tokens=False, parse_special=False) for text in texts] == golden
    if name == "bert-bge":  # lower case, without accents and spaces
        words = tokenizers.decoders.WordPiece(cleanup=False)
        for ids in golden:
            assert built.decode(ids, skip_special_tokens=False) == words.decode([str(built.piece(i)) for i in ids])
    else:
        assert [built.decode(ids) for ids in golden] == texts


def sentencepiece_bpe(metadata: Mapping[str, Any], text: str) -> list[int]:
    """The published algorithm, word for word: merge the best-scoring adjacent pair, leftmost first, until none is."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] in (1, 4)}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found.extend([ids[part]] if part in ids else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()])
    return found


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_sentencepiece_merges_follow_the_scores(
    tokenizer: Build, gguf_metadata: Callable[[str], Mapping[str, Any]], text: str
) -> None:
    ids = tokenizer("llama-spm").encode(text, add_special_tokens=False, parse_special=False)
    assert ids == sentencepiece_bpe(gguf_metadata("llama-spm"), text)


@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
@pytest.mark.parametrize("name", ["concierge", "stories"])
def test_a_folder_gives_what_its_tokenizer_json_says(shared_data: Path, tokenizer: Build, name: str, text: str) -> None:
    folder = {"concierge": "penstock-concierge", "stories": "stories260K/hf"}[name]
    oracle = tokenizers.Tokenizer.from_file(str(shared_data / "models" / folder / "tokenizer.json"))
    built = tokenizer(name)
    for special in (True, False):
        ids = oracle.encode(text, add_special_tokens=special).ids
        assert built.encode(text, add_special_tokens=special) == ids
        assert built.decode(ids, skip_special_tokens=special) == oracle.decode(ids, skip_special_tokens=special)


def test_the_files_beginning_and_end_tokens(tokenizer: Build) -> None:
    assert tokenizer("llama-spm").encode("Hello") == [1, 15043]
    assert tokenizer("llama-bpe").encode("Hello")[0] == tokenizer("llama-bpe").bos_id == 128000
    assert tokenizer("qwen2").encode("Hello") == tokenizer("qwen2").encode("Hello", add_special_tokens=False)
    stories = tokenizer("stories")
    assert (stories.bos_id, stories.eos_id, stories.special_ids) == (1, 2, frozenset({0, 1, 2}))
    assert stories.encode("Once upon a time") == [1, 403, 407, 261, 378]
    concierge = tokenizer("concierge")
    assert concierge.bos_id is None
    assert concierge.eos_id == concierge.token_to_id("<|im_end|>")


def test_control_tokens_that_end_answers_are_known_by_name(gguf_metadata: Callable[[str], Mapping[str, Any]]) -> None:
    tokens = ["a", "Ġ", "<|end|>", "<|im_end|>", "<|eot_id|>", "<|other|>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, 1, 3, 3, 1, 3],
        "tokenizer.ggml.eos_token_id": 5,
    }
    assert Tokenizer.from_gguf(metadata).end_ids == {2, 3, 5}
    harmony = {**metadata, "tokenizer.ggml.tokens": [*tokens[:-1], "<|return|>"]}
    assert Tokenizer.from_gguf(harmony).end_ids == {3, 5}
    assert Tokenizer.from_gguf(gguf_metadata("llama-bpe")).end_ids >= {128_001, 128_009}


@pytest.mark.parametrize(
    ("name", "marker"),
    [("concierge", "<|im_end|>"), ("qwen2", "<|im_end|>"), ("gemma-4", "<eos>"), ("stories", "</s>")],
)
def test_control_tokens_in_text_are_read_only_when_asked(tokenizer: Build, name: str, marker: str) -> None:
    built = tokenizer(name)
    control = built.token_to_id(marker)
    assert control in built.special_ids
    text = f"a{marker}b"
    assert control in built.encode(text)
    plain = built.encode(text, parse_special=False)
    assert control not in plain
    assert built.decode(plain) == text
    assert marker not in built.decode(built.encode(text))
    assert marker in built.decode(built.encode(text), skip_special_tokens=False)


@pytest.mark.parametrize("name", ["llama-spm", "gemma-4", "qwen2", "gpt-2", "concierge", "stories"])
def test_token_bytes_are_exact(tokenizer: Build, name: str) -> None:
    built = tokenizer(name)
    text = "Grüße, 世界! 🎉\tno  more\n"
    joined = b"".join(built.token_bytes(i) for i in built.encode(text, add_special_tokens=False))
    assert joined == (b" " if built.strip_first else b"") + text.encode()
    assert built.token_bytes(-1) == built.token_bytes(built.vocab_size) == b""
    assert built.piece(-1) is None
    assert built.piece(built.vocab_size) is None
    assert built.decode([-1, built.vocab_size, 2**40]) == ""
    single = {built.token_bytes(i) for i in range(built.vocab_size)}
    assert {bytes([b]) for b in range(128)} <= single or name == "stories"


def test_byte_tokens_join_to_characters(tokenizer: Build) -> None:
    spm = tokenizer("llama-spm")
    euro = [3 + byte for byte in "€".encode()]
    assert spm.decode(euro) == "€"
    assert spm.decode(euro[:2]) == "\ufffd"
    assert spm.decode([*euro[:2], 15043]) == "\ufffd Hello"


def test_text_that_cannot_be_encoded_is_refused(tokenizer: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer("concierge").encode("\ud800")
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer("concierge").encode("x" * 2000 + "\ud800")
    monkeypatch.setattr(limits, "MAX_PROMPT_CHARS", 10)
    with pytest.raises(RequestError, match="11 characters"):
        tokenizer("concierge").encode("x" * 11)


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Build) -> None:
    found, turns = tokenizer("concierge"), 0
    encoding = threading.Thread(target=found.encode, args=("A table for two in Rome. " * 20_000,))
    encoding.start()
    while encoding.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 2, "the library kept all others waiting"


@pytest.mark.parametrize("name", ["concierge", "llama-spm", "bert-bge"])
def test_long_texts_are_encoded_as_short_ones_are(tokenizer: Build, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found, text = tokenizer(name), "A table for two in Rome, très bien. " * 50
    long = found.encode(text), found.encode_pair(text, "to-morrow")
    monkeypatch.setattr("penstock.text.tokenizer._SHORT_CHARS", 10**6)
    assert (found.encode(text), found.encode_pair(text, "to-morrow")) == long


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"model": 1}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
    ],
)
def test_a_damaged_tokenizer_json_is_a_clean_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_a_damaged_config_is_a_clean_error(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "penstock-concierge" / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    assert Tokenizer.from_folder(tmp_path).eos_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer.from_folder(tmp_path).eos_id == 2
    for content in (b"[]", b"{", b"\xff\xfe\xff", b"[" * 100_000):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


def saved(tmp_path: Path, vocab: dict[str, int], added: list[tokenizers.AddedToken], decoder: str) -> Path:
    """A folder with a small tokenizer.json."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="?"))
    if decoder == "text":
        backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        backend.decoder = tokenizers.decoders.Sequence(steps)
    elif decoder == "bytes":
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
    elif decoder == "pieces":
        backend.decoder = tokenizers.decoders.WordPiece()
    elif decoder == "sounds":
        backend.decoder = tokenizers.decoders.CTC()
    backend.add_tokens(added)
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_added_tokens_keep_their_text(tmp_path: Path) -> None:
    spaces = tokenizers.AddedToken("▁▁", normalized=False)
    text = Tokenizer.from_folder(saved(tmp_path, {"?": 0, "▁": 1, "▁▁": 2, "a": 3}, [spaces], "text"))
    assert text.decode([2, 3]) == "  a"
    marker = tokenizers.AddedToken("<｜é▁｜>", special=True, normalized=False)
    level = Tokenizer.from_folder(saved(tmp_path, {"?": 0, "a": 1, "Ġ": 2}, [marker], "bytes"))
    assert level.encode("a <｜é▁｜>") == [1, 2, 3]
    assert level.decode([1, 2, 3], skip_special_tokens=False) == "a <｜é▁｜>"
    assert level.special_ids == {3}


def test_ids_may_have_gaps(tmp_path: Path) -> None:
    marker = tokenizers.AddedToken("<m>", special=True, normalized=False)
    folder = saved(tmp_path, {"?": 0, "a": 7, "b": 5000}, [marker], "bytes")
    document = json.loads((folder / "tokenizer.json").read_text())
    document["added_tokens"][0]["id"] = 900
    document["model"]["vocab"]["<m>"] = 900
    (folder / "tokenizer.json").write_text(json.dumps(document))
    built = Tokenizer.from_folder(folder)
    assert built.vocab_size == 5001
    for special in (True, False):
        ids = built.encode("ab<m>", parse_special=special)
        assert built.decode(ids, skip_special_tokens=False) == ("ab<m>" if special else "ab???")
    assert built.encode("ab<m>")[-1] == 900
    document["model"]["vocab"]["b"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="token id 4000000000"):
        Tokenizer.from_folder(folder)


def test_an_unknown_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="CTC"):
        Tokenizer.from_folder(saved(tmp_path, {"?": 0, "a": 1}, [], "sounds"))


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=8))
@pytest.mark.parametrize("decoder", ["pieces", "none"])
def test_words_are_joined_as_the_library_joins_them(
    tmp_path_factory: pytest.TempPathFactory, decoder: str, ids: list[int]
) -> None:
    pieces = ["?", "do", "##ing", ".", ",", "not", "n't", "'", "##", "'m"]
    folder = saved(tmp_path_factory.mktemp("words"), {piece: i for i, piece in enumerate(pieces)}, [], decoder)
    oracle = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    built = Tokenizer.from_folder(folder)
    ids = [1, *ids]  # the library does not take the mark off a text's first token
    assert built.decode(ids) == oracle.decode(ids)
    detokenizer = IncrementalDetokenizer(built)
    assert "".join(detokenizer.push([token]).text for token in ids) == oracle.decode(ids)
