"""Which adapter lies in which slot while sequences run: most are idle, and the one used least recently gives way."""

from __future__ import annotations

from typing import Protocol

from penstock.config.adapters import AdapterUse
from penstock.core.policies.order import Admission
from penstock.core.sequence import Sequence, SequenceState


class AdapterFiles(Protocol):
    """What reads adapters, beside the steps."""

    def here(self, uses: tuple[AdapterUse, ...]) -> bool:
        """Whether all are in memory, or cannot be read."""

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """Begins to read those that are not, which stay until others are asked for."""

    def lend(self, placed: tuple[tuple[int, AdapterUse], ...]) -> None:
        """They stay until other ones get their slots."""


class AdapterGate:
    """A sequence waits until its adapters are in memory and have slots.

    Slots of adapters that no running sequence has are free to be taken. Where there are too few, no adapter comes in
    and no sequence with one of those that are to give way starts until the oldest sequence that lacks a slot has it:
    an adapter in steady use starves nobody. Adapters that left memory while their sequence was queued are read again
    for one sequence at a time, that one if there is one.
    """

    name = "adapter"
    passable = True
    until_release = False

    def __init__(self, slots: int, files: AdapterFiles) -> None:
        """Slots are numbered from 1 to `slots`."""
        self._files = files
        self._reading: Sequence | None = None  # for whom adapters are read again
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[str, int] = {}  # by digest, used least recently first
        self._users: dict[str, list[Sequence]] = {}
        self._oldest: Sequence | None = None  # of those that lack a slot
        self._giving_way: frozenset[str] = frozenset()

    def holds(self, admission: Admission) -> bool:
        sequence = admission.sequence
        if not sequence.request.adapters:
            return False
        wanted = dict.fromkeys(use.digest for use in sequence.request.adapters)
        if self._oldest is not None and self._oldest.state is not SequenceState.WAITING:
            self._oldest, self._giving_way = None, frozenset()
        missing = [digest for digest in wanted if digest not in self._slot_of]
        if self._oldest not in (None, sequence) and (missing or not self._giving_way.isdisjoint(wanted)):
            return True
        if not self._here(sequence):
            return True
        if not self._make_room(len(missing), wanted):
            self._oldest = sequence
            others = [digest for digest in self._slot_of if digest not in wanted]
            self._giving_way = frozenset(others[: len(missing) - len(self._free)])
            return True
        for digest in missing:
            self._slot_of[digest] = self._free.pop()
        for digest in wanted:
            self._slot_of[digest] = self._slot_of.pop(digest)
            self._users[digest] = [*self._running(digest), sequence]
        sequence.adapter_slots = tuple((self._slot_of[use.digest], use) for use in sequence.request.adapters)
        self._files.lend(sequence.adapter_slots)
        return False

    def _here(self, sequence: Sequence) -> bool:
        """Whether a sequence's adapters are in memory; else they are read, once no other sequence's are."""
        if self._reading is not None and self._reading.state is not SequenceState.WAITING:
            self._reading = None
        if self._files.here(sequence.request.adapters):
            if self._reading is sequence:
                self._reading = None
            return True
        if self._reading is None:
            self._reading = sequence
            self._files.read(sequence.request.adapters)
        return False

    def _make_room(self, slots: int, wanted: dict[str, None]) -> bool:
        """Frees slots of idle adapters that are not wanted, as far as needed; whether there are so many now."""
        for digest in list(self._slot_of):
            if len(self._free) >= slots:
                break
            if digest not in wanted and not self._running(digest):
                self._free.append(self._slot_of.pop(digest))
                del self._users[digest]
        return len(self._free) >= slots

    def _running(self, digest: str) -> list[Sequence]:
        return [one for one in self._users.get(digest, ()) if one.state is SequenceState.RUNNING]
