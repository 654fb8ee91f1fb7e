"""What the tokens of a vocabulary spell, to be searched: which of them hold a text, or begin it where they end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.text.tokenizer import Tokenizer

_KEPT_BYTES = 2**24  # of tokens of texts that are remembered, about
_SEQUENCE_BYTES = 64  # of one, and of each of its tokens
_BEGINNINGS = 64  # of each part of a text, so many tokens that end with it, the shortest first
_LONGEST_TAIL = 20  # tokens behind the one that begins a text, as in llama.cpp


class Spelled(NamedTuple):
    """The tokens in which a text appears.

    Attributes:
        mask: those that hold it whole, as `config.token_mask` has them.
        sequences: a token that ends with the text's beginning, and the tokens of what is left.
    """

    mask: bytes
    sequences: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return len(self.mask) + _SEQUENCE_BYTES * sum(1 + len(ids) for ids in self.sequences)


class Spellings:
    """The bytes of all tokens, one behind the other. Safe to share among threads; made when first asked.

    Args:
        tokenizer: whose.
        kept_bytes: what was found is remembered up to this size, that which was not asked for longest goes first.
    """

    def __init__(self, tokenizer: Tokenizer, kept_bytes: int = _KEPT_BYTES) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept_bytes = kept_bytes
        self._bytes: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._starts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._found: OrderedDict[str, Spelled] = OrderedDict()
        self._size = 0

    def find(self, text: str) -> Spelled:
        """The tokens in which a text appears; linear in the vocabulary, and in the text's length.

        Raises:
            UnicodeEncodeError: half a surrogate pair.
        """
        wanted = text.encode()
        with self._lock:
            self._prepare()
            if text in self._found:
                self._found.move_to_end(text)
                return self._found[text]
        found = self._search(wanted)
        with self._lock:
            if text not in self._found:
                self._found[text] = found
                self._size += found.size
                while self._size > self._kept_bytes:
                    self._size -= self._found.popitem(last=False)[1].size
        return found

    def _prepare(self) -> None:
        if len(self._starts):
            return
        pieces = [self._tokenizer.token_bytes(i) for i in range(self._tokenizer.vocab_size)]
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
        self._starts = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces]))).astype(np.int64)

    def _search(self, wanted: bytes) -> Spelled:
        """The tokens of these bytes; places of each beginning are some of those of the one before."""
        sequences: list[tuple[int, ...]] = []
        places = np.flatnonzero(self._bytes == wanted[0])
        for size, byte in enumerate(wanted, 1):
            places = places[places + size <= len(self._bytes)]
            places = places[self._bytes[places + size - 1] == byte]
            if size < len(wanted):
                sequences += self._beginning(wanted, size, places)
        tokens = self._tokens_at(places)
        holds = np.zeros(len(self._starts) - 1, np.bool_)
        holds[tokens[places + len(wanted) <= self._starts[tokens + 1]]] = True
        return Spelled(np.packbits(holds, bitorder="little").tobytes(), tuple(sequences))

    def _tokens_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.searchsorted(self._starts, places, side="right") - 1

    def _beginning(self, wanted: bytes, size: int, places: npt.NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
        """Tokens that end with the first `size` bytes, which are at these places, and the tokens of the others."""
        try:
            rest = wanted[size:].decode()
        except UnicodeDecodeError:
            return  # within a character
        tail = self._tokenizer.encode(rest, add_special_tokens=False)[:_LONGEST_TAIL]
        if not tail:
            return
        tokens = self._tokens_at(places)
        found = tokens[places + size == self._starts[tokens + 1]]
        order = np.argsort(self._starts[found + 1] - self._starts[found], kind="stable")
        yield from ((token, *tail) for token in found[order][:_BEGINNINGS].tolist())
