"""What the scheduler notes of a plan: while it makes it, and until it is answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.core.protocol import ScheduledTokens
from penstock.core.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """A plan being made."""

    step: int
    budget: int
    spans: dict[Sequence, ScheduledTokens] = field(default_factory=dict)
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Sent:
    """One row of an outstanding plan: whose it is, and up to where its entries exist once it has run."""

    sequence: Sequence
    row: int
    start: int
    end: int
    sample: bool
