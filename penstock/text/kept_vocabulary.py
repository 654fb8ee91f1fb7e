"""A large vocabulary's tables as flat memory, to be mapped at the next start: a token for an id, an id for a token.

    pieces   all tokens as the vocabulary writes them, UTF-8, one behind the other in the order of ids
    offsets  [size + 1] uint32, where each begins
    order    [n] uint32, ids in the order of their tokens' bytes, each token once

What encodes text is the library's tokenizer, which is built when a text is first encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from penstock.text.spelling import Kind, Spelling

SMALLEST = 10_000  # tokens; smaller vocabularies are built in a moment


class Words(Protocol):
    """The tokens of a vocabulary.

    Attributes:
        added: ids that are not of the model's own vocabulary.
    """

    added: frozenset[int]

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it."""

    def id_of(self, token: str) -> int | None:
        """Its id."""

    def longest(self) -> int:
        """Characters of the longest."""


class BuiltWords:
    """Those of the library's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.added = frozenset(backend.get_added_tokens_decoder())

    def piece(self, token_id: int) -> str | None:
        """As Words."""
        return self._backend.id_to_token(token_id)

    def id_of(self, token: str) -> int | None:
        """As Words."""
        return self._backend.token_to_id(token)

    def longest(self) -> int:
        """As Words."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)


class MappedWords:
    """Those of tables in memory."""

    def __init__(self, tables: Mapping[str, memoryview], facts: Mapping[str, Any]) -> None:
        self._pieces = tables["pieces"]
        self._offsets: npt.NDArray[np.uint32] = np.frombuffer(tables["offsets"], np.uint32)
        self._order: npt.NDArray[np.uint32] = np.frombuffer(tables["order"], np.uint32)
        self._missing = frozenset(facts["missing"])
        self._longest: int = facts["longest"]
        self.added = frozenset(facts["added"])

    def _bytes(self, token_id: int) -> bytes:
        begin, end = self._offsets[token_id : token_id + 2].tolist()
        return bytes(self._pieces[begin:end])

    def piece(self, token_id: int) -> str | None:
        """As Words."""
        return None if token_id in self._missing else self._bytes(token_id).decode()

    def id_of(self, token: str) -> int | None:
        """As Words."""
        try:
            wanted = token.encode()
        except UnicodeError:  # half a surrogate pair
            return None
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(int(self._order[middle])) < wanted:
                low = middle + 1
            else:
                high = middle
        found = int(self._order[low]) if low < len(self._order) else -1
        return found if found >= 0 and self._bytes(found) == wanted else None

    def longest(self) -> int:
        """As Words."""
        return self._longest


@dataclass(frozen=True, slots=True)
class KeptVocabulary:
    """As `text.vocabulary.Vocabulary`, with tables in memory and a way to build the tokenizer.

    Attributes:
        words: its tokens.
        build: makes what encodes text.
        separators, begins_chats: as Tokenizer takes them.
    """

    words: Words
    build: Callable[[], tokenizers.Tokenizer]
    spelling: Spelling
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    special_ids: frozenset[int]
    size: int
    separators: int
    begins_chats: bool

    @classmethod
    def of(
        cls, tables: Mapping[str, memoryview], facts: Mapping[str, Any], build: Callable[[], tokenizers.Tokenizer]
    ) -> KeptVocabulary:
        """From what `tables_of` and `facts` of another one gave."""
        spelling = dict(facts["spelling"])
        return cls(
            MappedWords(tables, facts),
            build,
            Spelling(**{**spelling, "kind": Kind[spelling["kind"]]}),
            prefix_ids=tuple(facts["prefix_ids"]),
            suffix_ids=tuple(facts["suffix_ids"]),
            bos_id=facts["bos_id"],
            eos_id=facts["eos_id"],
            end_ids=frozenset(facts["end_ids"]),
            special_ids=frozenset(facts["special_ids"]),
            size=facts["size"],
            separators=facts["separators"],
            begins_chats=facts["begins_chats"],
        )

    def facts(self) -> dict[str, Any]:
        """All but the tables, for JSON."""
        spelling = self.spelling
        pieces = [self.words.piece(index) for index in range(self.size)]
        return {
            "spelling": {
                "kind": spelling.kind.name,
                "strip_first": spelling.strip_first,
                "continues": spelling.continues,
                "cleanup": spelling.cleanup,
            },
            "prefix_ids": list(self.prefix_ids),
            "suffix_ids": list(self.suffix_ids),
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "end_ids": sorted(self.end_ids),
            "special_ids": sorted(self.special_ids),
            "size": self.size,
            "separators": self.separators,
            "begins_chats": self.begins_chats,
            "added": sorted(self.words.added),
            "missing": [index for index, piece in enumerate(pieces) if piece is None],
            "longest": self.words.longest(),
        }


def tables_of(words: Words, size: int) -> dict[str, memoryview]:
    """The tables of a vocabulary with ids below `size`.

    Raises:
        ValueError: its tokens take more than 4 GiB.
    """
    pieces = [(words.piece(index) or "").encode() for index in range(size)]
    ends = np.cumsum([0, *map(len, pieces)], dtype=np.uint64)
    if int(ends[-1]) >= 2**32:
        raise ValueError(f"the tokens take {int(ends[-1])} bytes; allowed: below {2**32}")
    ids = {piece: words.id_of(piece.decode()) for piece in pieces}
    order = [ids[piece] for piece in sorted(piece for piece, found in ids.items() if found is not None)]
    return {
        "pieces": memoryview(b"".join(pieces)),
        "offsets": memoryview(ends.astype(np.uint32).tobytes()),
        "order": memoryview(np.array(order, np.uint32).tobytes()),
    }
