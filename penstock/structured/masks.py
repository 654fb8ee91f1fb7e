"""The masks of one step, made while its forward pass runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter, thread_time
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.structured.grammar_compiler import compute_mask
from penstock.structured.grammar_state import ALL_ALLOWED, GrammarState, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SLOW_S: Final = 0.02
"""A mask that takes longer makes the other streams wait."""
_NO_DRAFTS: Final[Mapping[int, tuple[int, ...]]] = MappingProxyType({})


class Masks:
    """A step's masks, being made.

    Attributes:
        seconds: it took to make them, once they are made.
        longest: of these, for those of one place of all sequences: all there would be without drafts.
    """

    def __init__(
        self,
        words: int,
        constrained: Mapping[int, GrammarState],
        pool: ThreadPoolExecutor | None = None,
        together: LLExecutor | None = None,
        *,
        drafts: Mapping[int, tuple[int, ...]] = _NO_DRAFTS,
        timed: bool = False,
    ) -> None:
        """Starts the masks of some slots.

        Args:
            words: of a mask, ceil(V / 32).
            constrained: by slot.
            pool: makes them in a thread; None makes them at once.
            together: makes several at a time.
            drafts: by slot, behind each of which there is a mask too.
            timed: times each, and counts slow ones for their requests; those behind drafts by `slow_behind`.
        """
        self.seconds = self.longest = 0.0
        self._timed = timed
        self._slow: set[int] = set()  # places behind drafts
        self._places: dict[int, int] = {}
        count = 0
        for slot in constrained:
            self._places[slot] = count
            count += 1 + len(drafts.get(slot, ()))
        self._named = tuple(slot for slot in constrained for _ in range(1 + len(drafts.get(slot, ()))))
        self._made = np.empty((count, words), np.uint32)
        self._done: Future[None] | None = None
        states = [(state, self._places[slot], drafts.get(slot, ())) for slot, state in constrained.items()]
        if pool is None:
            self._make_all(states, None)
        else:
            self._done = pool.submit(self._make_all, states, together)

    def _make_all(
        self, states: Sequence[tuple[GrammarState, int, tuple[int, ...]]], together: LLExecutor | None
    ) -> None:
        """Makes the masks of states from their first place on: before their drafts, then behind each in turn."""
        began = perf_counter()
        self._make([(state, place) for state, place, _ in states], together)
        drafted = [entry for entry in states if entry[2]]
        before = [state.snapshot() for state, _, _ in drafted]
        try:
            self._follow(drafted, together)
        finally:
            for (state, _, _), snapshot in zip(drafted, before, strict=True):
                state.restore(snapshot)
        self.seconds = perf_counter() - began

    def _follow(self, going: Sequence[tuple[GrammarState, int, tuple[int, ...]]], together: LLExecutor | None) -> None:
        """Makes the masks behind drafts; those behind one that cannot be drawn, or ends the answer, allow all."""
        while going:
            behind: list[tuple[GrammarState, int, tuple[int, ...]]] = []
            for state, place, drafts in going:
                draft = drafts[0]
                if not state.broken and _allows(self._made[place], draft) and not state.ends_with(draft):
                    state.follow(draft)
                    if not state.broken:
                        behind.append((state, place + 1, drafts[1:]))
                        continue
                self._made[place + 1 : place + 1 + len(drafts)] = ALL_ALLOWED
            self._make([(state, place) for state, place, _ in behind], together, drafted=True)
            going = [entry for entry in behind if entry[2]]

    def _make(
        self, states: Sequence[tuple[GrammarState, int]], together: LLExecutor | None, *, drafted: bool = False
    ) -> None:
        began, made = perf_counter(), self._made
        address, size = made.ctypes.data, made.strides[0]
        wanted: list[tuple[LLMatcher, int]] = []
        masked: list[GrammarState] = []
        unfinished: list[tuple[GrammarState, int]] = []
        for state, place in states:
            matcher, unready = state.mask_source()
            if matcher is not None:
                wanted.append((matcher, place))
                masked.append(state)
            if unready:
                unfinished.append((state, place))
        if self._timed:
            for state, (matcher, place) in zip(masked, wanted, strict=True):
                since = thread_time()
                compute_mask(matcher, made[place])
                if thread_time() - since > SLOW_S:
                    state.takes_drafts = False
                    if drafted:
                        self._slow.add(place)
                    else:
                        state.slow_masks.count += 1
        elif together is not None and len(wanted) > 1:
            together.unsafe_compute_mask_ptr(wanted, address, size, len(made))
        else:
            for matcher, place in wanted:
                matcher.unsafe_compute_mask_ptr(address + place * size, size)
        for state, (matcher, _) in zip(masked, wanted, strict=True):
            state.broken = matcher.is_error()
        for state, place in unfinished:
            state.finish_mask(made[place])
        self.longest = max(self.longest, perf_counter() - began)

    def slow_behind(self, slot: int, drafts: int) -> int:
        """How many of the masks behind a slot's first drafts took too long: without drafts they would be made too."""
        first = self._places.get(slot, 0) + 1
        return len(self._slow.intersection(range(first, first + drafts))) if self._slow else 0

    def of(self, slots: Sequence[int]) -> Words:
        """[L, ceil(V / 32)]: the masks of these request slots, waited for; all ones for unconstrained ones.

        A slot that has drafts is named again, at once, for the mask behind each.
        """
        if self._done is not None:
            self._done.result()
        if tuple(slots) == self._named:
            return self._made
        masks = np.full((len(slots), self._made.shape[1]), ALL_ALLOWED)
        again = 0
        for place, slot in enumerate(slots):
            again = again + 1 if place and slots[place - 1] == slot else 0
            if slot in self._places:
                masks[place] = self._made[self._places[slot] + again]
        return masks


def _allows(mask: Words, token: int) -> bool:
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
