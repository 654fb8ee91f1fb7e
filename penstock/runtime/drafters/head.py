"""Drafts of a head that reads its target's hidden states: token after token (EAGLE-3, MTP), or all at once (P-EAGLE).

(Li et al. 2025, 2503.01840; DeepSeek-V3, 2412.19437, section 2.2; P-EAGLE, 2602.01469.) The entry of position t is made
of the target's states there and of the token behind; logits there are those of the token behind that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from penstock.core.protocol import ScheduledTokens, StepPlan
from penstock.layers.draft_head import DraftHead
from penstock.layers.part import LayerStates
from penstock.models.eagle3 import ParallelHead
from penstock.runtime.drafters.draft_draws import DraftedRow, DraftTraits
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.drafters.head_blocks import HeadBlocks
from penstock.runtime.drafters.hidden_states import Pending, Tapped, Taps, of_spans
from penstock.runtime.drafters.row_drafter import RowDrafter
from penstock.runtime.sampler import Sampler

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor

_UNASKED: Final = 32  # steps in which nobody wants drafts, after which nothing is computed for them
_KEPT: Final = 64  # positions of a sequence whose states wait to be used, before they are used, or given up


@dataclass(slots=True)
class _Row(DraftedRow):
    """A sequence that is drafted for.

    Attributes:
        seen: whether it was looked up which entries are there.
        pending: states whose entries are yet to be made.
    """

    seen: bool = False
    pending: Pending = field(default_factory=Pending)


@dataclass(frozen=True, slots=True)
class _Span:
    """Entries of a row from a position on: the tokens behind them, and the states they are made of.

    Attributes:
        lasting: how many are of known tokens.
        drawn: of the last so many logits are wanted.
    """

    row: _Row
    begin: int
    tokens: Sequence[int]
    lasting: int
    drawn: int


class HeadDrafter(RowDrafter[_Row]):
    """Makes what is missing of a sequence's entries, draws, and goes on with what it drew. `most` as in Drafter.

    Attributes:
        taps: what of the target it reads.
    """

    def __init__(
        self,
        head: DraftHead,
        executor: Executor,
        blocks: HeadBlocks,
        sampler: Sampler,
        traits: DraftTraits,
        taps: Taps,
        ids: Tensor | None = None,
    ) -> None:
        """`ids` [draft vocabulary]: the target's id of each of the head's; None where they are the same."""
        super().__init__(_Row, sampler, blocks.builder.place, traits)
        self.taps = taps
        self._head, self._executor = head, executor
        self._blocks = blocks
        self._place = blocks.builder.place
        self._ids = ids
        self._wide: Tensor | None = None  # logits over the target's vocabulary
        self._unasked = 0

    def release(self, slot: int) -> None:
        """As Drafter: what is known of the sequence's last tokens is there for who goes on from them."""
        row = self._rows.get(slot)
        super().release(slot)
        asked = self._unasked <= _UNASKED
        if row is not None and row.seen and asked and self._ready(row) > row.pending.begin:
            self._run([self._known(row, self._ready(row))])

    def see(self, plan: StepPlan, tapped: Tapped) -> None:
        """What a step's taps hold, before `step` is told of it."""
        for slot, begin, states in of_spans(plan, tapped, self.taps.names):
            row = self._rows.get(slot)
            if row is not None and not row.pending.add(begin, states):
                row.seen = False

    def step(self, plan: StepPlan) -> None:
        """As Drafter: entries of prompts are made as their target computes them."""
        self._blocks.enter(plan, self._rows)
        self._unasked += any(span.sample and span.slot in self._rows for span in plan.scheduled)
        spans, left = list[_Span](), self._traits.max_tokens
        for span in plan.scheduled:
            row = self._rows.get(span.slot)
            if row is None:
                continue
            if not row.seen:
                row.seen = True
                row.pending.drop(self._blocks.see(span.slot, row.pending.begin))
            ready = self._ready(row)
            count = ready - row.pending.begin
            if count <= 0 or (span.sample and count < _KEPT):
                continue
            if self._unasked > _UNASKED:  # they are missing from now on
                row.pending.drop(self._blocks.see(span.slot, ready))
            elif left:
                spans.append(self._known(row, row.pending.begin + min(count, left)))
                left -= min(count, left)
        if spans:
            self._run(spans)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter. Who is far behind comes last, and gets no drafts before all of it is there."""
        self._unasked = 0
        rows = [self._rows[slot] for slot in wanted if slot in self._rows and self._rows[slot].seen]
        rows.sort(key=lambda row: len(row.tokens) - row.pending.begin)
        spans, left = list[_Span](), self._traits.max_tokens
        for row in rows:
            self._draws.ask(row, wanted[row.new.slot])
            end, known = self._ready(row), len(row.tokens)
            end = min(end, row.pending.begin + left)
            if row.most > 0 and row.pending.begin < end and known <= self._blocks.room(row.new.slot) + 1:
                spans.append(self._known(row, end, row.most if end == known - 1 else 0))
                left -= len(spans[-1].tokens)
        going = [span.row for span in spans if span.drawn]
        if spans:
            logits, hidden = self._run(spans)
            self._draft(logits, hidden, going)
        return self._proposed(rows)

    def _draft(self, logits: Any, hidden: Any, rows: list[_Row]) -> None:
        """Draws the rows' drafts, the first from these logits [rows, vocab]; they go on from hidden [rows, size]."""
        while kept := self._draws.draw(logits, rows):
            rows = [rows[at] for at in kept]
            logits, hidden = self._run([_ahead(row) for row in rows], hidden[kept])

    def _ready(self, row: _Row) -> int:
        """Entries before this position can be made: their states are there, and the tokens behind them are known."""
        return min(row.pending.end, len(row.tokens) - 1)

    def _known(self, row: _Row, end: int, drafts: int = 0) -> _Span:
        """The row's entries up to a position; behind the last of them so many drafts are wanted."""
        begin = row.pending.begin
        return _Span(row, begin, row.tokens[begin + 1 : end + 1], end - begin, min(1, drafts))

    def _states(self, spans: Sequence[_Span]) -> Tensor:
        """What the spans' entries are made of, [T, takes]."""
        states = torch.cat([span.row.pending.take(span.begin + span.lasting) for span in spans])
        return self._fused(states)

    def _fused(self, states: Tensor) -> Tensor:
        fusion = self._head.fusion
        return states if fusion is None else fusion(states.to(self._head.dtype))

    def _run(self, spans: Sequence[_Span], given: Tensor | None = None) -> tuple[Any, Any]:
        """Makes these entries; logits [n, vocab] where they are wanted, and the states to go on from there [n, size].

        `given` [T, takes]: what they are made of; None where that is the target's.
        """
        bases = [self._blocks.base(span.row.new.slot) for span in spans]
        wanted, scheduled = list[int](), list[ScheduledTokens]()
        first = 0
        for span, base in zip(spans, bases, strict=True):
            count = len(span.tokens)
            wanted += range(first + count - span.drawn, first + count)
            first += count
            scheduled.append(
                ScheduledTokens(span.row.new.slot, span.begin - base, tuple(span.tokens), 0, 0, span.drawn > 0, ())
            )
        with self._place.guard(), torch.inference_mode():
            given = self._states(spans) if given is None else given
            batch = self._blocks.builder.build(scheduled, wanted)
            if any(bases):
                moved = np.repeat(np.array(bases, np.int64), [len(span.tokens) for span in spans])
                batch = replace(batch, positions=batch.positions + self._place.put(moved))
            self._executor.forward(batch, LayerStates(given))
            found = (
                (self._widened(self._executor.logits()), self._executor.tap(self._head.chained))
                if wanted
                else (None, None)
            )
        for span in spans:
            if span.lasting:
                self._blocks.fill(span.row.new.slot, span.begin, span.begin + span.lasting)
        return found

    def _widened(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, where tokens that the head does not have are never drawn."""
        if self._ids is None:
            return logits
        if self._wide is None or len(self._wide) < len(logits):
            size = len(logits), self._traits.target_vocab_size
            self._wide = torch.full(size, float("-inf"), dtype=logits.dtype, device=logits.device)
        wide = self._wide[: len(logits)]
        wide[:, self._ids] = logits
        return wide


class ParallelDrafter(HeadDrafter):
    """A head that drafts all tokens in one pass: masks stand where tokens are not known."""

    _head: ParallelHead

    def _known(self, row: _Row, end: int, drafts: int = 0) -> _Span:
        found = super()._known(row, end)
        masks = [self._head.mask_token] * (drafts - 1)
        return replace(found, tokens=[*found.tokens, *masks], drawn=drafts)

    def _states(self, spans: Sequence[_Span]) -> Tensor:
        mask = self._head.masked()
        parts = list[Tensor]()
        for span in spans:
            parts.append(span.row.pending.take(span.begin + span.lasting).to(mask.dtype))
            parts.append(mask.expand(len(span.tokens) - span.lasting, -1))
        return self._fused(torch.cat(parts))

    def _draft(self, logits: Any, hidden: Any, rows: list[_Row]) -> None:
        counts = [row.most for row in rows]
        places = np.cumsum([0, *counts[:-1]])
        place, kept = 0, list(range(len(rows)))
        logits = None if logits is None else logits.clone()
        while kept:
            going = [rows[at] for at in kept]
            drawn = self._draws.draw(logits[torch.from_numpy(places[kept] + place)], going)
            kept = [kept[at] for at in drawn]
            place += 1


def _ahead(row: _Row) -> _Span:
    """The entry of the row's last draft."""
    return _Span(row, len(row.tokens) - 2 + len(row.drafts), row.drafts[-1:], 0, 1)
