"""An engine that is told to hold still, for as long as somebody works on what stands around it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from penstock.core.policies.order import Admission
from penstock.core.sequence import Sequence as Queued


class Control(str, Enum):
    """What an engine can be told about all of its requests."""

    ABORT = "abort"  # end those there are; those that come wait
    WAIT = "wait"  # answer those there are; those that come wait
    KEEP = "keep"  # compute nothing: all stay where they are
    RETRACT = "retract"  # the same, and those that run go back to the queue
    RESUME = "resume"
    FLUSH = "flush"  # forget every cached prefix that nobody uses


class PauseGate:
    """Requests that come while an engine is paused wait until it goes on.

    Attributes:
        until: arrival numbers from this one on wait; None while nothing is paused.
        frozen: nothing is computed at all.
    """

    name = "paused"
    passable = True
    until_release = False

    def __init__(self) -> None:
        self.until: int | None = None
        self.frozen = False

    def state(self, waiting: Sequence[Queued]) -> int:
        """0 while it goes on, 2 while it is frozen, 3 while some of those that wait have their turn before it rests,
        else 1 while it is paused."""
        if self.frozen or self.until is None:
            return 2 if self.frozen else 0
        return 3 if any(one.order < self.until for one in waiting) else 1

    def set(self, control: Control, arrivals: int) -> None:
        """Pauses or goes on; `arrivals` is the number of the next request."""
        self.frozen = control in (Control.KEEP, Control.RETRACT)
        held = arrivals if self.until is None else self.until  # who waits already waits on
        self.until = None if control is Control.RESUME else held

    def rests(self, waiting: Sequence[Queued], under_way: bool) -> bool:
        """Whether nothing is to be done although requests wait, unless a step goes on with what is `under_way`."""
        if self.until is None or self.frozen:
            return self.frozen
        return not under_way and all(one.order >= self.until for one in waiting)

    def holds(self, admission: Admission) -> bool:
        return self.until is not None and admission.sequence.order >= self.until
