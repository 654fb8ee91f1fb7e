"""Drafts copied from what the sequence has said or was told already: no weights, and nothing to load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np

from penstock.core.protocol import NewSequence
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.drafters.earlier import Earlier, one_answer
from penstock.runtime.drafters.history import History, Ids, Like, Places, in_common

_LONGEST_KIND: Final = 12  # tokens in common from which on drafts count as one kind
_EARLIER_KIND: Final = 2 * (_LONGEST_KIND + 1)  # added to the kind of what earlier answers had
_REPLACED_KIND: Final = 4 * (_LONGEST_KIND + 1)  # of a copy that goes on behind what was replaced, and tokens since
_MOST_MISSED: Final = 3  # tokens, after which it does not
_LONGEST_SUFFIX: Final = 16  # tokens in common that are looked for, one comparison of places for each


class _Copied(NamedTuple):
    """What stands where a sequence goes on as it did before: all tokens of there, and the position of the next.

    Attributes:
        missed: the last tokens, of which none is what stands there.
    """

    ids: Ids
    place: int
    missed: int

    def behind(self, tokens: Sequence[int]) -> _Copied:
        """The same behind further tokens."""
        there = self.ids[self.place : self.place + len(tokens)].tolist()
        missed = self.missed
        for token, copied in zip_longest(tokens, there):
            missed = 0 if token == copied else missed + 1
        return _Copied(self.ids, self.place + len(tokens), missed)


class _Lookup(NoDrafter, ABC):
    """A history of each slot; a draft is one kind for each number of tokens that a place has in common with the end.

    Where nothing is like the end, because a token was replaced in what is copied, the copy goes on behind that token.
    """

    def __init__(self, most: int, least_common: int, most_common: int) -> None:
        self.most = most
        self._least = least_common
        self._common = most_common
        self._histories: dict[int, History] = {}
        self._copied: dict[int, _Copied] = {}

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""
        self._histories[new.slot] = History((*new.prompt_ids, *new.generated_ids), self._least)
        self._copied.pop(new.slot, None)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        self._histories[slot].extend(tokens)
        if (copied := self._copied.get(slot)) is not None:
            self._copied[slot] = copied.behind(tokens)

    def release(self, slot: int) -> None:
        """As Drafter."""
        del self._histories[slot]
        self._copied.pop(slot, None)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter."""
        found = []
        for slot, most in wanted.items():
            like = self._histories[slot].like_the_end(self._common)
            draft = self._of(slot, like, most, 0) if len(like.places) else self._behind(slot, most)
            if draft is not None:
                found.append(draft)
        return found

    def _of(self, slot: int, like: Like, most: int, kind: int) -> Draft | None:
        """The draft of places like the end."""
        places, copied = like.places, self._copied.get(slot)
        if copied is not None and not kind and (going := places[places == copied.place]).size:
            places = going  # of places that are equally like the end, the one that was copied before
        tokens, agreed, place = self.follow(like.ids, places, most)
        self._copied[slot] = _Copied(like.ids, place, 0)
        tokens = one_answer(tokens)
        return Draft(slot, tokens, kind + 2 * min(like.common, _LONGEST_KIND) + agreed) if tokens else None

    def _behind(self, slot: int, most: int) -> Draft | None:
        """The draft of a copy in which the last token was replaced, or the last few."""
        copied = self._copied.get(slot)
        if copied is None or copied.missed > _MOST_MISSED:
            return None
        tokens = one_answer(copied.ids[copied.place : copied.place + most].tolist())
        return Draft(slot, tokens, _REPLACED_KIND + copied.missed) if tokens else None

    @abstractmethod
    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool, int]:
        """At most so many tokens that stood behind these places, whether all of them had the same ones, and a place
        behind which these did.
        """


class NgramDrafter(_Lookup):
    """What stood behind the last place like the end (prompt lookup: Saxena 2023, github.com/apoorvumang).

    A draft's kind counts the tokens in common beyond those that are looked for: the longer a copy has gone on, the
    more of it is right.
    """

    def _of(self, slot: int, like: Like, most: int, kind: int) -> Draft | None:
        longer = in_common(like.ids, int(like.places[-1]), _LONGEST_KIND)
        return super()._of(slot, like._replace(common=max(like.common, longer)), most, kind)

    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool, int]:
        """As _Lookup."""
        latest = int(places[-1])
        return tuple(ids[latest : latest + most].tolist()), False, latest


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
            like, kind = self._histories[slot].like_the_end(self._common), 0
            if slot in self._whose and like.common < self._common:
                earlier = self._earlier.like(self._whose[slot][0], like.ids, self._common)
                if len(earlier.places) and (not len(like.places) or earlier.common > like.common):
                    like, kind = earlier, _EARLIER_KIND
            draft = self._of(slot, like, most, kind) if len(like.places) else self._behind(slot, most)
            if draft is not None:
                found.append(draft)
        return found

    def follow(self, ids: Ids, places: Places, most: int) -> tuple[tuple[int, ...], bool, int]:
        """As _Lookup."""
        tokens: list[int] = []
        agreed, begin = True, int(places[-1])
        while len(tokens) < most:
            if len(places) == 1:
                place = int(places[0])
                begin = place - len(tokens)
                tokens += ids[place : begin + most].tolist()
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
            begin = int(places[alike][-1]) + 1 - len(tokens)
            places = places[alike] + 1
            places = places[places < len(ids)]
            if not len(places):
                break
        return tuple(tokens), agreed, begin
