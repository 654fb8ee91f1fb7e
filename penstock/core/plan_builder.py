"""A plan while it is being made, and what is remembered of it until it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.protocol import EncoderWork, ScheduledTokens, last_sample
from penstock.core.sequence import Sequence


@dataclass(slots=True)
class PlanBuilder:
    """A plan being made.

    Attributes:
        step: its number.
        budget: tokens it may still be given.
        spare: those of them that may be drafts, which leave every sequence a token, and prompts as many as drafts take.
        scheduled: what each sequence computes.
        encoder_work: what is encoded first.
        preempted: whether a sequence was sent back for it.
    """

    step: int
    budget: int
    spare: int = 0
    scheduled: dict[Sequence, ScheduledTokens] = field(default_factory=dict)
    encoder_work: list[EncoderWork] = field(default_factory=list)
    preempted: bool = False

    def schedule(self, sequence: Sequence, length: int, added: tuple[tuple[int, ...], ...]) -> None:
        """Gives a sequence so many known tokens, and its drafts behind them."""
        start = sequence.computed
        end = start + length
        tokens = tuple(sequence.tokens[start:end])
        if len(tokens) < length:
            tokens += (last_sample(sequence.slot),)
        prompt = min(end, sequence.num_prompt) - start if start < sequence.num_prompt else 0
        drafts = sequence.drafts
        states = sequence.allocation.draft_states if drafts and sequence.allocation else ()
        sample = end == sequence.known
        tokens += drafts
        self.scheduled[sequence] = ScheduledTokens(
            sequence.slot, start, tokens, prompt, len(drafts), sample, added, (), states
        )
        sequence.advance(length + len(drafts))
        self.budget -= length + len(drafts)
        self.spare -= len(drafts)

    def withdraw(self, sequence: Sequence) -> bool:
        """Takes back one token's schedule; whether the runner would have been told of new blocks with it."""
        tokens = self.scheduled.pop(sequence)
        sequence.rewind(tokens.start)
        self.budget += len(tokens.tokens)
        return any(tokens.new_blocks)


class InFlight(NamedTuple):
    """What one sequence computes in a step that is not answered yet.

    Attributes:
        sequence, slot: whose, and its request slot.
        start, end: the known tokens that have entries once the step has run.
        sample: whether a token is drawn behind them.
        drafts: tokens computed behind `end`, which count as far as they are accepted.
        shared: the slot whose draw it takes, None for its own.
    """

    sequence: Sequence
    slot: int
    start: int
    end: int
    sample: bool
    drafts: tuple[int, ...] = ()
    shared: int | None = None
