"""What every kind of vocabulary file is read into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import pre_tokenizers

from penstock.text.pretokenizer import PreTokenizer
from penstock.text.spelling import Spelling

_MOST_MERGED: Final = 1024  # characters of a token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, and what its files say of it.

    Attributes:
        backend: encodes text, without adding any token of its own.
        spelling: how tokens are written.
        prefix_ids, suffix_ids: tokens added around a text.
        bos_id, eos_id: beginning and end of text, None if the file has none.
        end_ids: every token the file names as an end (of text, turn or message).
        special_ids: control tokens.
        size: how many tokens there are.
    """

    backend: tokenizers.Tokenizer
    spelling: Spelling
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    size: int


def implied_merges(tokens: Iterable[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges a vocabulary without any implies: every split of a token into two tokens, the first token first.

    Longer tokens than any vocabulary has are left whole, since trying them takes the square of their length.
    """
    merges: list[tuple[str, str]] = []
    for token in tokens:
        for cut in range(1, len(token) if len(token) <= _MOST_MERGED else 0):
            left = token[:cut]
            if left in vocab:
                right = token[cut:]
                if right in vocab:
                    merges.append((left, right))
    return merges


def cutting(rules: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The library's form of cutting rules for a byte-level vocabulary."""
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
