"""Tokens that begin with some bytes, found as a search of the whole vocabulary finds them."""

from __future__ import annotations

import random

import numpy as np

from penstock.structured.first_tokens import FirstTokens
from penstock.structured.grammar_compiler import Vocabulary


def test_the_mask_is_that_of_a_search() -> None:
    rng = random.Random(7)
    texts = ["".join(rng.choice(" abé🦜\x7f") for _ in range(rng.randrange(5))) for _ in range(1000)]
    pieces = [text.encode() for text in texts] + [bytes((value,)) for value in range(256)]
    special = frozenset(rng.sample(range(len(pieces)), 50))
    size = len(pieces) + 21  # logits that no token has
    known = Vocabulary(
        size, lambda token: pieces[token] if token < len(pieces) else b"", lambda text: [], special, (3,)
    )
    first = FirstTokens(known)
    for begins in {text.encode()[: rng.randrange(1, 9)] for text in texts if text}:
        bits = np.unpackbits(first.mask(begins).view(np.uint8), bitorder="little")
        found = set(np.flatnonzero(bits).tolist())
        assert found == {
            token for token, piece in enumerate(pieces) if piece.startswith(begins) and token not in special
        }
