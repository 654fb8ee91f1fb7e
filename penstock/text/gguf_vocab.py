"""Builds a tokenizer from GGUF metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, `tokenizer.*`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import Any, Final, NoReturn

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from penstock.config.errors import CheckpointError
from penstock.text.pretokenizer import PRE_TOKENIZERS, PreTokenizer

_SPACE: Final = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
_KINDS: Final = ("gpt2", "llama", "gemma4")


class TokenType(IntEnum):
    """GGUF `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED: Final = frozenset(map(int, (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)))


@dataclass(frozen=True, slots=True)
class GgufVocab:
    """What GGUF metadata says of a tokenizer.

    Attributes:
        backend: encodes text, without adding any token of its own.
        byte_level: tokens are written in GPT-2's byte alphabet (else as text, with U+2581 for spaces).
        strip_first: decoding drops one leading space, which encoding had put there.
        prefix_ids, suffix_ids: tokens added around a text.
        bos_id, eos_id: beginning and end of text, None if the file has none.
        end_ids: every token the file names as an end (of text, turn or message).
        special_ids: control tokens.
        size: how many tokens there are.
    """

    backend: tokenizers.Tokenizer
    byte_level: bool
    strip_first: bool
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    size: int


@dataclass(frozen=True, slots=True)
class _Fields:
    """Checked metadata."""

    kind: str
    tokens: list[str]
    types: list[int]
    vocab: dict[str, int]
    metadata: Mapping[str, Any]

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return default
        if not isinstance(value, int):
            _fail(name, f"is {value!r}; allowed: true or false")
        return bool(value)

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            _fail(name, f"is {value!r}; allowed: a token id")
        if isinstance(value, (str, bytes)) or not 0 <= number < len(self.tokens):
            _fail(name, f"is {value!r}; allowed: 0 to {len(self.tokens) - 1}, the ids of tokenizer.ggml.tokens")
        return number


def _fail(name: str, problem: str) -> NoReturn:
    raise CheckpointError(
        f"GGUF metadata tokenizer.ggml.{name} {problem}. Convert the model again, or get another copy."
    )


def _strings(name: str, value: object) -> list[str]:
    items = _items(name, value)
    kinds = set(map(type, items))
    if not kinds <= {str, bytes}:
        bad = next(i for i, item in enumerate(items) if not isinstance(item, (str, bytes)))
        _fail(name, f"has an entry, number {bad}, of type {type(items[bad]).__name__}; allowed: strings")
    if bytes in kinds:
        _check_text(name, items)
        items = [item.decode() if isinstance(item, bytes) else item for item in items]
    return items


def _check_text(name: str, items: Sequence[str | bytes]) -> None:
    bad = next((index for index, item in enumerate(items) if not _is_text(item)), None)
    if bad is not None:
        _fail(name, f"has an entry, number {bad}, that is not UTF-8")


def _is_text(item: str | bytes) -> bool:
    try:
        item.decode() if isinstance(item, bytes) else item.encode()
    except UnicodeError:
        return False
    return True


def _items(name: str, value: object) -> list[Any]:
    if value is None:
        _fail(name, "is missing")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        _fail(name, f"is of type {type(value).__name__}; allowed: an array")
    return list(value)


def _numbers(name: str, value: object, length: int) -> list[Any]:
    items = _items(name, value)
    if len(items) != length:
        _fail(name, f"has {len(items)} entries for {length} tokens")
    if not (set(map(type, items)) <= {int, float} and all(map(math.isfinite, items))):
        bad = next(item for item in items if type(item) not in (int, float) or not math.isfinite(item))
        _fail(name, f"has the entry {bad!r}; allowed: finite numbers")
    return items


def _checked_fields(metadata: Mapping[str, Any]) -> _Fields:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        _fail("model", f"is {kind!r}; supported: {', '.join(_KINDS)}")
    tokens = _strings("tokens", metadata.get("tokenizer.ggml.tokens"))
    if not tokens:
        _fail("tokens", "is empty")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        bad = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        _fail("tokens", f"names {tokens[bad][:80]!r} twice, as {bad} and {vocab[tokens[bad]]}")
    if "" in vocab:
        _fail("tokens", f"has an empty entry, number {vocab['']}")
    types = metadata.get("tokenizer.ggml.token_type")
    checked = [1] * len(tokens) if types is None else _numbers("token_type", types, len(tokens))
    kinds = set(checked)
    if not kinds <= set(TokenType):
        bad = next(i for i, item in enumerate(checked) if item not in set(TokenType))
        _fail("token_type", f"has {checked[bad]!r} for token {bad}; allowed: {min(TokenType)} to {max(TokenType)}")
    if TokenType.BYTE in kinds:
        for token, token_type in zip(tokens, checked, strict=True):
            if token_type == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(token):
                _fail("tokens", f"has the byte token {token[:80]!r}; allowed: <0x00> to <0xFF>")
    return _Fields(str(kind), tokens, checked, vocab, metadata)


def _stored_merges(fields: _Fields) -> list[tuple[str, str]]:
    """The merges as pairs; that their parts are tokens is left to the library, which is quick at it."""
    lines = _strings("merges", fields.metadata.get("tokenizer.ggml.merges"))
    merges: list[Any] = list(map(tuple, map(str.split, lines, repeat(" "))))
    if not set(map(len, merges)) <= {2}:
        merges = [_pair(index, line) for index, line in enumerate(lines)]
    return merges


def _pair(index: int, line: str) -> tuple[str, str]:
    """A merge one of whose parts may begin with a space."""
    cut = line.find(" ", 1)
    if cut < 0 or cut + 1 == len(line):
        _fail("merges", f"has {line[:80]!r} as number {index}; allowed: two tokens with a space between them")
    return line[:cut], line[cut + 1 :]


def _check_merges(fields: _Fields, merges: Sequence[tuple[str, str]]) -> None:
    _check_text("merges", list(map("".join, merges)))
    for index, (left, right) in enumerate(merges):
        missing = next((part for part in (left, right, left + right) if part not in fields.vocab), None)
        if missing is not None:
            _fail("merges", f"has '{left[:40]} {right[:40]}' as number {index}, but {missing[:80]!r} is no token")


def merges_from_scores(fields: _Fields, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The BPE merges that a SentencePiece BPE vocabulary implies: every split of a token into two, best score first.

    SentencePiece (Kudo and Richardson 2018, 1808.06226) merges the adjacent pair whose union has the highest score.
    """
    vocab = fields.vocab
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)
    order = sorted(
        (i for i, kind in enumerate(fields.types) if kind in mergeable and len(fields.tokens[i]) > 1),
        key=lambda i: -scores[i],
    )
    merges: list[tuple[str, str]] = []
    for index in order:
        token = fields.tokens[index]
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in vocab:
                right = token[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def _model(fields: _Fields, merges: list[tuple[str, str]], ignore_merges: bool, byte_fallback: bool) -> models.BPE:
    unknown = fields.token_id("unknown_token_id")
    try:
        return models.BPE(
            fields.vocab,
            merges,
            unk_token=fields.tokens[unknown] if unknown is not None and byte_fallback else None,
            fuse_unk=byte_fallback,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:
        _check_text("tokens", fields.tokens)
        _check_merges(fields, merges)
        raise CheckpointError(f"GGUF metadata tokenizer.ggml holds no usable vocabulary: {error}.") from error


def _byte_level(fields: _Fields) -> tuple[tokenizers.Tokenizer, PreTokenizer]:
    name = fields.metadata.get("tokenizer.ggml.pre", "default")
    rules = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        _fail("pre", f"is {name!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    backend = tokenizers.Tokenizer(_model(fields, _stored_merges(fields), rules.ignore_merges, byte_fallback=False))
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return backend, rules


def _text_level(fields: _Fields, space_prefix: bool) -> tokenizers.Tokenizer:
    if fields.kind == "gemma4":
        merges = _stored_merges(fields)
    else:
        scores = _numbers("scores", fields.metadata.get("tokenizer.ggml.scores"), len(fields.tokens))
        merges = merges_from_scores(fields, scores)
    backend = tokenizers.Tokenizer(_model(fields, merges, ignore_merges=False, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    if fields.kind == "gemma4":
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, fields: _Fields) -> frozenset[int]:
    """Registers control and user-defined tokens; returns the control ids."""
    # Phi-3 swallows the white space that follows its markers; its GGUF files do not record this.
    strips = str(fields.metadata.get("general.architecture", "")) == "phi3"
    added: list[AddedToken] = []
    special: set[int] = set()
    for index in [i for i, kind in enumerate(fields.types) if kind in _ADDED]:
        token, control = fields.tokens[index], fields.types[index] != TokenType.USER_DEFINED
        if control:
            special.add(index)
            strip = fields.types[index] == TokenType.CONTROL and token not in ("<s>", "<unk>", "<|endoftext|>")
        else:
            strip = token == "</s>"
        added.append(AddedToken(token, special=control, normalized=False, rstrip=strips and strip))
    backend.add_tokens(added)
    return frozenset(special)


def read_gguf_vocab(metadata: Mapping[str, Any]) -> GgufVocab:
    """Builds the tokenizer a GGUF file describes: byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), "gemma4".

    Raises:
        CheckpointError: the metadata is missing, contradictory or hostile; the message names the field.
    """
    fields = _checked_fields(metadata)
    if fields.kind == "gpt2":
        backend, rules = _byte_level(fields)
        strip, add_bos = False, rules.add_bos
    else:
        strip = fields.flag("add_space_prefix", fields.kind == "llama")
        backend, add_bos = _text_level(fields, strip), True
    special = _add_tokens(backend, fields)
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    ends = {eos, fields.token_id("eot_token_id"), fields.token_id("eom_token_id")} - {None}
    return GgufVocab(
        backend=backend,
        byte_level=fields.kind == "gpt2",
        strip_first=strip,
        prefix_ids=(bos,) if bos is not None and fields.flag("add_bos_token", add_bos) else (),
        suffix_ids=(eos,) if eos is not None and fields.flag("add_eos_token", False) else (),
        bos_id=bos,
        eos_id=eos,
        end_ids=frozenset(end for end in ends if end is not None),
        special_ids=special,
        size=len(fields.tokens),
    )
