"""Who waits, who runs in which row, and which rows may not be used again yet."""

from __future__ import annotations

from bisect import bisect_left, insort

from penstock.core.branch import Branch, BranchState
from penstock.core.policies import Policy
from penstock.core.turns import Turns


class Roster:
    """Branches in policy order, and the rows of the batch.

    Attributes:
        running, waiting: branches, in policy order.
        free_rows: rows that can be taken.
    """

    def __init__(self, rows: int, policy: Policy) -> None:
        self.running: list[Branch] = []
        self.waiting: list[Branch] = []
        self.free_rows = list(range(rows - 1, -1, -1))
        self._num_rows = rows
        self._key = policy.key
        self._turns = Turns()
        self._leaving: dict[int, list[int]] = {}  # rows, by the step after which they may be used again
        self._released: list[int] = []  # rows the runner has to be told of

    def enqueue(self, branch: Branch) -> None:
        """Puts a branch into the queue."""
        branch.state = BranchState.WAITING
        if branch.turn < 0:
            self._turns.give(branch)
        insort(self.waiting, branch, key=self._key)

    def dequeue(self, branch: Branch) -> None:
        """Takes a waiting branch out of the queue."""
        del self.waiting[self._position(self.waiting, branch)]

    def seat(self, branch: Branch) -> None:
        """Gives a branch that left the queue a row."""
        self._turns.reach(branch)
        branch.row = self.free_rows.pop()
        branch.state = BranchState.RUNNING
        insort(self.running, branch, key=self._key)

    def unseat(self, branch: Branch, committed_step: int) -> None:
        """Takes a running branch out; its row is free after the last step that uses it."""
        del self.running[self._position(self.running, branch)]
        if branch.last_step > committed_step:
            self._leaving.setdefault(branch.last_step, []).append(branch.row)
        else:
            self.free_rows.append(branch.row)
        if branch.introduced:
            self._released.append(branch.row)
        branch.row, branch.introduced = -1, False

    def finish(self, branch: Branch) -> None:
        """A branch that neither waits nor runs any more has ended."""
        branch.state = BranchState.FINISHED
        self._turns.settle(branch)

    def step_over(self, step: int) -> None:
        """Rows that waited for this step are free now."""
        if step in self._leaving:
            self.free_rows += self._leaving.pop(step)

    def later(self, branch: Branch) -> list[Branch]:
        """Running branches behind a running one in order."""
        return self.running[self._position(self.running, branch) + 1 :]

    def take_released(self) -> tuple[int, ...]:
        """Rows given up since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def _position(self, queue: list[Branch], branch: Branch) -> int:
        return bisect_left(queue, self._key(branch), key=self._key)

    def check_integrity(self) -> None:
        """Raises AssertionError if orders, states or rows disagree."""
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=self._key), "a queue is out of order"
        assert all(branch.hold is not None and branch.row >= 0 for branch in self.running)
        assert all(branch.hold is None and branch.row < 0 for branch in self.waiting)
        leaving = [row for rows in self._leaving.values() for row in rows]
        rows = [branch.row for branch in self.running] + self.free_rows + leaving
        assert sorted(rows) == list(range(self._num_rows)), "a row is lost or doubled"
