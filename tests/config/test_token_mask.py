"""Sets of tokens as bits are the sets they were made of."""

from __future__ import annotations

import random

import pytest

from penstock.config.token_mask import masked_tokens, token_mask


def test_sets_go_there_and_back() -> None:
    dice = random.Random(1)
    for size in (0, 1, 7, 8, 9, 1000):
        ids = [dice.randrange(size) for _ in range(size // 2)]
        more = {dice.randrange(5000) for _ in range(20)}
        assert masked_tokens(token_mask(ids)) == set(ids)
        assert masked_tokens(token_mask(ids, token_mask(more), b"")) == set(ids) | more


def test_a_whole_vocabulary_takes_a_bit_a_token() -> None:
    assert token_mask(range(1000)) == b"\xff" * 125
    assert token_mask([], b"\x01\0\0") == b"\x01"
    assert token_mask([]) == b""


def test_tokens_below_zero_are_refused() -> None:
    with pytest.raises(IndexError, match="-1 is below 0"):
        token_mask([3, -1])
