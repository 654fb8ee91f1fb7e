"""Drafts of heads that read the target's last state alone: Medusa's, MLP speculators' and recurrent ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.core.protocol import StepPlan
from penstock.layers.part import FINAL
from penstock.layers.state_heads import StateHeads
from penstock.runtime.drafters.draft_draws import DraftedRow, DraftTraits
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.drafters.hidden_states import Pending, Tapped, Taps, of_spans
from penstock.runtime.drafters.row_drafter import RowDrafter
from penstock.runtime.places import Place
from penstock.runtime.sampler import Sampler


@dataclass(slots=True)
class _Row(DraftedRow):
    """A sequence that is drafted for. `pending`: the states of its last tokens."""

    pending: Pending = field(default_factory=Pending)


class LastStateDrafter(RowDrafter[_Row]):
    """Asks for one draft after the other, as far as rows go. `most` as in Drafter.

    Attributes:
        taps: what of the target it reads.
    """

    taps = Taps((FINAL,))

    def __init__(self, heads: StateHeads, sampler: Sampler, place: Place, traits: DraftTraits) -> None:
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
            state = torch.cat(states) if states else None
            while rows and state is not None:
                told = np.array([(row.drafts or row.tokens)[-1] for row in rows], np.int64)
                tokens = self._place.tensor(self._place.put(told))
                logits, state = self._heads.guess(number, state, tokens)
                kept = self._draws.draw(logits, rows)
                rows, state = [rows[at] for at in kept], state[kept]
                number += 1
        return self._proposed(asked)
