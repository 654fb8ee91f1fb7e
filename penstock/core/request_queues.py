"""Who waits, who runs in which request slot, and which slots may not be used again yet."""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.core.policies.order import Policy
from penstock.core.policies.turns import Turns
from penstock.core.sequence import Sequence, SequenceState


class RequestQueues:
    """Sequences in policy order, and the request slots of the batch.

    Attributes:
        running, waiting: sequences, in policy order.
        free_slots: slots that can be taken.
    """

    def __init__(self, slots: int, policy: Policy) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.free_slots = list(range(slots - 1, -1, -1))
        self._num_slots = slots
        self._key = policy.key
        self._turns = Turns()
        self._leaving: dict[int, list[int]] = {}  # slots, by the step after which they may be used again
        self._released: list[int] = []  # slots the runner has to be told of

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue."""
        sequence.state = SequenceState.WAITING
        if sequence.turn < 0:
            self._turns.give(sequence)
        insort(self.waiting, sequence, key=self._key)

    def dequeue(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of the queue."""
        del self.waiting[self._position(self.waiting, sequence)]

    def assign_slot(self, sequence: Sequence) -> None:
        """Gives a sequence that left the queue a slot."""
        self._turns.reach(sequence)
        sequence.slot = self.free_slots.pop()
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=self._key)

    def free_slot(self, sequence: Sequence, committed_step: int) -> None:
        """Takes a running sequence out; its slot is free after the last step that uses it."""
        del self.running[self._position(self.running, sequence)]
        if sequence.last_step > committed_step:
            self._leaving.setdefault(sequence.last_step, []).append(sequence.slot)
        else:
            self.free_slots.append(sequence.slot)
        if sequence.introduced:
            self._released.append(sequence.slot)
        sequence.slot, sequence.introduced = -1, False

    def reintroduce(self, sequence: Sequence) -> None:
        """What the runner knows of a running sequence's slot is not true any more: it is told anew."""
        self._released.append(sequence.slot)
        sequence.introduced = False

    def finish(self, sequence: Sequence) -> None:
        """A sequence that neither waits nor runs any more has ended."""
        sequence.state = SequenceState.FINISHED
        self._turns.settle(sequence)

    def step_over(self, step: int) -> None:
        """Slots that waited for this step are free now."""
        if step in self._leaving:
            self.free_slots += self._leaving.pop(step)

    def later(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences behind a running one in order."""
        return self.running[self._position(self.running, sequence) + 1 :]

    def take_released(self) -> tuple[int, ...]:
        """Slots given up since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def _position(self, queue: list[Sequence], sequence: Sequence) -> int:
        return bisect_left(queue, self._key(sequence), key=self._key)

    def check_integrity(self) -> None:
        """Raises AssertionError if orders, states or slots disagree."""
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._key), "a queue is out of order"
        assert all(sequence.allocation is not None and sequence.slot >= 0 for sequence in self.running)
        assert all(sequence.allocation is None and sequence.slot < 0 for sequence in self.waiting)
        leaving = [slot for slots in self._leaving.values() for slot in slots]
        slots = [sequence.slot for sequence in self.running] + self.free_slots + leaving
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or doubled"
