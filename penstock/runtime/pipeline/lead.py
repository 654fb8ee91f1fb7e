"""The stages as the lead sees them: steps are launched, and what they give is waited for, the oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from penstock.config.adapters import AdapterUse
from penstock.core.protocol import CacheOp, CacheOpKind
from penstock.layers.batch import Batch
from penstock.runtime.pipeline.steps import Link, LogitsPart, Placed, StageOps, StageResult, StageStep
from penstock.runtime.replay import Rows

if TYPE_CHECKING:
    from penstock.runtime.batch_builder import BatchBuilder


HeadHere = Callable[[Tensor, Rows | None], Tensor]
"""Makes logits [n, vocab] float32 of the final hidden states [L, hidden_size], of these rows or all."""


_TOLD_EVER = (CacheOpKind.CANCEL, CacheOpKind.FORGET)  # also where no step follows for which they were told


class StageError(RuntimeError):
    """A stage could not compute a step; others may go on."""


@dataclass(slots=True)
class StageTimes:
    """How busy stages were while there was a step to compute.

    Attributes:
        seconds: in which there was one.
        computing: of those, what each stage has computed.
    """

    seconds: float
    computing: list[float]

    @property
    def waiting(self) -> float:
        """The stages' share of that time in which they waited, 0 where there was none."""
        return 1 - sum(self.computing) / (len(self.computing) * self.seconds) if self.seconds else 0.0


class StagedSteps:
    """Steps that pass through stages, as a runner launches them.

    Attributes:
        describe, fast: as of an executor.
        times: how busy the stages were.
        step_times: of the step that was waited for last, as in StepTimings.
    """

    def __init__(
        self,
        links: tuple[Link, Link],
        stages: int,
        describe: str,
        *,
        fast: bool,
        close: Callable[[], None],
        dead: Callable[[Exception], Exception] = lambda error: error,
        head: HeadHere | None = None,
    ) -> None:
        """`links`: to the first stage, and from the last, which has the head unless it is here.

        `close` ends the stages, and waits for it; `dead` makes the error of a stage that has ended unasked.
        """
        self._first, self._results = links
        self.describe, self.fast = describe, fast
        self.times = StageTimes(0.0, [0.0] * stages)
        self.step_times = (0.0, 0.0)
        self._close, self._dead = close, dead
        self._head = head
        self._ops: list[CacheOp] = []
        self._places: list[Placed] = []
        self._launched = 0  # steps, in all
        self._waited_for: deque[StageStep] = deque()
        self._oldest: tuple[StageStep, StageResult] | None = None
        self._calls = 0  # of the oldest step's logits that were taken
        self._busy_since = 0.0

    def apply(self, op: CacheOp) -> None:
        """Has every stage carry it out ahead of the next step."""
        self._ops.append(op)

    def pass_on(self) -> None:
        """Has every stage carry out what it is to ahead of the next step, whenever that comes."""
        if self._ops or self._places:
            self._first.send(StageOps(*self._taken()))

    def _taken(self) -> tuple[tuple[CacheOp, ...], tuple[Placed, ...]]:
        ops, self._ops = tuple(self._ops), []
        places, self._places = tuple(self._places), []
        return ops, places

    def read(self, uses: tuple[AdapterUse, ...]) -> None:
        """As `runtime.adapters.OtherRooms`, of every stage."""
        self._first.send(StageOps(reads=uses))

    def place(self, slot: int, use: AdapterUse) -> None:
        """As `runtime.adapters.OtherRooms`: with the next step, which those behind it go on from."""
        self._places.append((slot, use))

    def close(self) -> None:
        """Ends the stages."""
        self.abort()
        self._close()

    def launch(self, batch: Batch, logits: Sequence[Rows | None], *, hidden: bool) -> None:
        """Begins a step; `logits` are the calls that follow once it is over, `hidden` whether states are asked for."""
        if not self._waited_for:
            self._busy_since = perf_counter()
        ops, places = self._taken()
        hidden = hidden or (self._head is not None and bool(logits))
        step = StageStep(self._launched, ops, batch, tuple(logits), hidden, places=places)
        self._launched += 1
        self._waited_for.append(step)
        self._first.send(step)

    def advance(self) -> None:
        """Waits for the oldest step; what is asked from then on is asked of it.

        Raises:
            StageError: a stage has failed to compute it. EngineDeadError: a stage has ended.
        """
        step = self._waited_for.popleft()
        result = self._next(step.number)
        assert isinstance(result, StageResult)
        now = perf_counter()
        took = now - self._busy_since
        self.times.seconds += took
        self._busy_since = now
        for stage, seconds in enumerate(result.seconds):
            self.times.computing[stage] += seconds
        self.step_times = (took, sum(result.seconds) / len(self.times.computing))
        self._oldest, self._calls = (step, result), 0
        _raise(result.error)

    def _next(self, number: int) -> StageResult | LogitsPart:
        """The next message of a step; those of steps that were given up come before."""
        while True:
            message = self._results.receive()
            if message is None:
                raise self._dead(StageError("a stage has ended"))
            assert isinstance(message, (StageResult, LogitsPart))
            if message.number == number:
                return message

    def logits(self, rows: Rows | None = None) -> Tensor:
        """Of the oldest step, in the order in which they were asked for when it was launched."""
        step, result = self._current
        asked = step.logits[self._calls]
        if (asked is None) != (rows is None) or (rows is not None and not np.array_equal(rows, np.asarray(asked))):
            raise ValueError(f"logits of {rows} were not asked for when the step was launched, but of {asked}")
        self._calls += 1
        if self._head is not None:
            return self._head(self.hidden(), rows)
        values = result.logits
        if self._calls > 1:
            part = self._next(step.number)
            assert isinstance(part, LogitsPart)
            _raise(part.error)
            values = part.values
        assert values is not None
        return values

    def hidden(self) -> Tensor:
        """Of the oldest step."""
        hidden = self._current[1].hidden
        assert hidden is not None, "hidden states were not asked for when the step was launched"
        return hidden

    def tap(self, name: str, count: int | None = None) -> Tensor:
        """Of the oldest step."""
        return self._current[1].taps[name]

    @property
    def _current(self) -> tuple[StageStep, StageResult]:
        assert self._oldest is not None, "no step was waited for"
        return self._oldest

    def decoding(self, builder: BatchBuilder) -> Any:
        """Nothing is computed here."""
        return None

    def abort(self) -> None:
        """Gives up outstanding steps: stages compute them all the same, and what they give is dropped."""
        self._waited_for.clear()
        self._ops = [op for op in self._ops if op.kind in _TOLD_EVER]
        self._oldest = None


def _raise(error: str | None) -> None:
    if error is not None:
        raise StageError(f"a stage failed: {error}")
