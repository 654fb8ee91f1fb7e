"""What several HTTP processes have counted, as one: sums that never go back, whoever dies or says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from penstock.config.engine_stats import EngineStats
from penstock.host import front_messages as front

PATIENCE_S = 1.0


class Counting(Protocol):
    """An HTTP process that counts."""

    def tell(self, message: front.Down) -> None:
        """Sends it a message."""


class Figures:
    """Collects the figures of HTTP processes when one of them is asked for all.

    What was told once is kept, of the dead too, so that whoever is asked next tells no less. All who ask while figures
    are collected share the next collection.
    """

    def __init__(
        self, stats: Callable[[], Awaitable[Mapping[str, EngineStats]]], there: Callable[[], Iterable[Counting]]
    ) -> None:
        """`stats` gives what engines have counted, by model, `there` the processes that answer now."""
        self._stats, self._there = stats, there
        self._last: dict[Counting, bytes] = {}
        self._of_the_dead = b""
        self._asking: list[tuple[Counting, int]] = []
        self._wanted = False
        self._missing: set[Counting] = set()
        self._complete = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def asked(self, process: Counting, number: int) -> None:
        """A process wants the figures of all, under this number."""
        self._asking.append((process, number))
        self.look()

    def look(self) -> None:
        """Keeps what all have counted by now, for those who die without having been asked."""
        self._wanted = True
        if self._task is None:
            self._task = asyncio.create_task(self._collect())

    def told(self, process: Counting, counted: bytes) -> None:
        """A process told its own."""
        self._last[process] = counted
        self._arrived(process)

    def left(self, process: Counting) -> None:
        """A process has gone. What it counted stays, what there was of it is there no more."""
        self._of_the_dead = summed([self._of_the_dead, lasting(self._last.pop(process, b""))])
        self._asking = [(other, number) for other, number in self._asking if other is not process]
        self._arrived(process)

    async def close(self) -> None:
        """Collects nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _collect(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                asking, self._asking = self._asking, []
                _, stats = await asyncio.gather(self._all_told(), self._stats())
                if asking:
                    counted = await asyncio.to_thread(summed, [self._of_the_dead, *self._last.values()])
                    for process, number in asking:
                        process.tell(front.Figures(number, dict(stats), counted))
        finally:
            self._task = None

    async def _all_told(self) -> None:
        """Waits until all have told, those who say nothing for PATIENCE_S."""
        self._missing = set(self._there())
        self._complete.clear()
        for process in list(self._missing):
            process.tell(front.TellFigures())
        if self._missing:
            waiting = asyncio.ensure_future(self._complete.wait())
            await asyncio.wait((waiting,), timeout=PATIENCE_S)
            waiting.cancel()

    def _arrived(self, process: Counting) -> None:
        self._missing.discard(process)
        if not self._missing:
            self._complete.set()


def summed(texts: Sequence[bytes]) -> bytes:
    """Figures of several processes in Prometheus' text format, added up; what is told once is to be 0 in all others."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    for text in texts:
        family = ""
        for line in text.decode().split("\n"):
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                lines = heads.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line:
                key, value = line.rsplit(" ", 1)
                values = samples.setdefault(family, {})
                values[key] = values.get(key, 0.0) + float(value)
    told = [
        line
        for family, head in heads.items()
        for line in (*head, *(f"{key} {value!r}" for key, value in samples.get(family, {}).items()))
    ]
    return ("\n".join(told) + "\n").encode() if told else b""


def lasting(text: bytes) -> bytes:
    """The figures of a process that has gone: what it counted, without gauges, which say how things are."""
    lines = text.decode().split("\n")
    gauges = {line.split(" ", 3)[2] for line in lines if line.startswith("# TYPE ") and line.endswith(" gauge")}
    kept, family = [], ""
    for line in lines:
        if line.startswith("#"):
            family = line.split(" ", 3)[2]
        if line and family not in gauges:
            kept.append(line)
    return ("\n".join(kept) + "\n").encode() if kept else b""
