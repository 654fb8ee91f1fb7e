"""Drafts of Medusa's heads (Cai et al. 2024, 2401.10774), each of which reads the target's last state alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.core.protocol import StepPlan
from penstock.layers.part import FINAL
from penstock.runtime.drafters.draft_draws import DraftedRow, DraftTraits
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.drafters.hidden_states import Pending, Tapped, Taps, of_spans
from penstock.runtime.drafters.row_drafter import RowDrafter
from penstock.runtime.places import Place
from penstock.runtime.sampler import Sampler


class LogitHeads(Protocol):
    """Several heads over the same states."""

    def guess(self, number: int, hidden: Tensor) -> Any:
        """Logits [n, vocab] of one of them over states [n, hidden_size]."""


@dataclass(slots=True)
class _Row(DraftedRow):
    """A sequence that is drafted for. `pending`: the states of its last tokens."""

    pending: Pending = field(default_factory=Pending)


class MedusaDrafter(RowDrafter[_Row]):
    """Asks head after head, as far as rows go. `most` as in Drafter.

    Attributes:
        taps: what of the target it reads.
    """

    taps = Taps((FINAL,))

    def __init__(self, heads: LogitHeads, sampler: Sampler, place: Place, traits: DraftTraits) -> None:
        super().__init__(_Row, sampler, place, traits)
        self._heads = heads
        self._place = place

    def see(self, plan: StepPlan, tapped: Tapped) -> None:
        """What a step's taps hold, before `step` is told of it."""
        for slot, begin, states in of_spans(plan, tapped, self.taps.names):
            if slot in self._rows:
                self._rows[slot].pending = Pending(begin, states)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter."""
        rows, states = list[_Row](), list[Tensor]()
        for slot in wanted:
            row = self._rows.get(slot)
            if row is None or row.pending.states is None:
                continue
            self._draws.ask(row, wanted[slot])
            last = len(row.tokens) - 2 - row.pending.begin
            if row.most > 0 and 0 <= last < len(row.pending.states):
                rows.append(row)
                states.append(row.pending.states[last : last + 1])
        asked, number = list(rows), 0
        with self._place.guard(), torch.inference_mode():
            hidden = torch.cat(states) if states else None
            while rows and hidden is not None:
                kept = self._draws.draw(self._heads.guess(number, hidden), rows)
                rows, hidden = [rows[at] for at in kept], hidden[kept]
                number += 1
        return self._proposed(asked)
