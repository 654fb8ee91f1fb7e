"""Builds a tokenizer from GGUF metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, `tokenizer.*`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import repeat
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from penstock.config.errors import CheckpointError
from penstock.text.gguf_fields import Fields, TokenType, check_text, checked_fields, fail, numbers, strings
from penstock.text.pretokenizer import PRE_TOKENIZERS
from penstock.text.spelling import SPACE, Kind, Spelling
from penstock.text.tokenizer_check import check_charsmap
from penstock.text.vocabulary import Vocabulary, cutting, implied_merges

_ADDED: Final = frozenset(map(int, (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)))
_MERGED: Final = frozenset(map(int, (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED)))
_CONTINUES: Final = "##"
# Control tokens that end an answer, for files that do not say so: they name one end of text, chat models have more.
_ENDS: Final = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> <|eom_id|> <EOT>
    _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[
    """.split()  # noqa: SIM905
)
_GOES_ON: Final = (
    "<|end|>",
    frozenset(("<|return|>", "<|call|>", "<|calls|>")),
)  # a vocabulary that has one of the latter does not end answers with the former


@dataclass(frozen=True, slots=True)
class _Built:
    """A tokenizer, and what is added around a text where the file does not say."""

    backend: tokenizers.Tokenizer
    spelling: Spelling
    add_bos: bool = False
    add_eos: bool = False
    add_sep: bool = False


def _stored_merges(fields: Fields) -> list[tuple[str, str]]:
    """The merges as pairs; that their parts are tokens is left to the library, which is quick at it."""
    lines = strings("merges", fields.metadata.get("tokenizer.ggml.merges"))
    merges: list[Any] = list(map(tuple, map(str.split, lines, repeat(" "))))
    if not set(map(len, merges)) <= {2}:
        merges = [_pair(index, line) for index, line in enumerate(lines)]
    return merges


def _pair(index: int, line: str) -> tuple[str, str]:
    """A merge one of whose parts may begin with a space."""
    cut = line.find(" ", 1)
    if cut < 0 or cut + 1 == len(line):
        fail("merges", f"has {line[:80]!r} as number {index}; allowed: two tokens with a space between them")
    return line[:cut], line[cut + 1 :]


def _check_merges(fields: Fields, merges: Sequence[tuple[str, str]]) -> None:
    check_text("merges", list(map("".join, merges)))
    for index, (left, right) in enumerate(merges):
        missing = next((part for part in (left, right, left + right) if part not in fields.vocab), None)
        if missing is not None:
            fail("merges", f"has '{left[:40]} {right[:40]}' as number {index}, but {missing[:80]!r} is no token")


def _scored_merges(fields: Fields) -> list[tuple[str, str]]:
    """SentencePiece (Kudo and Richardson 2018, 1808.06226) merges the pair whose union has the highest score."""
    scores = numbers("scores", fields.metadata.get("tokenizer.ggml.scores"), len(fields.tokens))
    order = sorted((i for i, kind in enumerate(fields.types) if kind in _MERGED), key=lambda i: -scores[i])
    return implied_merges((fields.tokens[index] for index in order), fields.vocab)


def _byte_pairs(fields: Fields, merges: list[tuple[str, str]], ignore_merges: bool, byte_fallback: bool) -> models.BPE:
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
        check_text("tokens", fields.tokens)
        _check_merges(fields, merges)
        raise _unusable(error) from error


def _unusable(error: Exception) -> CheckpointError:
    return CheckpointError(f"GGUF metadata tokenizer.ggml holds no usable vocabulary: {error}.")


def _gpt2(fields: Fields) -> _Built:
    name = fields.metadata.get("tokenizer.ggml.pre", "default")
    rules = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rules is None:
        near = get_close_matches(str(name)[:80], PRE_TOKENIZERS, n=3, cutoff=0.0)
        fail("pre", f"is {str(name)[:80]!r}; supported: {len(PRE_TOKENIZERS)} names, the nearest {', '.join(near)}")
    if not rules.byte_level:
        return _lines(fields)
    if name == "kimi-k2" and "tokenizer.ggml.merges" not in fields.metadata:  # its ranks are its ids
        merges, rules_first = implied_merges(fields.tokens, fields.vocab), True
    else:
        merges, rules_first = _stored_merges(fields), rules.ignore_merges
    backend = tokenizers.Tokenizer(_byte_pairs(fields, merges, rules_first, byte_fallback=False))
    backend.pre_tokenizer = cutting(rules)
    return _Built(backend, Spelling(Kind.BYTES), rules.add_bos, add_sep=rules.add_sep)


def _spaces(prefix: bool) -> list[normalizers.Normalizer]:
    return [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]


def _sentencepiece(fields: Fields) -> _Built:
    prefix = fields.flag("add_space_prefix", True)
    backend = tokenizers.Tokenizer(_byte_pairs(fields, _scored_merges(fields), False, byte_fallback=True))
    backend.normalizer = _normalizer(fields, prefix)
    return _Built(backend, Spelling(Kind.TEXT, prefix), add_bos=True)


def _normalizer(fields: Fields, prefix: bool) -> normalizers.Normalizer:
    steps = _charsmap(fields)
    if fields.flag("remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    return normalizers.Sequence([*steps, *_spaces(prefix)])


def _lines(fields: Fields) -> _Built:
    """Byte-pair merges as stored, over text with spaces written as in SentencePiece and cut at the ends of lines."""
    prefix = fields.flag("add_space_prefix", False)
    backend = tokenizers.Tokenizer(_byte_pairs(fields, _stored_merges(fields), False, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(_spaces(prefix))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    return _Built(backend, Spelling(Kind.TEXT, prefix), add_bos=True)


def _charsmap(fields: Fields) -> list[normalizers.Normalizer]:
    """SentencePiece's own normalisation, compiled (its `precompiled_charsmap`)."""
    value = fields.metadata.get("tokenizer.ggml.precompiled_charsmap")
    if value is None or not len(value):
        return []
    try:
        data = bytes(item & 0xFF for item in value)
        check_charsmap(data)
        return [normalizers.Precompiled(data)]
    except Exception as error:
        fail("precompiled_charsmap", f"is no compiled character map ({error})")


def _unigram(fields: Fields) -> _Built:
    """Unigram language model (Kudo 2018, 1804.10959)."""
    scores = numbers("scores", fields.metadata.get("tokenizer.ggml.scores"), len(fields.tokens))
    unknown = fields.token_id("unknown_token_id")
    if unknown is None:
        unknown = next((i for i, kind in enumerate(fields.types) if kind == TokenType.UNKNOWN), None)
    for index, kind in enumerate(fields.types):
        if kind == TokenType.USER_DEFINED:
            scores[index] = 0.0
    try:
        bytes_too = TokenType.BYTE in fields.types
        pieces = list(zip(fields.tokens, map(float, scores), strict=True))
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unknown, byte_fallback=bytes_too))
    except Exception as error:
        check_text("tokens", fields.tokens)
        raise _unusable(error) from error
    prefix = fields.flag("add_space_prefix", True)
    backend.normalizer = _normalizer(fields, prefix)
    return _Built(backend, Spelling(Kind.TEXT, prefix), add_eos=True)


def _word_pieces(fields: Fields) -> _Built:
    """WordPiece (Schuster and Nakajima 2012), which GGUF writes as SentencePiece would: U+2581 begins a word."""
    vocab: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(fields.tokens, fields.types, strict=True)):
        if kind not in (TokenType.CONTROL, TokenType.UNKNOWN):
            token = token[1:] if token.startswith(SPACE) else _CONTINUES + token
        if vocab.setdefault(token, index) != index:
            fail("tokens", f"names the word {token[:80]!r} twice, as {vocab[token]} and {index}")
    unknown = fields.token_id("unknown_token_id")
    lowercase = fields.flag("normalizer.lowercase", True)
    try:
        name = "[UNK]" if unknown is None else fields.tokens[unknown]
        backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=name, continuing_subword_prefix=_CONTINUES))
    except Exception as error:
        check_text("tokens", fields.tokens)
        raise _unusable(error) from error
    accents = fields.flag("normalizer.strip_accents", lowercase)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _Built(backend, Spelling(Kind.WORDS, True, _CONTINUES), add_bos=True, add_sep=True)


_BUILDERS: Final = {"gpt2": _gpt2, "llama": _sentencepiece, "gemma4": _lines, "t5": _unigram, "bert": _word_pieces}


def _add_tokens(backend: tokenizers.Tokenizer, fields: Fields) -> frozenset[int]:
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


def _named_ends(fields: Fields) -> set[int]:
    """Control tokens that end an answer, by their names."""
    names = {name for name in _ENDS if name in fields.vocab}
    token, others = _GOES_ON
    if names & others:
        names.discard(token)
    ids = {fields.vocab[name] for name in names}
    return {index for index in ids if fields.types[index] == TokenType.CONTROL}


def read_gguf_vocab(metadata: Mapping[str, Any]) -> Vocabulary:
    """Builds the tokenizer a GGUF file describes.

    By `tokenizer.ggml.model`: byte-level BPE ("gpt2"), SentencePiece BPE ("llama"), "gemma4", unigram ("t5"),
    WordPiece ("bert").

    Raises:
        CheckpointError: the metadata is missing, contradictory or hostile; the message names the field.
    """
    fields = checked_fields(metadata)
    built = _BUILDERS[fields.kind](fields)
    special = _add_tokens(built.backend, fields)
    bos, eos = fields.token_id("bos_token_id"), fields.token_id("eos_token_id")
    bos = fields.token_id("cls_token_id") if bos is None else bos
    sep = fields.token_id("seperator_token_id")
    ends = {eos, fields.token_id("eot_token_id"), fields.token_id("eom_token_id")} - {None}
    ends |= _named_ends(fields)
    suffix = [eos] if fields.flag("add_eos_token", built.add_eos) else []
    suffix += [sep] if fields.flag("add_sep_token", built.add_sep) and sep != eos else []
    return Vocabulary(
        backend=built.backend,
        spelling=built.spelling,
        prefix_ids=(bos,) if bos is not None and fields.flag("add_bos_token", built.add_bos) else (),
        suffix_ids=tuple(token for token in suffix if token is not None),
        bos_id=bos,
        eos_id=eos,
        end_ids=frozenset(end for end in ends if end is not None),
        special_ids=special,
        size=len(fields.tokens),
    )
