"""Where a draft model's keys and values lie: in the blocks that its target's sequences have, and which are there.

A block holds what both models keep of the same tokens, so that prefix hits, copies, preemption and eviction are those
of the target. What the draft model has not computed of a block it computes when it is wanted.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np

from penstock.core.protocol import CacheOp, CacheOpKind, NewSequence, ScheduledTokens, StepPlan
from penstock.kernels.cache import KvTensors
from penstock.runtime.batch_builder import BatchBuilder


class DraftBlocks:
    """The block tables of slots that are drafted for, each with some spare blocks behind it for drafts.

    Attributes:
        builder: of the draft model's batches, of one cache group.
    """

    def __init__(
        self, builder: BatchBuilder, group: int, layers: Sequence[KvTensors], num_blocks: int, spare: int
    ) -> None:
        """`group` of the target, which keeps every position, has so many blocks; behind them lie `spare` a slot."""
        self.builder = builder
        self._group = group
        self._layers = layers
        self._spare = spare
        self._first_spare = num_blocks
        self._held = [0] * len(builder.used[0])  # blocks of slots, spare ones aside
        self._filled = np.zeros(num_blocks, np.int64)  # leading tokens whose entries are there, by block

    def enter(self, plan: StepPlan, slots: Container[int]) -> None:
        """Sequences that come with a step, and blocks that it copies and gives; tables of these slots are kept."""
        for new in plan.new_sequences:
            self._begin(new, new.slot in slots)
        for op in plan.cache_ops:
            if op.group == self._group:
                self._apply(op)
        for span in plan.scheduled:
            if span.new_blocks and span.new_blocks[self._group]:
                self._append(span, span.slot in slots)

    def room(self, slot: int) -> int:
        """Tokens for which a slot has blocks of its own; behind them lie the spare ones."""
        return self._held[slot] * self.builder.block_size

    def computed(self, slot: int) -> int:
        """Leading tokens of a slot whose entries are there."""
        size, held = self.builder.block_size, self._held[slot]
        filled = self._filled[self.builder.tables[0][slot, :held]]
        short = np.flatnonzero(filled < size)
        return held * size if not len(short) else int(short[0]) * size + int(filled[short[0]])

    def fill(self, slot: int, begin: int, end: int) -> None:
        """The entries of a slot's tokens from `begin` to `end` are there now, as those before."""
        size = self.builder.block_size
        places = np.arange(begin // size, -(-end // size))
        self._filled[self.builder.tables[0][slot, places]] = np.minimum(size, end - places * size)

    def _begin(self, new: NewSequence, kept: bool) -> None:
        blocks = new.blocks[self._group]
        whole, part = divmod(new.computed, self.builder.block_size)
        if part:  # what was behind it may have been taken back
            self._filled[blocks[whole]] = min(self._filled[blocks[whole]], part)
        self._filled[list(blocks[whole + (part > 0) :])] = 0
        if kept:
            self.builder.add_row(replace(new, blocks=(blocks,), adapters=(), encoder=None, media=()))
            self._lengthen(new.slot)

    def _append(self, span: ScheduledTokens, kept: bool) -> None:
        blocks = span.new_blocks[self._group]
        self._filled[list(blocks)] = 0
        if kept:
            self.builder.used[0][span.slot] = self._held[span.slot]
            self.builder.columns([span._replace(new_blocks=(blocks,))])
            self._lengthen(span.slot)

    def _lengthen(self, slot: int) -> None:
        """Puts the slot's spare blocks behind those it holds."""
        held = self._held[slot] = int(self.builder.used[0][slot])
        first = self._first_spare + slot * self._spare
        self.builder.tables[0][slot, held : held + self._spare] = np.arange(first, first + self._spare)
        self.builder.used[0][slot] = held + self._spare

    def _apply(self, op: CacheOp) -> None:
        if op.kind is CacheOpKind.COPY:
            for kv in self._layers:
                kv.copy_block(op.source, op.target)
            self._filled[op.target] = min(int(self._filled[op.source]), op.num_tokens)
        elif op.kind is CacheOpKind.LOAD:  # lower tiers keep what the target has
            self._filled[op.target] = 0
