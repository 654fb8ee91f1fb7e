"""Vocabularies without tokenizer.json: SentencePiece models, unigram and byte-pair, tekken.json, tiktoken files."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.errors import CheckpointError
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.spelling import CHAR_OF_BYTE, Kind, Spelling
from penstock.text.tokenizer import Tokenizer

Read = Callable[[str], Mapping[str, Any]]
Piece = tuple[str, float, int]  # text, score, type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text("the wolf,  an\tdé▁Ａ\n", max_size=40)

# Made by SentencePiece 0.2.3 from rules that write Ａ, Ｂ and ﬁ as A, B and fi, A with a ring as Å, U+3000 and
# U+00A0 as spaces, and leave U+200B out.
CHARSMAP = zlib.decompress(
    base64.b64decode(
        b"eNod0wmwjlUYAOC3H9NoxkwzKUS2yHZJFNmqSwuyJfuaykWWrKlIv4bSvdZQturexk5jDyUqleLaKVrs+1qWSot6/r6ZZ94z57xnvu+c9/0ib3"
        b"huiPS6eSI3LRGZd0TcFJHMLpCajWTy5kRk5UvlGOdNRPK+iMWRiJHWbzSXh5xXIqQkb5H0Qf6IW8WCFOI2ilCYotzOupWJKCaWoDilKMmdlKYs"
        b"ZSjHXVSgPJWoSGXSuJsq3ENVqlMNnxj3UpMa1OJ+6lCbetTlQR4gnYdoQH0e4WEe41Ea0ZDHaUxTmtCcZjxBC56kJa1pRVva0J52dKQDnelEV7"
        b"rQjad4hqfpzrP0IINe9KQ3z9GXPjxPPwbQn0EMZAiDGcoLvMSLDONllCuG8yojGJkqLl/MinhNHM0o3uB13mQMWWQyjrFMYDyTmMhk3mIqU3iH"
        b"t5nONGYyg3fxqnif98ghmyM2HZ0dMcdYiHnMZQHzWcRCPoxUD0Ys4aJCLhOXsoLlrGIlq/mItazhEz7m01QPsoH1fM5nbEzdAV/xJZv4mm/5hi"
        b"1sZiu5bGcbO9nBbnaxlz18z3fsZx8/8gM/8xMHOcBhDnE0dQcc5xgnOcFpTnGWM5znXOrsXOBXfuEyl7jKFX7nN67xB3/xJ//wN/9yPf7/+dI1"
        b"fkav2Dg6/gOHuZFE"
    )
)


def varint(number: int) -> bytes:
    """A number as Protocol Buffers write it."""
    data = bytearray()
    number &= 2**64 - 1
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def entry(field: int, value: int | float | bytes) -> bytes:
    """A field of a message."""
    if isinstance(value, bytes):
        return varint(field << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(field << 3 | 5) + struct.pack("<f", value)
    return varint(field << 3) + varint(value)


def sentencepiece(
    pieces: Sequence[Piece], model_type: int, *, charsmap: bytes = b"", prefix: bool = True, tidy: bool = False
) -> bytes:
    """A SentencePiece model file."""
    found = b"".join(
        entry(1, entry(1, text.encode()) + entry(2, float(score)) + entry(3, kind)) for text, score, kind in pieces
    )
    trainer = entry(3, model_type) + entry(40, 0) + entry(41, 1) + entry(42, 2) + entry(43, -1)
    normalizer = entry(2, charsmap) + entry(3, int(prefix)) + entry(4, int(tidy)) + entry(5, 1)
    return found + entry(2, trainer) + entry(3, normalizer)


def folder(path: Path, name: str, data: bytes, **config: Any) -> Tokenizer:
    """The tokenizer of a folder with one vocabulary file."""
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(data)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(path)


@pytest.fixture(scope="module")
def trained(shared_data: Path) -> list[Piece]:
    """A unigram vocabulary of 400 pieces, with control tokens and a token for each byte."""
    lines = (shared_data / "text" / "grimms.txt").read_text(encoding="utf-8").splitlines()[:800]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.train_from_iterator(
        lines, tokenizers.trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="<unk>")
    )
    pieces = [piece for piece in json.loads(backend.to_str())["model"]["vocab"] if piece[0] != "<unk>"]
    special: list[Piece] = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    single: list[Piece] = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return [*special, *single, *((text, struct.unpack("<f", struct.pack("<f", score))[0], 1) for text, score in pieces)]


def viterbi(pieces: Sequence[Piece], text: str) -> float:
    """The score of the best way to write a text in pieces (Kudo 2018, 1804.10959); characters unknown cost most."""
    scores = {piece: score for piece, score, kind in pieces if kind == NORMAL}
    lowest = min(0.0, *scores.values()) - 10
    best = [0.0] + [float("-inf")] * len(text)
    for end in range(1, len(text) + 1):
        for start in range(max(0, end - 20), end):
            part = text[start:end]
            score = scores.get(part, lowest if end - start == 1 else float("-inf"))
            best[end] = max(best[end], best[start] + score)
    return best[-1]


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_unigram_takes_the_likeliest_pieces(trained: list[Piece], unigram: Tokenizer, text: str) -> None:
    built = unigram
    ids = built.encode(text, add_special_tokens=False, parse_special=False)
    written = ("▁" + text.replace(" ", "▁")) if text else ""
    assert b"".join(map(built.token_bytes, ids)) == written.replace("▁", " ").encode()
    assert built.decode(ids) == text.replace("▁", " ")
    lowest = min(0.0, *(score for _, score, kind in trained if kind == NORMAL)) - 10
    spelled = [trained[i] for i in ids]
    bytes_of_unknown = b"".join(bytes.fromhex(piece[3:5]) for piece, _, kind in spelled if kind == BYTE).decode()
    score = sum(piece[1] for piece in spelled if piece[2] == NORMAL) + lowest * len(bytes_of_unknown)
    assert score == pytest.approx(viterbi(trained, written), rel=1e-5, abs=1e-4)


@pytest.fixture(scope="module")
def unigram(tmp_path_factory: pytest.TempPathFactory, trained: list[Piece]) -> Tokenizer:
    """The trained vocabulary from spiece.model."""
    return folder(tmp_path_factory.mktemp("unigram"), "spiece.model", sentencepiece(trained, 1), add_eos_token=False)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_unigram_from_gguf_and_tokenizer_json_is_the_same(
    unigram: Tokenizer, others: tuple[Tokenizer, Tokenizer], text: str
) -> None:
    built, (from_gguf, from_json) = unigram, others
    ids = built.encode(text, parse_special=False)
    assert from_gguf.encode(text, parse_special=False) == ids
    assert from_json.encode(text, parse_special=False) == ids
    assert from_json.decode(ids) == from_gguf.decode(ids) == built.decode(ids)
    if "\ufffd" not in text:  # the library writes one for each byte of a broken character
        assert built.decode(ids) == from_json.backend.decode(ids)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, trained: list[Piece]) -> tuple[Tokenizer, Tokenizer]:
    """The trained vocabulary from GGUF metadata and from tokenizer.json."""
    pieces = trained
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_eos_token": False,
    }
    model = tokenizers.models.Unigram([(text, score) for text, score, _ in pieces], 0, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    path = tmp_path_factory.mktemp("json")
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer.from_gguf(metadata), Tokenizer.from_folder(path)


def test_control_tokens_of_unigram_models_are_not_found_in_plain_text(
    unigram: Tokenizer, others: tuple[Tokenizer, Tokenizer]
) -> None:
    for built in (unigram, *others):
        text = "a</s>b"
        assert 2 in built.encode(text)
        plain = built.encode(text, parse_special=False)
        assert 2 not in plain
        assert built.decode(plain) == text


def test_what_is_put_around_a_text(trained: list[Piece], tmp_path: Path) -> None:
    t5 = folder(tmp_path / "t5", "spiece.model", sentencepiece(trained, 1))
    assert t5.encode("the")[-1] == t5.eos_id == 2
    assert t5.end_ids == {2}
    assert t5.special_ids == {0, 1, 2}
    added = {"700": {"content": "<|im_end|>", "special": True}, "701": {"content": "<tool>", "special": False}}
    both = folder(
        tmp_path / "both",
        "tokenizer.model",
        sentencepiece(trained, 1),
        add_bos_token=True,
        eos_token={"content": "<|im_end|>"},
        added_tokens_decoder=added,
    )
    ids = both.encode("the<tool>")
    assert ids[0] == both.bos_id == 1
    assert ids[-2:] == [701, 700]
    assert both.vocab_size == 702
    assert both.special_ids == {0, 1, 2, 700}


def test_a_models_own_normalisation(tmp_path: Path) -> None:
    letters = "▁ABfiÅｘ"
    pieces: list[Piece] = [("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3), *((char, -1.0, 1) for char in letters)]
    data = sentencepiece(pieces, 1, charsmap=CHARSMAP, tidy=True)
    built = folder(tmp_path / "m", "spiece.model", data, add_eos_token=False)
    assert built.decode(built.encode("  ＡＢ\u3000 \u00a0ﬁ\u200bＡ A\u030a ｘ ")) == "AB fiA Å ｘ"
    loose = folder(tmp_path / "l", "spiece.model", sentencepiece(pieces, 1, prefix=False), add_eos_token=False)
    assert loose.decode(loose.encode(" A  B ")) == " A  B "


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_byte_pair_models_give_what_gguf_gives(
    shared_data: Path, gguf_metadata: Read, tmp_path: Path, name: str
) -> None:
    metadata = gguf_metadata(name)
    parts = [metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")]
    built = folder(tmp_path, "tokenizer.model", sentencepiece(list(zip(*parts, strict=True)), 2))
    base = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    for text, line in zip(texts, Path(f"{base}.out").read_text().splitlines(), strict=False):
        assert built.encode(text, parse_special=False) == [1, *map(int, line.split())]


@pytest.fixture(scope="module")
def ranked(gguf_metadata: Read) -> Callable[[str], list[bytes]]:
    """The tokens of a vocabulary that was made with tiktoken, as bytes in the order of their ranks."""
    spelling = Spelling(Kind.BYTES)

    @cache
    def read(name: str) -> list[bytes]:
        metadata = gguf_metadata(name)
        pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
        return [spelling.spell(token, False) for token, kind in pairs if kind == NORMAL]

    return read


def golden(shared_data: Path, name: str) -> list[tuple[str, list[int]]]:
    """Texts and their ids."""
    base = shared_data / "tokenizers" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{base}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{base}.out").read_text().splitlines()
    return [(text, [*map(int, line.split())]) for text, line in zip(texts, lines, strict=False)]


def tekken_file(tokens: Sequence[bytes], pattern: str, special: int, **fields: Any) -> bytes:
    """A tekken.json."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    config = {
        "pattern": pattern,
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": len(tokens) + special,
        "default_num_special_tokens": special,
        "version": "v3",
    }
    return json.dumps({"config": config, "vocab": vocab, **fields}).encode()


def test_tekken_gives_the_golden_ids(shared_data: Path, ranked: Callable[[str], list[bytes]], tmp_path: Path) -> None:
    # Llama 3's vocabulary, which has ranks too and takes whole words first.
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    built = folder(tmp_path, "tekken.json", tekken_file(ranked("llama-bpe"), pattern, 30))
    pairs = golden(shared_data, "llama-bpe")
    assert len(pairs) >= 40
    for text, ids in pairs:
        assert built.encode(text, parse_special=False) == [1, *(index + 30 for index in ids)]
        assert built.decode([1, *(index + 30 for index in ids)]) == text
    assert (built.bos_id, built.eos_id, built.vocab_size) == (1, 2, 128_030)
    assert [built.piece(index) for index in (3, 4, 19, 20, 29)] == [
        "[INST]", "[/INST]", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>"
    ]  # fmt: skip
    assert built.encode("[INST]a[/INST]", add_special_tokens=False)[::2] == [3, 4]


@pytest.mark.parametrize(("name", "cls"), [("llama-bpe", "ChatGLM4Tokenizer"), ("qwen2", "QWenTokenizer")])
def test_tiktoken_files_give_the_golden_ids(
    shared_data: Path, ranked: Callable[[str], list[bytes]], tmp_path: Path, name: str, cls: str
) -> None:
    tokens = ranked(name)[:151_643]
    data = b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    added = {} if cls == "QWenTokenizer" else {str(len(tokens) + 4): {"content": "<|user|>", "special": True}}
    file = "qwen.tiktoken" if cls == "QWenTokenizer" else "tokenizer.model"
    built = folder(tmp_path, file, data, tokenizer_class=cls, added_tokens_decoder=added)
    pairs = golden(shared_data, name)
    assert len(pairs) >= 40
    for text, ids in pairs:
        assert built.encode(text, parse_special=False) == ids
        assert built.decode(ids) == text
    if cls == "QWenTokenizer":
        assert built.encode("<|im_start|>a<|im_end|>")[::2] == [151_644, 151_645]
        assert built.end_ids == {151_643}
        assert built.vocab_size == 151_851
    else:
        assert built.encode("<|user|>") == [len(tokens) + 4]
        assert built.vocab_size == len(tokens) + 5


SMALL = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b" th", b" the", b"the", b"  ", b"aa", b"aaa"]


def rank_pairs(word: bytes) -> list[int]:
    """The rule, word for word: the adjacent pair of the lowest rank is merged, the leftmost of several."""
    ranks = {token: rank for rank, token in enumerate(SMALL)}
    if word in ranks:
        return [ranks[word]]
    parts = [word[i : i + 1] for i in range(len(word))]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@settings(max_examples=200, deadline=None)
@given(text=st.text("the a世", max_size=20))
def test_ranks_decide_what_is_merged(small: Tokenizer, text: str) -> None:
    assert small.encode(text, add_special_tokens=False) == [index + 3 for index in rank_pairs(text.encode())]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small tekken vocabulary whose words are whole texts."""
    special = [{"rank": i, "token_str": name, "is_control": i < 2} for i, name in enumerate(["<s>", "</s>", "[IMG]"])]
    data = tekken_file(SMALL, r"[\s\S]+", 3, special_tokens=special)
    return folder(tmp_path_factory.mktemp("small"), "tekken.json", data)


def test_tekken_names_its_own_control_tokens(small: Tokenizer) -> None:
    assert small.special_ids == {0, 1}
    assert (small.bos_id, small.eos_id, small.piece(2)) == (0, 1, "[IMG]")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["unigram", "small"])
def test_pieces_of_any_ids_join_to_the_text(request: pytest.FixtureRequest, kind: str, data: st.DataObject) -> None:
    built: Tokenizer = request.getfixturevalue(kind)
    ids = data.draw(st.lists(st.integers(0, built.vocab_size + 1), max_size=20))
    detokenizer = IncrementalDetokenizer(built)
    given_text = [detokenizer.push([token]).text for token in ids]
    assert "".join(given_text) + detokenizer.finish().text == built.decode(ids)
    assert all("\ufffd" not in text for text in given_text) or "\ufffd" in built.decode(ids)


TINY: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -1.0, 1), ("a", -2.0, 1)]
DAMAGED: dict[str, tuple[str, bytes, dict[str, Any]]] = {
    "no pieces": ("tokenizer.model", b"", {}),
    "cut": ("tokenizer.model", sentencepiece(TINY, 1)[:-9], {}),
    "type": ("tokenizer.model", sentencepiece(TINY, 3), {}),
    "twice": ("tokenizer.model", sentencepiece([*TINY, ("a", 0.0, 1)], 1), {}),
    "not a number": ("tokenizer.model", sentencepiece([*TINY, ("b", float("nan"), 1)], 1), {}),
    "charsmap": ("tokenizer.model", sentencepiece(TINY, 1, charsmap=b"\xff\xff\xff\x7fabcd"), {}),
    "small charsmap": ("tokenizer.model", sentencepiece(TINY, 1, charsmap=b"\x04\0\0\0abcd\xff"), {}),
    "renumbered": ("tokenizer.model", sentencepiece(TINY, 1), {"tokenizer_class": "XLMRobertaTokenizer"}),
    "added": ("tokenizer.model", sentencepiece(TINY, 1), {"added_tokens_decoder": {"4000000000": {"content": "x"}}}),
    "added shape": ("tokenizer.model", sentencepiece(TINY, 1), {"added_tokens_decoder": {"7": "x"}}),
    "tekken json": ("tekken.json", b"{", {}),
    "tekken bytes": ("tekken.json", tekken_file(SMALL[1:], "x", 3), {}),
    "tekken size": ("tekken.json", tekken_file(SMALL, "x", 3).replace(b'size": 267', b'size": 268'), {}),
    "tekken pattern": ("tekken.json", tekken_file(SMALL, "(", 3), {}),
    "tekken twice": ("tekken.json", tekken_file(SMALL, "x", 3, special_tokens=[{"rank": 0, "token_str": "the"}]), {}),
    "tekken rank": ("tekken.json", tekken_file(SMALL, "x", 3, special_tokens=[{"rank": 9, "token_str": "q"}]), {}),
    "class": ("x.tiktoken", b"YQ== 0\n", {"tokenizer_class": "OtherTokenizer"}),
    "no class": ("tiktoken.model", b"YQ== 0\n", {}),
    "ranks": ("x.tiktoken", b"YQ== 0\nYg== 0\n", {"tokenizer_class": "QWenTokenizer"}),
    "rank": ("x.tiktoken", b"YQ== x\n", {"tokenizer_class": "QWenTokenizer"}),
    "huge rank": ("tokenizer.model", b"YQ== 4000000000\n", {"tokenizer_class": "QWenTokenizer"}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_clean_errors(tmp_path: Path, name: str) -> None:
    file, data, config = DAMAGED[name]
    with pytest.raises(CheckpointError, match=file) as caught:
        folder(tmp_path, file, data, **config)
    assert len(str(caught.value)) < 800


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "x.tiktoken"])
def test_no_file_of_any_bytes_does_worse_than_a_clean_error(
    tmp_path_factory: pytest.TempPathFactory, file: str, data: st.DataObject
) -> None:
    whole = {
        "tokenizer.model": sentencepiece(TINY, 1, charsmap=CHARSMAP),
        "tekken.json": tekken_file(SMALL, r"\w+", 3),
        "x.tiktoken": b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(SMALL)),
    }[file]
    spoiled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        spoiled[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("spoiled")
    try:
        built = folder(path, file, bytes(spoiled), tokenizer_class="QWenTokenizer")
        assert isinstance(built.encode("a the Ａ"), list)
    except CheckpointError:
        return


def test_the_byte_alphabet_is_a_bijection() -> None:
    assert len(set(CHAR_OF_BYTE)) == 256
    oracle = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert set(CHAR_OF_BYTE) == set(oracle)
