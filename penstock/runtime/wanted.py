"""Which final states and logits a step is to give, and what for. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.runtime.replay import Rows


@dataclass(frozen=True, slots=True)
class Scored:
    """A span whose prompt tokens are scored: places first … first + len(targets) - 1 predict the targets."""

    slot: int
    first: int
    targets: tuple[int, ...]
    top: int

    def parts(self) -> Iterator[Rows]:
        """Its places, as many at once as logits are made of."""
        end = self.first + len(self.targets)
        for begin in range(self.first, end, PROMPT_LOGIT_ROWS):
            yield np.arange(begin, min(begin + PROMPT_LOGIT_ROWS, end), dtype=np.int64)


@dataclass(slots=True)
class Wanted:
    """Which final states a step is to give, and what for.

    Attributes:
        tokens: indices of their tokens in the step; the other fields have places in this list.
        draws: places to sample after; those behind a slot's drafts follow that behind its last known token.
        drafted: slots whose drafts are verified: (slot, number of its first draw, drafts).
        scored, pooled: spans of scored prompts; spans of slots that pool, with their places.
    """

    tokens: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    drafted: list[tuple[int, int, int]] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    pooled: list[tuple[ScheduledTokens, slice]] = field(default_factory=list)

    @property
    def drawn(self) -> Rows | None:
        """The places to sample after; None for all, since mostly these are all that are computed."""
        return None if len(self.draws) == len(self.tokens) else np.array(self.draws, np.int64)

    def calls(self, slots: Mapping[int, NewSequence]) -> list[Rows | None]:
        """The places of all logits that will be asked for, call by call: of draws, of what pools, of scored prompts."""
        calls = [self.drawn] if self.draws else []
        for span, places in self.pooled:
            pooling = slots[span.slot].pooling
            if span.sample and pooling is not None and pooling.choices:
                calls.append(last_of(places))
        return calls + [rows for entry in self.scored for rows in entry.parts()]


def last_of(places: slice) -> Rows:
    """The last of some places."""
    return np.array([places.stop - 1], np.int64)


def wanted_of(
    spans: Sequence[ScheduledTokens],
    slots: Mapping[int, NewSequence],
    pooled: Callable[[ScheduledTokens], range | None],
    *,
    widens: bool,
) -> Wanted:
    """What the spans of a step are to give.

    Args:
        spans: of the step.
        slots: who is in each.
        pooled: the tokens of a span whose states a pooler needs; None for a slot that does not pool.
        widens: a drafter wants the final states of all tokens.
    """
    wanted, first = Wanted(), 0
    for span in spans:
        new = slots[span.slot]
        count = len(span.tokens)
        place = len(wanted.tokens)
        drawn = range(0)
        if span.sample:
            last = count - span.draft_tokens - 1
            drawn = range(last, last + 1 + len(span.drafts) if span.draft_tokens else count)
        chosen = drawn
        if (pools := pooled(span)) is not None:
            chosen = pools
            wanted.pooled.append((span, slice(place, place + len(chosen))))
        elif widens:
            chosen = range(count)
        if pools is None and new.sampling.prompt_logprobs is not None and new.sequence == 0:
            first_scored = new.sampling.first_scored(span.start) - span.start
            if targets := _targets(new, span):
                chosen = chosen if widens else range(first_scored, count)
                at = place + first_scored - chosen.start
                wanted.scored.append(Scored(span.slot, at, targets, new.sampling.prompt_logprobs))
        if span.draft_tokens:
            wanted.drafted.append((span.slot, len(wanted.draws), len(span.drafts)))
        if pools is None:
            wanted.draws += (place + index - chosen.start for index in drawn)
        wanted.tokens += (first + index for index in chosen)
        first += count
    return wanted


def _targets(new: NewSequence, span: ScheduledTokens) -> tuple[int, ...]:
    """The prompt tokens that a span's tokens predict, from the first that is scored."""
    return new.prompt_ids[new.sampling.first_scored(span.start) + 1 : span.start + len(span.tokens) + 1]
