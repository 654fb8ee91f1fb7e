"""Metadata of a GGUF file's tokenizer (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn

from penstock.config.errors import CheckpointError

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-F]{2}>")
KINDS: Final = ("gpt2", "llama", "gemma4", "t5", "bert")


class TokenType(IntEnum):
    """GGUF `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Fields:
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
            fail(name, f"is {value!r}; allowed: true or false")
        return bool(value)

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        try:
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            fail(name, f"is {value!r}; allowed: a token id")
        if isinstance(value, (str, bytes)) or not 0 <= number < len(self.tokens):
            fail(name, f"is {value!r}; allowed: 0 to {len(self.tokens) - 1}, the ids of tokenizer.ggml.tokens")
        return number


def fail(name: str, problem: str) -> NoReturn:
    raise CheckpointError(
        f"GGUF metadata tokenizer.ggml.{name} {problem}. Convert the model again, or get another copy."
    )


def strings(name: str, value: object) -> list[str]:
    items = _items(name, value)
    kinds = set(map(type, items))
    if not kinds <= {str, bytes}:
        bad = next(i for i, item in enumerate(items) if not isinstance(item, (str, bytes)))
        fail(name, f"has an entry, number {bad}, of type {type(items[bad]).__name__}; allowed: strings")
    if bytes in kinds:
        check_text(name, items)
        items = [item.decode() if isinstance(item, bytes) else item for item in items]
    return items


def check_text(name: str, items: Sequence[str | bytes]) -> None:
    bad = next((index for index, item in enumerate(items) if not _is_text(item)), None)
    if bad is not None:
        fail(name, f"has an entry, number {bad}, that is not UTF-8")


def _is_text(item: str | bytes) -> bool:
    try:
        item.decode() if isinstance(item, bytes) else item.encode()
    except UnicodeError:
        return False
    return True


def _items(name: str, value: object) -> list[Any]:
    if value is None:
        fail(name, "is missing")
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        fail(name, f"is of type {type(value).__name__}; allowed: an array")
    return list(value)


def numbers(name: str, value: object, length: int) -> list[Any]:
    items = _items(name, value)
    if len(items) != length:
        fail(name, f"has {len(items)} entries for {length} tokens")
    if not (set(map(type, items)) <= {int, float} and all(map(math.isfinite, items))):
        bad = next(item for item in items if type(item) not in (int, float) or not math.isfinite(item))
        fail(name, f"has the entry {bad!r}; allowed: finite numbers")
    return items


def checked_fields(metadata: Mapping[str, Any]) -> Fields:
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in KINDS:
        fail("model", f"is {kind!r}; supported: {', '.join(KINDS)}")
    tokens = strings("tokens", metadata.get("tokenizer.ggml.tokens"))
    if not tokens:
        fail("tokens", "is empty")
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocab) != len(tokens):
        bad = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        fail("tokens", f"names {tokens[bad][:80]!r} twice, as {bad} and {vocab[tokens[bad]]}")
    if "" in vocab:
        fail("tokens", f"has an empty entry, number {vocab['']}")
    types = metadata.get("tokenizer.ggml.token_type")
    checked = [1] * len(tokens) if types is None else numbers("token_type", types, len(tokens))
    kinds = set(checked)
    if not kinds <= set(TokenType):
        bad = next(i for i, item in enumerate(checked) if item not in set(TokenType))
        fail("token_type", f"has {checked[bad]!r} for token {bad}; allowed: {min(TokenType)} to {max(TokenType)}")
    if TokenType.BYTE in kinds:
        for token, token_type in zip(tokens, checked, strict=True):
            if token_type == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(token):
                fail("tokens", f"has the byte token {token[:80]!r}; allowed: <0x00> to <0xFF>")
    return Fields(str(kind), tokens, checked, vocab, metadata)
