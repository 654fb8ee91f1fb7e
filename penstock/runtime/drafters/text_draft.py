"""Drafts of a model that has another vocabulary, through text (universal assisted decoding: Timor et al. 2025,
2502.05202, its exact-match variant).

The sequence's text is told in the draft model's tokens, that model goes on, and what it says is told in the target's
tokens. Positions of the two have nothing in common, so that its keys and values lie in memory of its own: lanes, each
of one sequence, which the sequences that are drafted for take from each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.drafters.draft_draws import DraftTraits
from penstock.runtime.drafters.drafter import Draft, NoDrafter
from penstock.text.retold import Retold, behind, bytes_of, whole
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.runtime.executor import Executor

_TOKEN_BYTES: Final = 4  # of text, for each token of a lane, that is told at once
_KNOWN: Final = 16  # of the target's tokens that are kept of a sequence


@dataclass(slots=True)
class _Row:
    """A sequence.

    Attributes:
        text: in the draft model's tokens.
        last: the target's last tokens.
    """

    text: Retold
    last: tuple[int, ...]


@dataclass(slots=True)
class _Lane:
    """Memory of one sequence: `held` tokens have entries there; `asked` tells when it was last used."""

    slot: int | None = None
    held: list[int] = field(default_factory=list)
    asked: int = 0


@dataclass(slots=True)
class _Going:
    """What is being drafted in a lane; `mark`: the target's control token behind it, if one was drafted."""

    slot: int
    lane: int
    most: int
    drafts: list[int] = field(default_factory=list)
    mark: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """Of the target, and of the draft model."""

    target: Tokenizer
    draft: Tokenizer


class TextDrafter(NoDrafter):
    """Its most probable tokens, as long as they are text. `most` as in Drafter."""

    def __init__(
        self, executor: Executor, builder: BatchBuilder, words: Vocabularies, traits: DraftTraits, lanes: int
    ) -> None:
        """`builder` has a row for each lane, of `traits.longest` tokens and those that are drafted."""
        self.most = traits.most
        self._executor, self._builder = executor, builder
        self._decoding = executor.decoding(builder)
        self._words, self._traits = words, traits
        self._rows: dict[int, _Row] = {}
        self._lanes = [_Lane() for _ in range(lanes)]
        self._marks = _marks(words)
        self._clock = 0
        each = builder.tables[0].shape[1]
        for lane in range(lanes):
            blocks = tuple(range(lane * each, (lane + 1) * each))
            builder.add_row(NewSequence(lane, "", 0, (), (), 0, (blocks,), SamplingParams()))

    def begin(self, new: NewSequence) -> None:
        """As Drafter. Nothing is drafted for sequences with media."""
        self.release(new.slot)
        if new.media or new.encoder is not None:
            return
        self._rows[new.slot] = _Row(Retold(self._words.draft, _TOKEN_BYTES * self._traits.longest), ())
        self.take(new.slot, (*new.prompt_ids, *new.generated_ids))

    def take(self, slot: int, tokens: Sequence[int]) -> None:
        """As Drafter."""
        if slot in self._rows:
            row = self._rows[slot]
            row.last = (*row.last, *tokens)[-_KNOWN:]
            row.text.add(bytes_of(self._words.target, tokens))

    def release(self, slot: int) -> None:
        """As Drafter."""
        self._rows.pop(slot, None)
        for lane in self._lanes:
            if lane.slot == slot:
                lane.slot = None

    def propose(self, wanted: Mapping[int, int]) -> Sequence[Draft]:
        """As Drafter. Where a text ends inside a character there is no draft; nor before all of it was computed."""
        self._clock += 1
        going, spans = list[_Going](), list[ScheduledTokens]()
        left = self._traits.max_tokens
        for slot, most in wanted.items():
            row = self._rows.get(slot)
            ids = row.text.ids(self._traits.longest) if row is not None and left else None
            if not ids or (place := self._lane(slot)) is None:
                continue
            lane = self._lanes[place]
            begin = min(_in_common(lane.held, ids), len(ids) - 1)
            end = min(len(ids), begin + left)
            left -= end - begin
            lane.held = ids[:end]
            spans.append(_span(place, begin, ids[begin:end], end == len(ids)))
            if end == len(ids):
                going.append(_Going(slot, place, most))
        logits = self._run(spans) if spans else None
        found = list(going)
        while going := self._drawn(logits, going):
            logits = self._run([self._ahead(one) for one in going])
        return [draft for one in found if (draft := self._told(one)).tokens]

    def _lane(self, slot: int) -> int | None:
        """The lane of a slot, its own or the one that was not used for the longest; None where all were just used."""
        own = next((place for place, lane in enumerate(self._lanes) if lane.slot == slot), None)
        place = min(range(len(self._lanes)), key=lambda one: self._lanes[one].asked) if own is None else own
        lane = self._lanes[place]
        if own is None and lane.slot is not None and lane.asked >= self._clock - 1:
            return None
        lane.slot, lane.asked = slot, self._clock
        return place

    def _drawn(self, logits: Any, going: Sequence[_Going]) -> list[_Going]:
        """Takes a token for each of these rows [n, vocab]; those that go on."""
        if not going:
            return []
        with self._builder.place.guard():
            tokens, chances = _best(logits, self._traits.least_probability > 0.0)
        kept = []
        for one, token, chance in zip(going, tokens, chances, strict=True):
            if chance < self._traits.least_probability:
                continue
            if token in self._words.draft.special_ids:
                one.mark = self._marks.get(token)
                continue
            one.drafts.append(token)
            if len(one.drafts) < one.most:
                kept.append(one)
        return kept

    def _ahead(self, one: _Going) -> ScheduledTokens:
        lane = self._lanes[one.lane]
        lane.held.append(one.drafts[-1])
        return _span(one.lane, len(lane.held) - 1, lane.held[-1:], sample=True)

    def _told(self, one: _Going) -> Draft:
        """What was drafted, in the target's tokens."""
        said = bytes_of(self._words.draft, one.drafts)
        text = said[: whole(said)].decode("utf-8", "replace")
        told = behind(self._words.target, self._rows[one.slot].last, text)
        if one.mark is not None and (told or not text):
            told.append(one.mark)
        tokens = tuple(takewhile(lambda token: token < self._traits.target_vocab_size, told[: one.most]))
        return Draft(one.slot, tokens if len(tokens) >= max(1, self._traits.least) else ())

    def _run(self, spans: Sequence[ScheduledTokens]) -> Any:
        """Logits [n, vocab] behind those n of these spans that are sampled; None for none."""
        ends = np.cumsum([len(span.tokens) for span in spans])
        wanted = [int(end) - 1 for span, end in zip(spans, ends, strict=True) if span.sample]
        with self._builder.place.guard():
            if self._decoding is not None and len(wanted) == ends[-1] and self._decoding.fill(tuple(spans)):
                return self._decoding.run()
            self._executor.forward(self._builder.build(spans, wanted))
            return self._executor.logits() if wanted else None


def _marks(words: Vocabularies) -> dict[int, int]:
    """The target's control tokens by those of the draft model that are written as they are."""
    pairs = ((mark, words.target.token_to_id(words.draft.piece(mark) or "")) for mark in words.draft.special_ids)
    return {mark: same for mark, same in pairs if same is not None and same in words.target.special_ids}


def _span(lane: int, begin: int, tokens: Sequence[int], sample: bool) -> ScheduledTokens:
    return ScheduledTokens(lane, begin, tuple(tokens), 0, 0, sample, ())


def _in_common(held: Sequence[int], ids: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    count = min(len(held), len(ids))
    apart = np.flatnonzero(np.array(held[:count], np.int64) != np.array(ids[:count], np.int64))
    return int(apart[0]) if len(apart) else count


def _best(logits: Any, asked: bool) -> tuple[list[int], list[float]]:
    """The most probable token of each row, and its probability where that is asked for."""
    import torch

    values = torch.as_tensor(logits)
    tokens = values.argmax(-1)
    if not asked:
        return tokens.tolist(), [1.0] * len(tokens)
    return tokens.tolist(), values.float().softmax(-1).amax(-1).tolist()
