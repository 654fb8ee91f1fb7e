"""Where a head's keys and values lie: as a draft model's, but what is missing can not be computed later.

An entry is made of the target's hidden states, which are there in the step that computes them and never again. So a
sequence sees the entries behind the last one that is missing, from the next block on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.protocol import NewSequence
from penstock.kernels.cache import KvTensors
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.drafters.draft_blocks import DraftBlocks


class HeadBlocks(DraftBlocks):
    """Tables that begin behind what a slot does not see. All positions are those of the sequence."""

    def __init__(
        self, builder: BatchBuilder, group: int, layers: Sequence[KvTensors], num_blocks: int, spare: int
    ) -> None:
        super().__init__(builder, group, layers, num_blocks, spare)
        self._left_out = [0] * len(self._held)  # leading blocks of slots, which are not in their tables

    def base(self, slot: int) -> int:
        """The first position that a slot sees."""
        return self._left_out[slot] * self.builder.block_size

    def room(self, slot: int) -> int:
        """As DraftBlocks."""
        return self.base(slot) + super().room(slot)

    def see(self, slot: int, end: int) -> int:
        """A slot sees the entries before `end`, as far back as they are all there; where those to come go on from.

        That is `end`, or a later position where the block it lies in lacks one.
        """
        size = self.builder.block_size
        within = end - self.base(slot)
        count = -(-within // size)
        wanted = np.full(count, size)
        wanted[-1:] = within - (count - 1) * size
        short = np.flatnonzero(self._filled[self.builder.tables[0][slot, :count]] < wanted)
        if len(short):
            self._leave_out(slot, int(short[-1]) + 1)
        return max(end, self.base(slot))

    def fill(self, slot: int, begin: int, end: int) -> None:
        """As DraftBlocks."""
        base = self.base(slot)
        super().fill(slot, begin - base, end - base)

    def _begin(self, new: NewSequence, kept: bool) -> None:
        self._left_out[new.slot] = 0
        super()._begin(new, kept)

    def _leave_out(self, slot: int, count: int) -> None:
        table = self.builder.tables[0][slot]
        used = int(self.builder.used[0][slot])
        table[: used - count] = table[count:used].copy()
        self.builder.used[0][slot] = used - count
        self._held[slot] -= count
        self._left_out[slot] += count
