"""Drafts of the target's own first layers, in whose memory what they need lies already (LayerSkip, 2404.16710)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.core.protocol import StepPlan
from penstock.runtime.drafters.draft_model import DraftModelDrafter, Row
from penstock.runtime.drafters.drafter import Draft


class FirstLayersDrafter(DraftModelDrafter):
    """A draft model that has computed all that its target has, and goes on in the blocks that its target holds.

    It writes where the next step of its target writes anyway, from the last known token on, and nowhere else: so there
    are no more drafts than such a block has places.
    """

    def step(self, plan: StepPlan) -> None:
        """As Drafter."""
        self._blocks.enter(plan, self._rows)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter."""
        most = {
            slot: self._blocks.room(slot) - len(row.tokens) + 1 for slot, row in self._rows.items() if slot in wanted
        }
        return super().propose({slot: min(wanted[slot], places) for slot, places in most.items() if places > 0})

    def _computed(self, row: Row) -> int:
        return len(row.tokens) - 1
