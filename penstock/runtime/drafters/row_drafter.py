"""What drafters share that draw for rows: which sequences they draft for, and what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from penstock.core.protocol import NewSequence
from penstock.runtime.drafters.draft_draws import DraftDraws, DraftedRow, DraftTraits
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.runtime.places import Place
from penstock.runtime.sampler import Sampler

Row = TypeVar("Row", bound=DraftedRow)


class RowDrafter(NoDrafter, Generic[Row]):
    """Keeps a row for each sequence that can be drafted for. `most` as in Drafter."""

    def __init__(self, make: Callable[..., Row], sampler: Sampler, place: Place, traits: DraftTraits) -> None:
        """`make`: a row of the first fields of one."""
        self.most = traits.most
        self._make = make
        self._traits = traits
        self._draws = DraftDraws(sampler, place, traits)
        self._rows: dict[int, Row] = {}

    def begin(self, new: NewSequence) -> None:
        """As Drafter. Nothing is drafted for sequences with media, longer than the model takes, or with tokens that it
        does not have."""
        self._rows.pop(new.slot, None)
        if (begun := self._draws.begin(new)) is not None:
            self._rows[new.slot] = self._make(*begun)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        if slot in self._rows:
            row = self._rows[slot]
            row.tokens += tokens
            if self._draws.strange(tokens) or self._draws.too_long(row.tokens):
                del self._rows[slot]

    def release(self, slot: int) -> None:
        """As Drafter."""
        self._rows.pop(slot, None)

    def _proposed(self, rows: Iterable[Row]) -> list[Draft]:
        """What was drawn for these rows, which begin anew."""
        found = []
        for row in rows:
            if len(row.drafts) >= max(1, self._traits.least):
                found.append(Draft(row.new.slot, tuple(row.drafts)))
            row.drafts = []
        return found
