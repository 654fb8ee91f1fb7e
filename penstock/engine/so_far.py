"""Requests that go on in another engine than the one they began in: from the tokens that their readers have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.request import FinishReason

if TYPE_CHECKING:
    from penstock.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SoFar:
    """What is known of a request's answers.

    Attributes:
        tokens: by sequence, those generated; None of a sequence that has ended.
        scored: prompt positions whose log-probabilities were told.
    """

    tokens: tuple[tuple[int, ...] | None, ...]
    scored: int = 0


def go_on(scheduler: Scheduler, request_id: str, so_far: SoFar) -> None:
    """Lets the sequences of a request that was queued just now go on from there; those that have ended end again."""
    told = [sequence for sequence in scheduler.ledger.sequences(request_id) if not sequence.follows]
    for sequence, tokens in zip(told, so_far.tokens, strict=True):
        if tokens is None:
            scheduler.ledger.finish(sequence, FinishReason.CANCELLED)
            continue
        sequence.go_on(tokens)
        scored = 0 if sequence.index else so_far.scored
        sequence.scored += scored
        sequence.reported = bool(tokens or scored)
