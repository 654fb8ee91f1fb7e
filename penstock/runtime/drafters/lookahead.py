"""Drafts by Jacobi iteration (lookahead decoding: Fu et al. 2024, 2402.02057): guesses that become right by being read.

A step that verifies guesses tells what the model says behind each of them, right or wrong: those are the next guesses.
What a guess becomes from step to step, one token further on each time, is an n-gram that the model has made; they are
kept, and the one that begins with a sequence's last token is drafted first. In the paper each step computes older
iterations and several n-grams besides, as rows of a tree; here it computes one chain, an n-gram and guesses behind it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.core.protocol import NewSequence, ScheduledTokens, StepPlan
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.drafters.hidden_states import Tapped, Taps

_GRAMS: Final = 2048  # of a sequence; those that were met the longest ago are forgotten
_READ: Final = _GRAMS  # tokens of a sequence that comes whose n-grams are kept, the last ones
_LONGEST_KIND: Final = 8


@dataclass(slots=True)
class _Row:
    """A sequence.

    Attributes:
        known: how many tokens it has.
        last: the last ones, as many as an n-gram has.
        seeds: guesses to begin with.
        grams: what followed a token, by token.
        guesses: by position.
        trails: by position, what became of guesses before it in the last steps, and the guess there.
    """

    known: int
    last: tuple[int, ...]
    seeds: tuple[int, ...]
    grams: OrderedDict[int, tuple[int, ...]] = field(default_factory=OrderedDict)
    guesses: dict[int, int] = field(default_factory=dict)
    trails: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def keep(self, gram: Sequence[int]) -> None:
        """Keeps an n-gram."""
        self.grams[gram[0]] = tuple(gram[1:])
        self.grams.move_to_end(gram[0])
        if len(self.grams) > _GRAMS:
            self.grams.popitem(last=False)


class LookaheadDrafter(NoDrafter):
    """An n-gram that begins with the last token, where one is kept, and guesses behind it. `most` as in Drafter.

    Attributes:
        taps: the token that the model would say behind each draft.
    """

    taps = Taps(best=True)

    def __init__(self, most: int, gram: int) -> None:
        """`gram`: tokens of an n-gram, at least 2."""
        self.most = most
        self._gram = gram
        self._rows: dict[int, _Row] = {}

    def begin(self, new: NewSequence) -> None:
        """As Drafter."""
        known = len(new.prompt_ids) + len(new.generated_ids)
        last = (*new.prompt_ids[-_READ:], *new.generated_ids[-_READ:])[-_READ:]
        row = self._rows[new.slot] = _Row(known, last[-self._gram :], last[-self.most :])
        for end in range(self._gram, len(last) + 1):
            row.keep(last[end - self._gram : end])

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        row = self._rows[slot]
        row.known += len(tokens)
        for token in tokens:
            row.last = (*row.last, token)[-self._gram :]
            if len(row.last) == self._gram:
                row.keep(row.last)

    def release(self, slot: int) -> None:
        """As Drafter."""
        del self._rows[slot]

    def see(self, plan: StepPlan, tapped: Tapped) -> None:
        """What the model says behind each draft of a step, before `step` is told of it."""
        for span in plan.scheduled:
            if span.slot in tapped.best and span.slot in self._rows:
                self._follow(self._rows[span.slot], span, tapped.best[span.slot].tolist())

    def _follow(self, row: _Row, span: ScheduledTokens, said: Sequence[int]) -> None:
        """Takes the next guesses: what is said behind the last known token and behind each draft."""
        begin = span.start + len(span.tokens) - span.draft_tokens  # position of the first draft
        before, row.trails = row.trails, {}
        row.guesses = {begin + place: token for place, token in enumerate(said)}
        for place, (draft, token) in enumerate(zip(span.drafts, said[1:], strict=False)):
            trail = before.get(begin + place, ())
            trail = trail if trail[-1:] == (draft,) else (draft,)
            row.trails[begin + place + 1] = trail = (*trail, token)[-self._gram :]
            if len(trail) == self._gram:
                row.keep(trail)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter: a draft's kind is how much of it is of an n-gram."""
        found = []
        for slot, most in wanted.items():
            row = self._rows[slot]
            drafts = list(row.grams.get(row.last[-1], ())[:most])
            kind = min(len(drafts), _LONGEST_KIND)
            for place in range(len(drafts), most):
                drafts.append(row.guesses.get(row.known + place, row.seeds[place % len(row.seeds)]))
            found.append(Draft(slot, tuple(drafts), kind))
        return found
