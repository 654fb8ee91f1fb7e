"""Cutting what is too long: tokens of a prompt, texts to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

_TRIES = 4  # a text that is cut may have another token or two than it had as part of the whole


def cut_tokens(ids: tuple[int, ...], most: int, keep_end: bool, around: Sequence[int] = ()) -> tuple[int, ...]:
    """At most so many of the tokens, from their end or their beginning.

    Args:
        ids: the tokens.
        most: how many are kept, at least 1.
        keep_end: the last ones are kept.
        around: what the tokenizer puts around a text, which stays where there is room for it and more.
    """
    if len(ids) <= most:
        return ids
    before = next(
        (place for place, both in enumerate(zip(around, ids, strict=False)) if both[0] != both[1]), len(around)
    )
    after = len(around) - before
    if tuple(around[before:]) != ids[len(ids) - after :] or most <= len(around):
        before = after = 0
    inner, room = ids[before : len(ids) - after], most - before - after
    kept = inner[len(inner) - room :] if keep_end else inner[:room]
    return (*ids[:before], *kept, *ids[len(ids) - after :])


def cut_text(tokenizer: Tokenizer, text: str, most: int, keep_end: bool = False) -> str:
    """A text of at most so many tokens, cut between two of them; "" where no cut is that short."""
    for room in range(most, max(most - _TRIES, 0), -1):
        spans = tokenizer.spans(text)
        if len(spans) <= most:
            return text
        text = text[spans[len(spans) - room][0] :] if keep_end else text[: spans[room - 1][1]]
    return text if len(tokenizer.spans(text)) <= most else ""
