"""Drafts copied from what the sequence has said or was told already: no weights, and nothing to load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np

from penstock.core.protocol import NewSequence
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.drafters.earlier import Earlier, one_answer
from penstock.runtime.drafters.history import History, Ids, Places

_LONGEST_KIND: Final = 8  # tokens in common from which on drafts count as one kind
_EARLIER_KIND: Final = 2 * (_LONGEST_KIND + 1)  # added to the kind of what earlier answers had
_LONGEST_SUFFIX: Final = 16  # tokens in common that are looked for, one comparison of places for each


class _Lookup(NoDrafter, ABC):
    """A history of each slot; a draft is one kind for each number of tokens that a place has in common with the end."""

    def __init__(self, most: int, least_common: int, most_common: int) -> None:
        self.most = most
        self._least = least_common
        self._common = most_common
        self._histories: dict[int, History] = {}

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""
        self._histories[new.slot] = History((*new.prompt_ids, *new.generated_ids), self._least)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        self._histories[slot].extend(tokens)

    def release(self, slot: int) -> None:
        """As Drafter."""
        del self._histories[slot]

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter."""
        found = []
        for slot, most in wanted.items():
            ids, places, common = self._histories[slot].like_the_end(self._common)
            if len(places):
                tokens, agreed = self.follow(ids, places, most)
                found.append(Draft(slot, tokens, 2 * min(common, _LONGEST_KIND) + agreed))
        return found

    @abstractmethod
    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool]:
        """At most so many tokens that stood behind these places, and whether all of them had the same ones."""


class NgramDrafter(_Lookup):
    """What stood behind the last place like the end (prompt lookup: Saxena 2023, github.com/apoorvumang)."""

    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool]:
        """As _Lookup."""
        latest = int(places[-1])
        return tuple(ids[latest : latest + most].tolist()), False


class SuffixDrafter(_Lookup):
    """What stood most often behind the places that have the most in common with the end, token after token

    (SuffixDecoding: Oliaro et al. 2024, 2411.04975). The tree of that paper is one array that is searched, and another
    one of earlier answers of the same namespace, which are taken where they have more in common.
    """

    def __init__(self, most: int, least_common: int) -> None:
        super().__init__(most, least_common, _LONGEST_SUFFIX)
        self._earlier = Earlier(least_common)
        self._whose: dict[int, tuple[Hashable, int]] = {}  # namespace and tokens of the prompt

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""
        super().begin(new)
        if new.namespace is not None:
            self._whose[new.slot] = new.namespace, len(new.prompt_ids)

    def release(self, slot: int) -> None:
        """As Drafter."""
        if slot in self._whose:
            namespace, prompt = self._whose.pop(slot)
            self._earlier.add(namespace, self._histories[slot].ids[prompt:])
        super().release(slot)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter."""
        found = []
        for slot, most in wanted.items():
            history, kind = self._histories[slot], 0
            ids, places, common = history.like_the_end(self._common)
            if slot in self._whose and common < self._common:
                earlier = self._earlier.like(self._whose[slot][0], ids, self._common)
                if len(earlier[1]) and (not len(places) or earlier[2] > common):
                    (ids, places, common), kind = earlier, _EARLIER_KIND
            if len(places):
                tokens, agreed = self.follow(ids, places, most)
                if tokens := one_answer(tokens):
                    found.append(Draft(slot, tokens, kind + 2 * min(common, _LONGEST_KIND) + agreed))
        return found

    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool]:
        """As _Lookup."""
        tokens: list[int] = []
        agreed = True
        while len(tokens) < most:
            if len(places) == 1:
                begin = int(places[0])
                tokens += ids[begin : begin + most - len(tokens)].tolist()
                break
            behind = ids[places]
            token = int(behind[-1])  # the latest, unless another is more frequent
            alike = behind == token
            if not alike.all():
                agreed = False
                values, counts = np.unique(behind, return_counts=True)
                if counts.max() > np.count_nonzero(alike):
                    token = int(values[counts.argmax()])
                    alike = behind == token
            tokens.append(token)
            places = places[alike] + 1
            places = places[places < len(ids)]
            if not len(places):
                break
        return tuple(tokens), agreed
