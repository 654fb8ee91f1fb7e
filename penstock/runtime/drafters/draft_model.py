"""Drafts of a second, smaller model: it draws with its target's noise, so that both draw the same where they agree.

(Leviathan et al. 2022, 2211.17192; how often draws with shared noise agree: docs/architecture.md, Sampling.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens, StepPlan
from penstock.runtime.drafters.draft_blocks import DraftBlocks
from penstock.runtime.drafters.drafter import Draft
from penstock.runtime.sampler import Draw, RowSample, Sampler

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor

_LOOKED_BACK: Final = 1024
"""Tokens of a sequence, and those its request names, beyond which none whose draws look back is drafted for: the
sampler reads them all again for each proposal."""
_UNASKED: Final = 32  # steps in which nobody wants drafts, after which prompts are no longer computed beforehand


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What a draft model is asked for, and can do.

    Attributes:
        most, least: drafts of a proposal; fewer than `least` are none.
        least_probability: of a draft, below which it and those behind it are left out.
        longest: tokens of a sequence, drafts included.
        max_tokens: of one of its steps.
        vocab_size, target_vocab_size: token ids lie below.
    """

    most: int
    least: int
    least_probability: float
    longest: int
    max_tokens: int
    vocab_size: int
    target_vocab_size: int


@dataclass(slots=True)
class _Row:
    """A sequence that is drafted for.

    Attributes:
        tokens: known ones.
        looks_back: its draws depend on tokens that were generated.
        named: tokens that its request names.
        computed: leading tokens whose entries are there; None before that was looked up.
        drafts, most: of the proposal that is being made, and how many there may be.
    """

    new: NewSequence
    tokens: list[int]
    looks_back: bool
    named: int
    computed: int | None = None
    drafts: list[int] = field(default_factory=list)
    most: int = 0


class DraftModelDrafter:
    """Computes what is new of a sequence, draws, and goes on with what it drew. `most` as in Drafter."""

    def __init__(self, executor: Executor, blocks: DraftBlocks, sampler: Sampler, traits: DraftTraits) -> None:
        self.most = traits.most
        self._executor = executor
        self._blocks = blocks
        self._builder = blocks.builder
        self._sampler = sampler
        self._traits = traits
        self._decoding = executor.decoding(blocks.builder)
        self._rows: dict[int, _Row] = {}
        self._unasked = 0

    def begin(self, new: NewSequence) -> None:
        """As Drafter. Nothing is drafted for sequences with media, longer than the model takes, or with tokens that it
        does not have."""
        tokens = [*new.prompt_ids, *new.generated_ids]
        self._rows.pop(new.slot, None)
        if new.media or new.encoder is not None or max(tokens) >= self._traits.vocab_size or self._too_long(tokens):
            return
        asked = replace(new.sampling, logprobs=0 if self._traits.least_probability else None)
        looks_back = _looks_back(asked)
        if not looks_back:
            asked = replace(asked, min_tokens=0)
        row = self._rows[new.slot] = _Row(replace(new, sampling=asked), tokens, looks_back, _named(asked))
        if not looks_back:  # others are prepared for each proposal
            self._prepare(row)

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        if slot in self._rows:
            row = self._rows[slot]
            row.tokens += tokens
            if max(tokens, default=0) >= self._traits.vocab_size or self._too_long(row.tokens):
                del self._rows[slot]

    def release(self, slot: int) -> None:
        """As Drafter."""
        self._rows.pop(slot, None)

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
            row.drafts, row.most = [], min(wanted[row.new.slot], self._traits.longest - known)
            if row.looks_back and known + row.named > _LOOKED_BACK:
                row.most = 0
            end = min(known, begin + left)
            if row.most > 0 and begin < end and known <= self._blocks.room(row.new.slot) + 1:
                spans.append(_span(row, begin, end))
                left -= end - begin
        logits = self._run(spans) if spans else None
        going = [row for row in rows if row.new.slot in {span.slot for span in spans if span.sample}]
        while going := self._draw(logits, going):
            logits = self._run([_ahead(row) for row in going])
        found = [Draft(row.new.slot, tuple(row.drafts)) for row in rows]
        for row in rows:
            row.drafts = []
        return [draft for draft in found if len(draft.tokens) >= max(1, self._traits.least)]

    def _computed(self, row: _Row) -> int:
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

    def _draw(self, logits: Any, rows: Sequence[_Row]) -> list[_Row]:
        """Draws a draft for each of these rows; those that go on."""
        if not rows:
            return []
        for row in rows:
            if row.looks_back and not row.drafts:
                self._prepare(row)
        draws = [Draw(row.new.slot, len(row.tokens) + len(row.drafts)) for row in rows]
        with self._builder.place.guard():
            samples = self._sampler.sample(logits, draws)
        return [row for row, sample in zip(rows, samples, strict=True) if self._taken(row, sample)]

    def _taken(self, row: _Row, sample: RowSample) -> bool:
        """Takes a draw as a draft if it is to be one; whether there may be more."""
        if not sample.tokens:
            return False
        token, least = sample.tokens[0], self._traits.least_probability
        if token >= self._traits.target_vocab_size:
            return False
        if least and sample.logprobs[0].logprob < math.log(least):
            return False
        row.drafts.append(token)
        return len(row.drafts) < row.most and token not in row.new.stop_ids

    def _prepare(self, row: _Row) -> None:
        """Has the sampler know what a row's draws depend on."""
        generated = tuple(row.tokens[len(row.new.prompt_ids) :]) if row.looks_back else ()
        self._sampler.add_row(replace(row.new, generated_ids=generated))

    def _too_long(self, tokens: Sequence[int]) -> bool:
        """Whether the model has no place for these tokens and a draft behind them."""
        return len(tokens) >= self._traits.longest


def _named(sampling: SamplingParams) -> int:
    """Tokens that a request names."""
    words = sum(map(len, sampling.bad_words_ids))
    return words + len(sampling.allowed_token_ids or ()) + len(sampling.logit_bias) + len(sampling.stop_token_ids)


def _looks_back(sampling: SamplingParams) -> bool:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    return any(penalties) or bool(sampling.min_tokens or sampling.bad_words_ids) or sampling.chain() is not None


def _span(row: _Row, begin: int, end: int) -> ScheduledTokens:
    """The row's known tokens from `begin` to `end`; the last of all is sampled behind."""
    prompt = max(0, min(end, len(row.new.prompt_ids)) - begin)
    tokens = tuple(row.tokens[begin:end])
    return ScheduledTokens(row.new.slot, begin, tokens, prompt, 0, end == len(row.tokens), ())


def _ahead(row: _Row) -> ScheduledTokens:
    """The row's last draft."""
    start = len(row.tokens) + len(row.drafts) - 1
    return ScheduledTokens(row.new.slot, start, (row.drafts[-1],), 0, 0, True, ())
