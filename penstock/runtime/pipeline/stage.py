"""A stage: a part of the model with the memory of its layers, which takes steps as they come."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from penstock.runtime.adapters import OtherRooms
from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.mover import MOVES, Mover
from penstock.runtime.pipeline.steps import Link, LogitsPart, StageOps, StageResult, StageStep
from penstock.runtime.replay import Rows

log = logging.getLogger(__name__)


class Stage:
    """Runs its part on each step, and hands on what that gives. A step that fails is told of; those behind it go on.

    Attributes:
        fast, describe: as of its executor.
        mover: carries its share of blocks to and from a lower tier.
        rooms: has what adapters change of its layers; None where there are none.
    """

    def __init__(
        self, executor: Executor, memory: KVMemory, *, last: bool, head: bool = True, taps: Sequence[str] = ()
    ) -> None:
        """`taps` are those of its part; `last`: it ends with the final norm, and has the head if `head` says so."""
        self._executor, self._memory = executor, memory
        self.mover = Mover()
        self.rooms: OtherRooms | None = None
        self._unplaced: dict[int, str] = {}  # slots whose adapters could not be placed, and why
        self.fast, self.describe = executor.fast, executor.describe
        self._last, self._head = last, last and head
        self._taps = tuple(taps)

    @torch.inference_mode()
    def serve(self, source: Link, target: Link) -> None:
        """Takes steps until there are no more."""
        while (message := source.receive()) is not None:
            if isinstance(message, StageOps):
                self._apply(message)
                if not self._last:
                    target.send(message)
                continue
            assert isinstance(message, StageStep)
            for given in self.run(message):
                target.send(given)

    def _apply(self, told: StageStep | StageOps) -> None:
        for op in told.ops:
            (self.mover.start if op.kind in MOVES else self._memory.apply)(op)
        if self.rooms is None:
            return
        if isinstance(told, StageOps) and told.reads:
            self.rooms.read(told.reads)
        for slot, use in told.places:
            self._unplaced.pop(slot, None)
            try:
                self.rooms.place(slot, use)
            except Exception as error:  # of which those hear who compute with it
                log.exception("an adapter cannot be placed")
                self._unplaced[slot] = _said(error)

    def run(self, step: StageStep) -> Iterator[StageStep | StageResult | LogitsPart]:
        """Carries out a step, and gives what it has for the next stage, or for the lead."""
        started = perf_counter()
        self._apply(step)
        if step.error is None:
            try:
                step = self._computed(step)
            except Exception as error:
                log.exception("a stage failed")
                step = replace(step, states=None, error=_said(error))
        found = self._found(step) if self._last else step
        seconds = (*step.seconds, perf_counter() - started)
        yield replace(found, seconds=seconds)
        for number, rows in enumerate(step.logits[1:] if self._head else ()):
            yield LogitsPart(step.number, number + 1, *self._logits(rows, found.error))

    def _computed(self, step: StageStep) -> StageStep:
        if self._unplaced and step.batch.adapter_slot is not None:
            for slot in self._unplaced.keys() & set(step.batch.adapter_slot.reshape(-1).tolist()):
                raise RuntimeError(self._unplaced[slot])
        self._executor.forward(step.batch, step.states)
        taps = {**step.taps, **{name: self._executor.tap(name).clone() for name in self._taps}}
        states = None if self._last else self._executor.states().each(torch.clone)
        return replace(step, states=states, taps=taps)

    def _found(self, step: StageStep) -> StageResult:
        """What the lead gets in one message: most steps need no other."""
        asked = step.logits if self._head else ()
        logits, error = self._logits(asked[0], step.error) if asked else (None, step.error)
        hidden = self._executor.hidden().clone() if step.hidden and error is None else None
        return StageResult(step.number, logits, hidden, step.taps, step.seconds, error)

    def _logits(self, rows: Rows | None, error: str | None) -> tuple[Tensor | None, str | None]:
        if error is not None:
            return None, error
        try:
            return self._executor.logits(rows).clone(), None
        except Exception as failure:
            log.exception("a stage failed")
            return None, _said(failure)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
