"""Which running sequences a plan may be made of, and of how many tokens, while others are in flight.

Where a step passes through stages, as many plans are in flight as there are stages, and a stage rests whenever there is
none for it. Plans of equal size keep all of them busy (micro-batches: Huang et al., GPipe, 1811.06965). Prompts are
dealt in pieces that become smaller with what is left of them (Polychronopoulos and Kuck 1987, guided self-scheduling):
stages behind the first wait for the first piece, and those before the last for the last one.
"""

from __future__ import annotations

from collections import abc
from itertools import islice
from typing import Protocol

from penstock.config.options import SchedulerOptions
from penstock.core.sequence import Sequence

MOST_HELD_SHARE = 1 / 4  # of the batch: where more wait for their tokens, a step without them gains less than it costs
LEAST_PIECE = 128  # tokens of prompts in a plan: with fewer, reading the weights takes longer than multiplying by them
PIECES = 4  # a stage, of what is left of prompts

Dealt = list[tuple[Sequence, int]]


class Dealing(Protocol):
    """Asked once for each plan: `deal`, then `budget` with what that gave."""

    def deal(self, running: abc.Sequence[Sequence]) -> Dealt | None:
        """Running sequences, in order, with the tokens they may have in this plan; None: no plan before a result."""

    def budget(self, dealt: Dealt, waiting: abc.Sequence[Sequence]) -> int:
        """Most tokens of the plan, at least one."""


class Together:
    """All sequences are in every plan; a plan that is made ahead names tokens that are not known yet."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._budget = options.max_num_batched_tokens

    def deal(self, running: abc.Sequence[Sequence]) -> Dealt | None:
        dealt = [(sequence, sequence.remaining) for sequence in running]
        rest = [sequence for sequence, length in dealt if not length]
        held = sum(one.in_flight > 0 and one.request.waits_for_tokens for one in rest) if rest else 0
        return None if held > MOST_HELD_SHARE * len(dealt) else dealt

    def budget(self, dealt: Dealt, waiting: abc.Sequence[Sequence]) -> int:
        return self._budget


class Staged:
    """As many plans as there are stages, each of other sequences: whose token is in flight is in no other plan.

    Pieces of one prompt follow each other without waiting: each stage writes their entries in that order.
    """

    def __init__(self, options: SchedulerOptions, least: int = LEAST_PIECE) -> None:
        """`least`: tokens of prompts that a plan may have in any case."""
        self._options = options
        self._least = least

    def deal(self, running: abc.Sequence[Sequence]) -> Dealt:
        dealt = [(sequence, 0 if sequence.in_flight else sequence.remaining) for sequence in running]
        ready = [sequence for sequence, length in dealt if length == 1]
        decoding = len(ready) + sum(sequence.in_flight > 0 for sequence in running)
        share = -(-decoding // self._options.stages)
        if len(ready) <= share:
            return dealt
        # who was served longest ago comes first, but before all others the first in order, for whom others give way
        served = sorted(ready[1:], key=lambda sequence: sequence.last_step)
        chosen = {ready[0], *served[: share - 1]}
        chosen |= {sequence.partner for sequence in chosen if sequence.partner is not None}  # who draw together
        return [(sequence, 0 if length == 1 and sequence not in chosen else length) for sequence, length in dealt]

    def budget(self, dealt: Dealt, waiting: abc.Sequence[Sequence]) -> int:
        options = self._options
        rows = sum(length == 1 for _, length in dealt)
        prompts = sum(length for _, length in dealt if length > 1)
        next_ones = list(islice(waiting, options.max_num_seqs))
        if options.whole_prompts or any(one.request.media for one in (*next_ones, *(one for one, _ in dealt))):
            return options.max_num_batched_tokens  # of which nothing can be cut
        prompts += sum(sequence.known for sequence in next_ones)
        piece = max(self._least, -(-prompts // (PIECES * options.stages)))
        return min(options.max_num_batched_tokens, rows + piece)


def dealing_for(options: SchedulerOptions) -> Dealing:
    """How plans are dealt where steps pass through so many stages."""
    return Staged(options) if options.stages > 1 else Together(options)
