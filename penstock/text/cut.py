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
    before, inner, after = apart(ids, most, around)
    room = most - len(before) - len(after)
    return (*before, *(inner[len(inner) - room :] if keep_end else inner[:room]), *after)


def chunks_of(ids: tuple[int, ...], most: int, around: Sequence[int] = ()) -> list[tuple[tuple[int, ...], int]]:
    """All tokens in chunks of at most so many, what is around them around each.

    Args:
        ids, most, around: as in `cut_tokens`.

    Returns:
        Each chunk, and how many of its tokens are the text's own.
    """
    before, inner, after = apart(ids, most, around)
    room = most - len(before) - len(after)
    parts = [inner[start : start + room] for start in range(0, len(inner), room)]
    return [((*before, *part, *after), len(part)) for part in parts]


def apart(
    ids: tuple[int, ...], most: int, around: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What stands before a text's tokens, these, and what stands behind; all are the text's where `most` tokens have no
    room for more than `around`."""
    before = next(
        (place for place, both in enumerate(zip(around, ids, strict=False)) if both[0] != both[1]), len(around)
    )
    after = len(around) - before
    if tuple(around[before:]) != ids[len(ids) - after :] or most <= len(around):
        before = after = 0
    return ids[:before], ids[before : len(ids) - after], ids[len(ids) - after :]


def cut_text(tokenizer: Tokenizer, text: str, most: int, keep_end: bool = False) -> str:
    """A text of at most so many tokens, cut between two of them; "" where no cut is that short."""
    for room in range(most, max(most - _TRIES, 0), -1):
        spans = tokenizer.spans(text)
        if len(spans) <= most:
            return text
        text = text[spans[len(spans) - room][0] :] if keep_end else text[: spans[room - 1][1]]
    return text if len(tokenizer.spans(text)) <= most else ""
