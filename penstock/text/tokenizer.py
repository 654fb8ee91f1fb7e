"""One tokenizer for every model: from tokenizer.json or from GGUF metadata, with exact bytes for every token."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import models

from penstock.config import limits
from penstock.config.errors import CheckpointError, RequestError
from penstock.text.kept_vocabulary import BuiltWords, KeptVocabulary, Words
from penstock.text.spelling import Spelling, read_spelling
from penstock.text.vocabulary import Vocabulary

_SHORT_CHARS = 1024  # longest text that is encoded without letting other threads run


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
        begins_chats: whether chats begin with the beginning of text, once, whatever their template writes.
    """

    def __init__(self, vocab: Vocabulary | KeptVocabulary, separators: int = 1, *, begins_chats: bool = False) -> None:
        """`separators`: how many times the ids behind a text stand between it and a second one."""
        self.bos_id = vocab.bos_id
        self.eos_id = vocab.eos_id
        self.end_ids = vocab.end_ids
        self.special_ids = vocab.special_ids
        self.strip_first = vocab.spelling.strip_first
        self.begins_chats = begins_chats
        self.vocab_size = vocab.size
        self._built: tokenizers.Tokenizer | None = None
        self._words: Words
        if isinstance(vocab, KeptVocabulary):
            self._words, self._build = vocab.words, vocab.build
        else:
            self._built = vocab.backend
            self._words = BuiltWords(vocab.backend)
        self._building = threading.Lock()
        self._plain: tokenizers.Tokenizer | None = None
        self._spelling = vocab.spelling
        self._prefix = list(vocab.prefix_ids)
        self._suffix = list(vocab.suffix_ids)
        self._separators = separators
        self._between = self._suffix * separators
        self._bytes: dict[int, bytes] = {}
        self._longest = 0

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Reads the vocabulary of a Hugging Face folder, and tokenizer_config.json where present.

        The file is tokenizer.json, else tekken.json (Mistral), tokenizer.model or spiece.model (SentencePiece), or
        tiktoken.model or *.tiktoken.

        Raises:
            CheckpointError: there is no such file, or it cannot be used.
        """
        from penstock.text.tokenizer_json import read_tokenizer_json  # not needed where tables are kept
        from penstock.text.vocabulary_file import read_vocabulary_file

        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return cls(read_vocabulary_file(folder, _read_config(folder / "tokenizer_config.json")))
        try:
            backend, size = read_tokenizer_json(file.read_bytes())
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise CheckpointError(f"{file} is no usable tokenizer: {error}. Get another copy of the file.") from error
        config = _read_config(folder / "tokenizer_config.json")
        eos = _config_token(backend, config, "eos_token")
        vocab = Vocabulary(
            backend,
            _spelling(backend, file),
            prefix_ids=(),
            suffix_ids=(),
            bos_id=_config_token(backend, config, "bos_token"),
            eos_id=eos,
            end_ids=frozenset() if eos is None else frozenset((eos,)),
            special_ids=frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special),
            size=_checked_size(size, file),
        )
        return cls(vocab)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Builds the tokenizer that a GGUF file's metadata describes.

        Raises:
            CheckpointError: the metadata is missing, contradictory or hostile; the message names the field.
        """
        from penstock.text.gguf_vocab import read_gguf_vocab  # not needed where tables are kept

        vocab = read_gguf_vocab(metadata)
        return cls(vocab, 2 if _doubles_separators(metadata) else 1, begins_chats=bool(vocab.prefix_ids))

    @classmethod
    def from_kept(cls, kept: KeptVocabulary) -> Self:
        """From the tables that an earlier start has kept; what encodes text is built when a text is encoded."""
        return cls(kept, kept.separators, begins_chats=kept.begins_chats)

    def kept(self) -> KeptVocabulary:
        """What a next start can do with."""
        return KeptVocabulary(
            self._words,
            lambda: self.backend,
            self._spelling,
            prefix_ids=tuple(self._prefix),
            suffix_ids=tuple(self._suffix),
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            end_ids=self.end_ids,
            special_ids=self.special_ids,
            size=self.vocab_size,
            separators=self._separators,
            begins_chats=self.begins_chats,
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """What encodes text."""
        if self._built is None:
            with self._building:
                self._built = self._built or self._build()
        return self._built

    @property
    def prepared(self) -> bool:
        """Whether what encodes text is there, or the first text will wait for it."""
        return self._built is not None

    def prepare(self) -> None:
        """Builds what encodes text now, lest a first text wait for it."""
        self.backend  # noqa: B018

    def rows(self, vocab_size: object) -> int:
        """How many tokens a model knows whose files say `vocab_size`; what is no number takes the tokenizer's own.

        Raises:
            CheckpointError: the tokenizer has more, so that a prompt could hold tokens the model has no row for.
        """
        if type(vocab_size) is not int:
            return self.vocab_size
        if vocab_size < self.vocab_size:
            raise CheckpointError(
                f"the model's vocab_size is {vocab_size}, but its tokenizer has ids up to {self.vocab_size - 1} "
                f"({self.piece(self.vocab_size - 1)!r}); allowed: at least {self.vocab_size}. "
                "Use the tokenizer that belongs to the model, or one without the tokens that were added to it."
            )
        return vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put the model's own tokens (beginning of text …) around it.
            parse_special: read control tokens spelled out in the text as those tokens, not as plain text.

        Raises:
            RequestError: the text is too long or holds half a surrogate pair.
            CheckpointError: the vocabulary's tables turn out to be damaged.
        """
        backend = self.backend if parse_special else self._without_special()
        ids: list[int] = _encoded(backend, text, add_special_tokens=add_special_tokens).ids
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Where in a text each of its tokens stands; control tokens that it spells out are plain text. As `encode`."""
        return list(_encoded(self._without_special(), text, add_special_tokens=False).offsets)

    def begin_chat(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """A rendered chat's tokens with one beginning of text before them, where a GGUF file asks for it.

        llama.cpp takes `tokenizer.ggml.add_bos_token` to count for chats too, whose template may write one or none.
        """
        if not self.begins_chats or self.bos_id is None:
            return ids
        start = next((place for place, token in enumerate(ids) if token != self.bos_id), len(ids))
        return (self.bos_id, *ids[start:])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts with the model's own tokens around and between them.

        Control tokens that the texts spell out are plain text.

        Returns:
            The ids, and the position at which the second text begins for models that tell the texts apart, else 0.

        Raises:
            RequestError, CheckpointError: as `encode`.
        """
        plain = self._without_special()
        if self._prefix or self._suffix:
            parts = [_encoded(plain, text, add_special_tokens=False).ids for text in (first, second)]
            head = self._prefix + parts[0] + self._between
            return head + parts[1] + self._suffix, len(head)
        found = _encoded(plain, first, second, add_special_tokens=True)
        return found.ids, next((place for place, kind in enumerate(found.type_ids) if kind == 1), 0)

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
        return self._words.piece(token_id) if 0 <= token_id < self.vocab_size else None

    @property
    def longest_piece(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        self._longest = self._longest or self._words.longest()
        return self._longest

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it, None if there is no such token."""
        return self._words.id_of(token)

    def _without_special(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            self._plain = _without_special(self.backend)
        return self._plain

    def _spell(self, token_id: int) -> bytes:
        piece = self._words.piece(token_id)
        return b"" if piece is None else self._spelling.spell(piece, token_id in self._words.added)


def _encoded(
    backend: tokenizers.Tokenizer, text: str, pair: str | None = None, *, add_special_tokens: bool
) -> tokenizers.Encoding:
    for part in (text, pair or ""):
        if len(part) > limits.MAX_PROMPT_CHARS:
            raise RequestError(f"the text has {len(part)} characters; allowed: at most {limits.MAX_PROMPT_CHARS}.")
    try:
        if len(text) + len(pair or "") <= _SHORT_CHARS:
            return backend.encode(text, pair, add_special_tokens=add_special_tokens)
        # Of the library's calls, those for several texts alone let other threads run meanwhile.
        texts: list[Any] = [text if pair is None else (text, pair)]
        return backend.encode_batch(texts, add_special_tokens=add_special_tokens)[0]
    except (TypeError, UnicodeError) as error:  # the library takes a lone surrogate for a wrong type
        raise RequestError("the text is not valid Unicode; send it without lone surrogates.") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which is no Exception, and has no module to import it from
            raise
        raise CheckpointError(
            f"the tokenizer is damaged: it fails on a text ({error}). Get another copy of the model."
        ) from error


def _doubles_separators(metadata: Mapping[str, Any]) -> bool:
    """Whether a pair has two separators between its texts, as RoBERTa's family has, unlike BERT's."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    return kind != "bert" and pre != "modern-bert"


def _checked_size(size: int, file: Path) -> int:
    if size > limits.MAX_GGUF_ARRAY_ITEMS:  # the library's work grows with the largest id, not with the entries
        raise CheckpointError(
            f"{file} has the token id {size - 1}; allowed: below {limits.MAX_GGUF_ARRAY_ITEMS}. "
            "Get another copy of the file."
        )
    return size


def _without_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer over the same model that reads control tokens in text as plain text."""
    if isinstance(backend.model, models.Unigram):  # which could find a control token's name among its pieces
        return _unmatchable_special(backend)
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


def _unmatchable_special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["special"] and token["id"] < len(state["model"]["vocab"]):
            token["content"] = state["model"]["vocab"][token["id"]][0] = f"\U0010ffff{token['id']}\U0010ffff"
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _spelling(backend: tokenizers.Tokenizer, file: Path) -> Spelling:
    """Reads off the decoder how tokens are written."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    found = read_spelling(state)
    if found is None:
        kinds = ", ".join(str(step.get("type")) for step in state.get("decoders", [state]))
        raise CheckpointError(
            f"{file} has a decoder of kind {kinds}; supported: ByteLevel, Metaspace, ByteFallback, WordPiece, none."
        )
    return found


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
