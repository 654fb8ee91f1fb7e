"""Drafts of a second, smaller model: it draws with its target's noise, so that both draw the same where they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.core.protocol import ScheduledTokens, StepPlan
from penstock.runtime.drafters.draft_blocks import DraftBlocks
from penstock.runtime.drafters.draft_draws import DraftedRow, DraftTraits
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.drafters.row_drafter import RowDrafter
from penstock.runtime.sampler import Sampler

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor

_UNASKED: Final = 32  # steps in which nobody wants drafts, after which prompts are no longer computed beforehand


@dataclass(slots=True)
class Row(DraftedRow):
    """A sequence that is drafted for.

    Attributes:
        computed: leading tokens whose entries are there; None before that was looked up.
    """

    computed: int | None = None


class DraftModelDrafter(RowDrafter[Row]):
    """Computes what is new of a sequence, draws, and goes on with what it drew. `most` as in Drafter."""

    def __init__(self, executor: Executor, blocks: DraftBlocks, sampler: Sampler, traits: DraftTraits) -> None:
        super().__init__(Row, sampler, blocks.builder.place, traits)
        self._executor = executor
        self._blocks = blocks
        self._builder = blocks.builder
        self._decoding = executor.decoding(blocks.builder)
        self._unasked = 0

    def step(self, plan: StepPlan) -> None:
        """As Drafter: prompts are computed as their target computes them, so that no step has to do all of one."""
        self._blocks.enter(plan, self._rows)
        self._unasked += 1
        if self._unasked > _UNASKED:
            return
        spans = list[ScheduledTokens]()
        left = self._traits.max_tokens
        for span in plan.scheduled:
            if not span.sample and span.slot in self._rows:
                row = self._rows[span.slot]
                end = min(span.start + len(span.tokens), len(row.tokens) - 1, self._computed(row) + left)
                if self._computed(row) < end:
                    left -= end - self._computed(row)
                    spans.append(_span(row, self._computed(row), end))
        if spans:
            self._run(spans)

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter. Who is far behind comes last, and gets no drafts before all of it is computed."""
        self._unasked = 0
        rows = [self._rows[slot] for slot in wanted if slot in self._rows]
        rows.sort(key=lambda row: len(row.tokens) - self._computed(row))
        spans = list[ScheduledTokens]()
        left = self._traits.max_tokens
        for row in rows:
            known, begin = len(row.tokens), self._computed(row)
            self._draws.ask(row, wanted[row.new.slot])
            end = min(known, begin + left)
            if row.most > 0 and begin < end and known <= self._blocks.room(row.new.slot) + 1:
                spans.append(_span(row, begin, end))
                left -= end - begin
        logits = self._run(spans) if spans else None
        going = [row for row in rows if row.new.slot in {span.slot for span in spans if span.sample}]
        while going := [going[at] for at in self._draws.draw(logits, going)]:
            logits = self._run([_ahead(row) for row in going])
        return self._proposed(rows)

    def _computed(self, row: Row) -> int:
        """Leading tokens whose entries are there; the last known token's are never counted, since its logits are
        wanted."""
        if row.computed is None:
            row.computed = self._blocks.computed(row.new.slot)
        return min(row.computed, len(row.tokens) - 1)

    def _run(self, spans: Sequence[ScheduledTokens]) -> Any:
        """Computes these spans; logits [n, vocab] behind those n of them that are sampled, None for none."""
        wanted, end = list[int](), 0
        for span in spans:
            end += len(span.tokens)
            if span.sample:
                wanted.append(end - 1)
        with self._builder.place.guard():
            logits = self._decoded(spans) if len(wanted) == end else None
            if logits is None:
                self._executor.forward(self._builder.build(spans, wanted))
                logits = self._executor.logits() if wanted else None
        for span in spans:
            row = self._rows[span.slot]
            end = min(span.start + len(span.tokens), self._blocks.room(span.slot))
            if not row.drafts and end > span.start:  # drafts may be wrong
                self._blocks.fill(span.slot, span.start, end)
                row.computed = end
        return logits

    def _decoded(self, spans: Sequence[ScheduledTokens]) -> Any:
        """As `_run` where each span has one token, by the shortest way; None where there is none."""
        if self._decoding is None or not self._decoding.fill(tuple(spans)):
            return None
        return self._decoding.run()


def _span(row: Row, begin: int, end: int) -> ScheduledTokens:
    """The row's known tokens from `begin` to `end`; the last of all is sampled behind."""
    prompt = max(0, min(end, len(row.new.prompt_ids)) - begin)
    tokens = tuple(row.tokens[begin:end])
    return ScheduledTokens(row.new.slot, begin, tokens, prompt, 0, end == len(row.tokens), ())


def _ahead(row: Row) -> ScheduledTokens:
    """The row's last draft."""
    start = len(row.tokens) + len(row.drafts) - 1
    return ScheduledTokens(row.new.slot, start, (row.drafts[-1],), 0, 0, True, ())
