"""Who waits, who runs in which row, and which rows may not be used again yet."""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.core.policies import Policy
from penstock.core.sequence import Sequence, SequenceState
from penstock.core.turns import Turns


class RequestQueues:
    """Sequences in policy order, and the rows of the batch.

    Attributes:
        running, waiting: sequences, in policy order.
        free_rows: rows that can be taken.
    """

    def __init__(self, rows: int, policy: Policy) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.free_rows = list(range(rows - 1, -1, -1))
        self._num_rows = rows
        self._key = policy.key
        self._turns = Turns()
        self._leaving: dict[int, list[int]] = {}  # rows, by the step after which they may be used again
        self._released: list[int] = []  # rows the runner has to be told of

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue."""
        sequence.state = SequenceState.WAITING
        if sequence.turn < 0:
            self._turns.give(sequence)
        insort(self.waiting, sequence, key=self._key)

    def dequeue(self, sequence: Sequence) -> None:
        """Takes a waiting sequence out of the queue."""
        del self.waiting[self._position(self.waiting, sequence)]

    def seat(self, sequence: Sequence) -> None:
        """Gives a sequence that left the queue a row."""
        self._turns.reach(sequence)
        sequence.row = self.free_rows.pop()
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=self._key)

    def unseat(self, sequence: Sequence, committed_step: int) -> None:
        """Takes a running sequence out; its row is free after the last step that uses it."""
        del self.running[self._position(self.running, sequence)]
        if sequence.last_step > committed_step:
            self._leaving.setdefault(sequence.last_step, []).append(sequence.row)
        else:
            self.free_rows.append(sequence.row)
        if sequence.introduced:
            self._released.append(sequence.row)
        sequence.row, sequence.introduced = -1, False

    def finish(self, sequence: Sequence) -> None:
        """A sequence that neither waits nor runs any more has ended."""
        sequence.state = SequenceState.FINISHED
        self._turns.settle(sequence)

    def step_over(self, step: int) -> None:
        """Rows that waited for this step are free now."""
        if step in self._leaving:
            self.free_rows += self._leaving.pop(step)

    def later(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences behind a running one in order."""
        return self.running[self._position(self.running, sequence) + 1 :]

    def take_released(self) -> tuple[int, ...]:
        """Rows given up since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def _position(self, queue: list[Sequence], sequence: Sequence) -> int:
        return bisect_left(queue, self._key(sequence), key=self._key)

    def check_integrity(self) -> None:
        """Raises AssertionError if orders, states or rows disagree."""
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._key), "a queue is out of order"
        assert all(sequence.hold is not None and sequence.row >= 0 for sequence in self.running)
        assert all(sequence.hold is None and sequence.row < 0 for sequence in self.waiting)
        leaving = [row for rows in self._leaving.values() for row in rows]
        rows = [sequence.row for sequence in self.running] + self.free_rows + leaving
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost or doubled"
