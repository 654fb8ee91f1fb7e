"""How tokens are written in a vocabulary, and the exact bytes each stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

SPACE: Final = "\u2581"
"""How SentencePiece writes a space."""


def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's reversible alphabet: printable Latin-1 characters stand for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return MappingProxyType(table)


BYTE_OF_CHAR: Final = _byte_alphabet()
CHAR_OF_BYTE: Final = tuple(sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__))

# What the library's WordPiece decoder takes back of the spaces it puts between words.
_CLEANED: Final = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


class Kind(Enum):
    """The ways of writing tokens."""

    BYTES = "in GPT-2's byte alphabet"
    TEXT = "as text with U+2581 for spaces, and single bytes as <0x00> to <0xFF>"
    WORDS = "as words, with a mark on what continues a word"


@dataclass(frozen=True, slots=True)
class Spelling:
    """How tokens are written.

    Attributes:
        kind: the way.
        strip_first: decoding drops one leading space, which encoding had put there.
        continues: for words, what a token begins with that continues a word; "" if none does.
        cleanup: for words, whether the space before punctuation is left out.
    """

    kind: Kind
    strip_first: bool = False
    continues: str = ""
    cleanup: bool = False

    def spell(self, piece: str, added: bool) -> bytes:
        """The bytes of a token; `added` tells that it is not of the model's own vocabulary."""
        if self.kind is Kind.BYTES:
            if added:
                return piece.encode()
            try:
                return bytes([BYTE_OF_CHAR[char] for char in piece])
            except KeyError:
                return piece.encode()
        if self.kind is Kind.WORDS:
            return self._word(piece).encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes.fromhex(piece[3:5])
            except ValueError:
                return piece.encode()
        return piece.replace(SPACE, " ").encode()

    def _word(self, piece: str) -> str:
        inside = bool(self.continues) and piece.startswith(self.continues)
        word = piece[len(self.continues) :] if inside else " " + piece
        for spaced, joined in _CLEANED if self.cleanup else ():
            word = word.replace(spaced, joined)
        return word


def read_spelling(decoder: Mapping[str, Any]) -> Spelling | None:
    """What a tokenizer.json's `decoder` says; None if it is of a kind that is not known."""
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type"): step for step in steps}
    if "ByteLevel" in kinds:
        return Spelling(Kind.BYTES)
    if "Metaspace" in kinds:
        return Spelling(Kind.TEXT, kinds["Metaspace"].get("prepend_scheme", "always") != "never")
    if "WordPiece" in kinds:
        words = kinds["WordPiece"]
        return Spelling(Kind.WORDS, True, str(words.get("prefix", "##")), bool(words.get("cleanup", True)))
    if kinds.keys() & {"ByteFallback", "Replace", "Fuse"}:
        strip = kinds.get("Strip", {})
        return Spelling(Kind.TEXT, strip.get("content") == " " and strip.get("start", 0) > 0)
    return Spelling(Kind.WORDS, True) if kinds.keys() == {None} else None
