"""Reads SentencePiece's own files (github.com/google/sentencepiece, sentencepiece_model.proto, a Protocol Buffer).

They say what GGUF metadata says, which was made after them; so they are read into that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.config import limits
from penstock.config.errors import CheckpointError
from penstock.text.gguf_fields import TokenType
from penstock.text.gguf_vocab import read_gguf_vocab
from penstock.text.vocabulary import Vocabulary

_MODELS: Final[Mapping[int, str]] = {1: "t5", 2: "llama"}
# Their classes give pieces other numbers than the file, by code alone.
_RENUMBERED: Final = ("XLMRoberta", "Camembert", "MBart", "Nllb", "Barthez", "XGLM", "Pegasus", "BigBird", "Plbart")


@dataclass(slots=True)
class _Proto:
    """ModelProto, with the defaults of its definition."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = 1
    ids: dict[str, int] = field(default_factory=lambda: {"unk": 0, "bos": 1, "eos": 2})
    space_as_suffix: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message's fields; varints as int, 32 bit as float, strings and messages as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: Any
        if kind == 0:
            value, at = _varint(data, at)
        elif kind == 2:
            size, at = _varint(data, at)
            if size > len(data) - at:
                raise ValueError(f"field {key >> 3} claims {size} bytes at {at} of {len(data)}")
            value, at = data[at : at + size], at + size
        elif kind == 5:
            (value,) = struct.unpack_from("<f", data, at)
            at += 4
        elif kind == 1:
            (value,) = struct.unpack_from("<d", data, at)
            at += 8
        else:
            raise ValueError(f"field {key >> 3} has the wire type {kind}")
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return (value - 2**64 if value >= 2**63 else value), at
        shift += 7
    raise ValueError(f"a number at {at} has no end")


def _parse(data: bytes) -> _Proto:
    proto = _Proto()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            proto.pieces.append(bytes(piece.get(1, b"")).decode())
            proto.scores.append(float(piece.get(2, 0.0)))
            proto.types.append(int(piece.get(3, TokenType.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
            proto.model_type = int(trainer.get(3, 1))
            proto.space_as_suffix = bool(trainer.get(24, False))
            proto.ids = {name: int(trainer.get(40 + i, i)) for i, name in enumerate(proto.ids)}
        elif number == 3:
            spec = dict(_fields(value))
            proto.charsmap = bytes(spec.get(2, b""))
            proto.dummy_prefix = bool(spec.get(3, True))
            proto.remove_extra_spaces = bool(spec.get(4, True))
            proto.escape_spaces = bool(spec.get(5, True))
    return proto


def read_sentencepiece(file: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Reads a byte-pair or unigram model; tokens added later and what is put around a text come from the config.

    Args:
        file: tokenizer.model or spiece.model.
        config: tokenizer_config.json, empty without one.

    Raises:
        CheckpointError: it cannot be read, or its class gives pieces other numbers.
    """
    name = str(config.get("tokenizer_class", ""))
    if name.startswith(_RENUMBERED):
        raise CheckpointError(
            f"{file}: tokenizer_class is {name!r}, which numbers pieces otherwise than the file; "
            "save the tokenizer with transformers' save_pretrained to get a tokenizer.json."
        )
    try:
        proto = _parse(file.read_bytes())
        if proto.model_type not in _MODELS or proto.space_as_suffix or not proto.escape_spaces:
            raise ValueError(
                f"model_type is {proto.model_type}, treat_whitespace_as_suffix {proto.space_as_suffix} and "
                f"escape_whitespaces {proto.escape_spaces}; supported: 1 (unigram) or 2 (BPE), False and True"
            )
        metadata = _metadata(proto, config)
    except (OSError, ValueError, TypeError, AttributeError, IndexError, KeyError, struct.error) as error:
        raise CheckpointError(f"{file} is no usable SentencePiece model: {error}. Get another copy of it.") from error
    try:
        return read_gguf_vocab(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{file}, read as GGUF metadata: {error}") from error


def _metadata(proto: _Proto, config: Mapping[str, Any]) -> dict[str, Any]:
    _add_tokens(proto, config.get("added_tokens_decoder") or {})
    unigram = proto.model_type == 1
    found: dict[str, Any] = {
        "model": _MODELS[proto.model_type],
        "tokens": proto.pieces,
        "scores": proto.scores,
        "token_type": proto.types,
        "precompiled_charsmap": proto.charsmap,
        "add_space_prefix": proto.dummy_prefix,
        "remove_extra_whitespaces": proto.remove_extra_spaces,
        "add_bos_token": config.get("add_bos_token", not unigram),
        "add_eos_token": config.get("add_eos_token", unigram),
    }
    for key, index in proto.ids.items():
        token = config.get(f"{key}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if token in proto.pieces:
            index = proto.pieces.index(token)
        if 0 <= index < len(proto.pieces):
            found[f"{'unknown' if key == 'unk' else key}_token_id"] = index
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _add_tokens(proto: _Proto, added: Mapping[str, Any]) -> None:
    """Puts the tokens of `added_tokens_decoder` at their ids; ids between are filled with tokens of no use."""
    for key, token in added.items():
        index = int(key)
        if not 0 <= index < limits.MAX_GGUF_ARRAY_ITEMS:
            raise ValueError(f"added_tokens_decoder has the id {index}; allowed: below {limits.MAX_GGUF_ARRAY_ITEMS}")
        while len(proto.pieces) <= index:
            proto.types.append(int(TokenType.UNUSED))
            proto.scores.append(min(proto.scores, default=0.0))
            proto.pieces.append(f"[PAD{len(proto.pieces)}]")
        proto.pieces[index] = str(token["content"])
        if proto.types[index] != TokenType.UNKNOWN:
            proto.types[index] = int(TokenType.CONTROL if token.get("special", True) else TokenType.USER_DEFINED)
