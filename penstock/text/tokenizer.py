"""One tokenizer for every model: from tokenizer.json or from GGUF metadata, with exact bytes for every token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

import tokenizers

from penstock.config import limits
from penstock.config.errors import CheckpointError, RequestError
from penstock.text.gguf_vocab import read_gguf_vocab
from penstock.text.tokenizer_json import read_tokenizer_json

_SPACE: Final = "\u2581"


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's reversible alphabet: printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return MappingProxyType(table)


_BYTE_OF_CHAR: Final = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class _Spelling:
    """How tokens are written: in the byte alphabet or as text, and whether decoding drops one leading space."""

    byte_level: bool
    strip_first: bool


class Tokenizer:
    """Text to token ids and back. Safe to share among threads.

    `decode` is defined by bytes: the tokens' bytes are joined and read as UTF-8, and each maximal invalid part
    becomes one U+FFFD (Unicode 15, section 3.9).

    Attributes:
        vocab_size: 1 + the largest token id.
        bos_id, eos_id: beginning and end of text, None if there is none.
        end_ids: ids the files name as an end of text, turn or message (a generation_config.json may name more).
        special_ids: control tokens, left out of text by default.
        strip_first: decoding drops one leading space, which encoding put there (SentencePiece).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: _Spelling,
        *,
        bos_id: int | None,
        eos_id: int | None,
        end_ids: frozenset[int],
        special_ids: frozenset[int],
        vocab_size: int,
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
    ) -> None:
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.end_ids = end_ids
        self.special_ids = special_ids
        self.strip_first = spelling.strip_first
        self.vocab_size = vocab_size
        self._backend = backend
        self._plain = _without_special(backend)
        self._byte_level = spelling.byte_level
        self._prefix = list(prefix_ids)
        self._suffix = list(suffix_ids)
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads tokenizer.json, and tokenizer_config.json where present, of a Hugging Face folder.

        Raises:
            CheckpointError: tokenizer.json is missing or cannot be used.
        """
        file = Path(path) / "tokenizer.json"
        try:
            data = file.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}). A model folder needs a tokenizer.json: "
                "save the tokenizer with transformers' save_pretrained, or use a GGUF file."
            ) from error
        try:
            backend, size = read_tokenizer_json(data)
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise CheckpointError(f"{file} is no usable tokenizer: {error}. Get another copy of the file.") from error
        config = _read_config(file.with_name("tokenizer_config.json"))
        eos = _config_token(backend, config, "eos_token")
        return cls(
            backend,
            _spelling(backend, file),
            bos_id=_config_token(backend, config, "bos_token"),
            eos_id=eos,
            end_ids=frozenset() if eos is None else frozenset((eos,)),
            special_ids=frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special),
            vocab_size=_checked_size(size, file),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Builds the tokenizer that a GGUF file's metadata describes.

        Raises:
            CheckpointError: the metadata is missing, contradictory or hostile; the message names the field.
        """
        vocab = read_gguf_vocab(metadata)
        return cls(
            vocab.backend,
            _Spelling(vocab.byte_level, vocab.strip_first),
            bos_id=vocab.bos_id,
            eos_id=vocab.eos_id,
            end_ids=vocab.end_ids,
            special_ids=vocab.special_ids,
            vocab_size=vocab.size,
            prefix_ids=vocab.prefix_ids,
            suffix_ids=vocab.suffix_ids,
        )

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put the model's own tokens (beginning of text …) around it.
            parse_special: read control tokens spelled out in the text as those tokens, not as plain text.

        Raises:
            RequestError: the text is too long or holds half a surrogate pair.
        """
        if len(text) > limits.MAX_PROMPT_CHARS:
            raise RequestError(f"the text has {len(text)} characters; allowed: at most {limits.MAX_PROMPT_CHARS}.")
        backend = self._backend if parse_special else self._plain
        try:
            ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:  # the library takes a lone surrogate for a wrong type
            raise RequestError("the text is not valid Unicode; send it without lone surrogates.") from error
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary (padding of the embedding matrix) give nothing."""
        skipped = self.special_ids if skip_special_tokens else ()
        data = b"".join([self.token_bytes(token) for token in ids if token not in skipped])
        if self.strip_first and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; b"" outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            if not 0 <= token_id < self.vocab_size:
                return b""
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, None outside the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, None if there is no such token."""
        return self._backend.token_to_id(token)

    def _spell(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            if token_id in self._added:
                return piece.encode()
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return piece.encode()
        return piece.replace(_SPACE, " ").encode()


def _checked_size(size: int, file: Path) -> int:
    if size > limits.MAX_GGUF_ARRAY_ITEMS:  # the library's work grows with the largest id, not with the entries
        raise CheckpointError(
            f"{file} has the token id {size - 1}; allowed: below {limits.MAX_GGUF_ARRAY_ITEMS}. "
            "Get another copy of the file."
        )
    return size


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer over the same model that reads control tokens in text as plain text."""
    plain = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (value := getattr(backend, part)) is not None:
            setattr(plain, part, value)
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([added[index] for index in sorted(added)])
    if plain.get_added_tokens_decoder().keys() != added.keys():  # ids with gaps survive only a full copy
        plain = tokenizers.Tokenizer.from_str(backend.to_str())
    plain.encode_special_tokens = True
    return plain


def _spelling(backend: tokenizers.Tokenizer, file: Path) -> _Spelling:
    """Reads off the decoder how tokens are written."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = state.get("decoders", [state])
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return _Spelling(byte_level=True, strip_first=False)
    if "Metaspace" in kinds:
        return _Spelling(byte_level=False, strip_first=kinds["Metaspace"].get("prepend_scheme", "always") != "never")
    if kinds.keys() & {"ByteFallback", "Replace", "Fuse"}:
        strip = kinds.get("Strip", {})
        return _Spelling(byte_level=False, strip_first=strip.get("content") == " " and strip.get("start", 0) > 0)
    raise CheckpointError(
        f"{file} has a decoder of kind {', '.join(map(str, kinds))}; supported: ByteLevel, Metaspace, ByteFallback."
    )


def _read_config(file: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Get another copy of the file.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} holds a {type(config).__name__}; allowed: a JSON object.")
    return config


def _config_token(backend: tokenizers.Tokenizer, config: Mapping[str, Any], name: str) -> int | None:
    """The id of a token that tokenizer_config.json names as a string or as an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return backend.token_to_id(value) if isinstance(value, str) else None
