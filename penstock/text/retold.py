"""Text told in another vocabulary, piece by piece: what one model says, in the tokens of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.text.tokenizer import Tokenizer

_LEAD: Final = "\n"  # put before a text, so that the space a tokenizer puts there is none of the text
_MOST_LEADING: Final = 3  # tokens of it, and of that space
_BACK: Final = (2, 4, 8)  # tokens that are told anew with what follows, until they can be


def bytes_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    """What tokens spell."""
    return b"".join(map(tokenizer.token_bytes, tokens))


def whole(data: bytes) -> int:
    """How many of these bytes are whole characters; those behind begin one (at most 3 bytes)."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:  # it begins a character of 2 to 4 bytes
            return len(data) - back if back < (2 if lead < 0xE0 else 3 if lead < 0xF0 else 4) else len(data)
        if lead < 0x80:
            break
    return len(data)


class Retold:
    """A text that grows, in the tokens of a vocabulary; they are made when they are asked for.

    Where a piece ends says nothing of where tokens do: the last ones are told anew with what follows. What cannot be
    told exactly (a normaliser, a vocabulary that lacks bytes) is told as nearly as the tokenizer can.
    """

    def __init__(self, tokenizer: Tokenizer, most_bytes: int) -> None:
        """`most_bytes`: that are told at a time; of more, the end alone counts."""
        self._tokenizer = tokenizer
        self._most = most_bytes
        self._pending = b""
        begins = tokenizer.encode("")
        self._begin = [tokenizer.bos_id] if tokenizer.bos_id is not None and tokenizer.bos_id in begins else []
        self._ids: list[int] = []  # without the beginning

    def add(self, data: bytes) -> None:
        """What follows, in UTF-8."""
        self._pending += data
        if len(self._pending) > self._most:
            self._pending, self._ids = self._pending[-self._most :], []

    def ids(self, most: int) -> list[int] | None:
        """Its last tokens, at most so many; half of them, once there are more. None where it ends in a character."""
        end = whole(self._pending)
        text, self._pending = self._pending[:end].decode("utf-8", "ignore"), self._pending[end:]
        if text:
            self._tell(text)
        if len(self._ids) > most:
            del self._ids[: -(most // 2)]
        return None if self._pending else [*self._begin, *self._ids]

    def _tell(self, text: str) -> None:
        for back in _BACK:
            again = self._ids[-back:]
            try:
                before = bytes_of(self._tokenizer, again).decode("utf-8")
            except UnicodeDecodeError:  # they begin inside a character
                continue
            if (told := exactly(self._tokenizer, before + text)) is not None:
                self._ids[len(self._ids) - len(again) :] = told
                return
        told = exactly(self._tokenizer, text)
        self._ids += self._tokenizer.encode(text, add_special_tokens=False) if told is None else told


def exactly(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Tokens that spell just this text, without a space that a tokenizer puts before it; None where there are none."""
    wanted = text.encode()
    for lead in ("", _LEAD):
        ids = tokenizer.encode(lead + text, add_special_tokens=False)
        for begin in range(min(len(ids), _MOST_LEADING) + 1):
            spelled = bytes_of(tokenizer, ids[:begin])
            if spelled in (lead.encode(), b" " + lead.encode()) and bytes_of(tokenizer, ids[begin:]) == wanted:
                return ids[begin:]
            if len(spelled) > len(lead) + 1:
                break
    return None


def behind(tokenizer: Tokenizer, before: Sequence[int], text: str) -> list[int]:
    """Tokens of a text that goes on behind others: by itself, or told with the last of them."""
    if not text:
        return []
    if (told := exactly(tokenizer, text)) is not None:
        return told
    for back in _BACK:
        again = list(before[-back:])
        try:
            told = exactly(tokenizer, bytes_of(tokenizer, again).decode("utf-8") + text)
        except UnicodeDecodeError:
            continue
        if told is not None and told[: len(again)] == again:
            return told[len(again) :]
    return []
