"""Drafts that are drawn with the noise of their sequences, so that drafter and target draw the same where they agree.

(Leviathan et al. 2022, 2211.17192; how often draws with shared noise agree: docs/architecture.md, Sampling.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence
from penstock.runtime.places import Place
from penstock.runtime.sampler import Draw, RowSample, Sampler

_LOOKED_BACK: Final = 1024
"""Tokens of a sequence, and those its request names, beyond which none whose draws look back is drafted for: the
sampler reads them all again for each proposal."""


@dataclass(frozen=True, slots=True)
class DraftTraits:
    """What a model that drafts is asked for, and can do.

    Attributes:
        most, least: drafts of a proposal; fewer than `least` are none.
        least_probability: of a draft, below which it and those behind are left out.
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
class DraftedRow:
    """A sequence that is drafted for.

    Attributes:
        tokens: known ones.
        looks_back: its draws depend on tokens that were generated.
        named: tokens that its request names.
        drafts, most: of the proposal that is being made, and how many there may be.
    """

    new: NewSequence
    tokens: list[int]
    looks_back: bool
    named: int
    drafts: list[int] = field(default_factory=list)
    most: int = 0


class DraftDraws:
    """Draws for rows, with a sampler of its own."""

    def __init__(self, sampler: Sampler, place: Place, traits: DraftTraits) -> None:
        self._sampler = sampler
        self._place = place
        self._traits = traits

    def begin(self, new: NewSequence) -> tuple[NewSequence, list[int], bool, int] | None:
        """The first fields of a row; None for sequences with media, longer than the model takes, or with tokens that it
        does not have."""
        tokens = [*new.prompt_ids, *new.generated_ids]
        if new.media or new.encoder is not None or self.strange(tokens) or self.too_long(tokens):
            return None
        asked = replace(new.sampling, logprobs=0 if self._traits.least_probability else None)
        looks_back = _looks_back(asked)
        if not looks_back:
            asked = replace(asked, min_tokens=0)
        known = replace(new, sampling=asked)
        if not looks_back:  # others are prepared for each proposal
            self._sampler.add_row(replace(known, generated_ids=()))
        return known, tokens, looks_back, _named(asked)

    def ask(self, row: DraftedRow, most: int) -> None:
        """A proposal of so many drafts begins, or of fewer, where there is no place or it would take too long."""
        known = len(row.tokens)
        row.drafts, row.most = [], min(most, self._traits.longest - known)
        if row.looks_back and known + row.named > _LOOKED_BACK:
            row.most = 0

    def draw(self, logits: Any, rows: Sequence[Any]) -> list[int]:
        """Draws a draft for each of these rows, logits [rows, vocab]; places of those that go on."""
        if not rows:
            return []
        for row in rows:
            if row.looks_back and not row.drafts:
                generated = tuple(row.tokens[len(row.new.prompt_ids) :])
                self._sampler.add_row(replace(row.new, generated_ids=generated))
        draws = [Draw(row.new.slot, len(row.tokens) + len(row.drafts)) for row in rows]
        with self._place.guard():
            samples = self._sampler.sample(logits, draws)
        return [at for at, (row, sample) in enumerate(zip(rows, samples, strict=True)) if self._taken(row, sample)]

    def _taken(self, row: DraftedRow, sample: RowSample) -> bool:
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

    def strange(self, tokens: Sequence[int]) -> bool:
        """Whether the model lacks one of these tokens."""
        return max(tokens, default=0) >= self._traits.vocab_size

    def too_long(self, tokens: Sequence[int]) -> bool:
        """Whether the model has no place for these tokens and a draft behind them."""
        return len(tokens) >= self._traits.longest


def _named(sampling: SamplingParams) -> int:
    """Tokens that a request names."""
    words = sum(map(len, sampling.bad_words_ids))
    return words + len(sampling.allowed_token_ids or ()) + len(sampling.logit_bias) + len(sampling.stop_token_ids)


def _looks_back(sampling: SamplingParams) -> bool:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0)
    return any(penalties) or bool(sampling.min_tokens or sampling.bad_words_ids) or sampling.chain() is not None
