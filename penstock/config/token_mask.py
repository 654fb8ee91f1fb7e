"""Sets of tokens as bits: token t is in a set where bit t % 8 of byte t // 8 is set, so that most of a vocabulary costs
no more than a few tokens."""

from __future__ import annotations

from collections.abc import Iterable

_NO_BYTES = b"\0"


def token_mask(ids: Iterable[int], *masks: bytes) -> bytes:
    """The tokens `ids` and those of all masks as one mask, which ends with its last token's byte.

    Raises:
        IndexError: a token below 0.
    """
    tokens = tuple(ids)
    if tokens and min(tokens) < 0:
        raise IndexError(f"token id {min(tokens)} is below 0")
    named = bytearray(max(tokens, default=-1) // 8 + 1)
    for token in tokens:
        named[token // 8] |= 1 << token % 8
    size = max(len(named), *map(len, masks)) if masks else len(named)
    whole = int.from_bytes(named, "little")
    for mask in masks:
        whole |= int.from_bytes(mask, "little")
    return whole.to_bytes(size, "little").rstrip(_NO_BYTES)


def masked_tokens(mask: bytes) -> set[int]:
    """The tokens of a mask."""
    return {8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1}
