"""Whose turn it is: start-time fair queueing over those who send requests (Goyal, Vin, Cheng, SIGCOMM 1996)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.sequence import Sequence


@dataclass(slots=True)
class _Owner:
    """One who sends requests.

    Attributes:
        next: the turn of its next sequence by what it has had.
        last: the turn of its newest sequence, which those in the queue stay behind.
        queued: sequences of its that have not been admitted yet.
    """

    next: int = 0
    last: int = 0
    queued: int = 0


class Turns:
    """Gives each sequence a turn, a point in a time that is counted in tokens: who has had fewer tokens comes sooner.

    A turn is never before that of a sequence admitted already, so that nobody who runs is overtaken in order. Turns of
    one owner's sequences in the queue rise, so that of one owner alone they are the order of arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        self._owners: dict[str, _Owner] = {}
        self._charged: dict[Sequence, _Owner] = {}  # an owner may be forgotten meanwhile, and its charge with it

    def give(self, sequence: Sequence) -> None:
        """Sets the turn of a sequence that is queued for the first time; its owner pays for all it asks for."""
        owner = self._owners.setdefault(sequence.request.owner, _Owner())
        if sequence.partner is not None and sequence.follows:
            sequence.turn = sequence.partner.turn  # nobody comes between the two, who lack each other
        else:
            sequence.turn = max(self._now, owner.next, owner.last + 1 if owner.queued else 0)
        owner.last, owner.next = sequence.turn, max(self._now, owner.next) + sequence.longest
        owner.queued += 1
        self._charged[sequence] = owner

    def reach(self, sequence: Sequence) -> None:
        """A sequence is admitted: whoever had no turn yet comes after it."""
        if sequence.cached_tokens is None:  # for the first time
            self._charged[sequence].queued -= 1
        if sequence.turn > self._now:
            self._now = sequence.turn
            past = [name for name, owner in self._owners.items() if not owner.queued and owner.next <= self._now]
            for name in past:
                del self._owners[name]

    def settle(self, sequence: Sequence) -> None:
        """A sequence has ended: what it asked for and did not get is not counted against its owner."""
        owner = self._charged.pop(sequence)
        admitted = sequence.cached_tokens is not None
        owner.queued -= not admitted
        owner.next -= sequence.longest - (len(sequence.tokens) if admitted else 0)
