"""What the ranks of one machine wait on for each other while they compute."""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """Of the native library: memory that all ranks of a machine have mapped."""

    @property
    def exchanged_seconds(self) -> float:
        """Time in which steps passed something between ranks so far: waiting, and taking what the others gave."""

    def stop(self) -> None:
        """Has all waiting, now and later and in every rank, raise RuntimeError. Safe to call twice, from any thread."""


class NullGroup:
    """The null form: nothing is exchanged."""

    exchanged_seconds = 0.0

    def stop(self) -> None:
        """Nobody waits."""
