"""What both homes of an engine share: commands in, steps, news out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, RequestError
from penstock.core.policies.pace import Pace
from penstock.core.policies.pause import Control
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine.so_far import SoFar

if TYPE_CHECKING:
    from penstock.engine.loop import Engine
    from penstock.runtime.ranks.alarm import Alarm

MAX_FAILED_STEPS = 3
PACE_S = 0.25  # between two words on how fast steps are
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a driver's news goes."""

    def outputs(self, outputs: list[EngineOutput]) -> None:
        """News of sequences: after an admission an empty output of sequence 0, then what each step produced."""

    def refused(self, request_id: str, error: RequestError) -> None:
        """A request was not admitted."""

    def paced(self, pace: Pace) -> None:
        """How fast steps are now."""


class EngineDriver:
    """An engine and the sink it reports to. Belongs to one thread."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self._engine = engine
        self._sink = sink
        self._admitted: list[EngineOutput] = []
        self._so_far: dict[str, SoFar] = {}  # of requests that wait for adapters or grammars
        self._failed_steps = 0
        self._steps_at_error = -1
        self._unprepared = False
        self._paced_at = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._admitted) or self._engine.has_work or self._unprepared

    @property
    def alarm(self) -> Alarm | None:
        """As of the engine."""
        return self._engine.alarm

    def submit(self, request: EngineRequest, so_far: SoFar | None = None) -> None:
        """Adds a request, or tells the sink why not; one with a grammar is added when that is compiled."""
        self._try(request, self._engine.add, so_far)

    def _try(
        self, request: EngineRequest, add: Callable[[EngineRequest, SoFar | None], bool], so_far: SoFar | None
    ) -> None:
        try:
            if request.ask is not None:
                self._admitted.append(self._engine.answer(request))
            elif add(request, so_far):
                self._admitted.append(EngineOutput(request.request_id, 0))
            elif so_far is not None:
                self._so_far[request.request_id] = so_far
        except RequestError as error:
            self._sink.refused(request.request_id, error)
        except Exception:
            _log.exception("a request could not be added")
            self._sink.refused(request.request_id, RequestError("The engine cannot process this request."))

    def cancel(self, request_id: str) -> None:
        """Ends a request's sequences with the next step; unknown ids are ignored."""
        self._so_far.pop(request_id, None)
        if self._engine.adapters.cancel(request_id) or self._engine.structured.cancel(request_id):
            self._sink.refused(request_id, RequestError("The request was cancelled."))
        self._engine.cancel(request_id)

    def end_reasoning(self, request_id: str) -> None:
        """Ends a request's reasoning, if it has a budget of it; unknown ids are ignored."""
        self._engine.structured.end_reasoning(request_id)

    def control(self, control: Control) -> None:
        """Pauses the engine, has it go on, or forgets its cached prefixes."""
        if control is Control.ABORT:
            self.leave("")
        scheduler = self._engine.scheduler
        if control is Control.FLUSH:
            scheduler.cache.clear()
            return
        for sequence in tuple(scheduler.running) if control is Control.RETRACT else ():
            scheduler.preempt(sequence.request.request_id)
        scheduler.pause.set(control, scheduler.arrivals)

    def leave(self, prefix: str) -> None:
        """Ends all requests whose ids begin so: whoever sent them has gone."""
        there = {sequence.request.request_id for sequence in self._engine.scheduler.ledger.live()}
        for request_id in there.union(self._engine.unqueued):
            if request_id.startswith(prefix):
                self.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def step(self) -> None:
        """Reports admissions, then runs one step, or prepares for later ones. Whatever is raised is the engine's end.

        Raises:
            EngineDeadError: the runner can compute nothing more, or MAX_FAILED_STEPS steps in a row failed as a whole.
        """
        for waited, then in ((self._engine.adapters, self._engine.add), (self._engine.structured, self._engine.admit)):
            for request, error in waited.ready():
                so_far = self._so_far.pop(request.request_id, None)
                if error is not None:
                    self._sink.refused(request.request_id, error)
                else:
                    self._try(request, then, so_far)
        admitted, self._admitted = self._admitted, []
        if admitted:
            self._sink.outputs(admitted)
        if not self._engine.has_work:
            self._unprepared = self._engine.prepare()
            return
        self._unprepared = True
        outputs = self._engine.step()
        if self._engine.dead is not None:
            raise self._engine.dead  # whoever starts another one has its requests go on there, or says that they failed
        if outputs:
            self._sink.outputs(outputs)
        self._tell_pace()
        if any(output.finish_reason is FinishReason.ERROR for output in outputs):
            self._check_health()

    def _tell_pace(self) -> None:
        now = monotonic()
        if now - self._paced_at >= PACE_S and (pace := self._engine.pace()) is not None:
            self._paced_at = now
            self._sink.paced(pace)

    def _check_health(self) -> None:
        """After errors: a step that failed as a whole, unlike one with a failed row, was not counted as done."""
        steps = self._engine.stats().steps
        self._failed_steps = self._failed_steps + 1 if steps == self._steps_at_error else 1
        self._steps_at_error = steps
        if self._failed_steps == MAX_FAILED_STEPS:
            raise EngineDeadError(f"{MAX_FAILED_STEPS} steps in a row failed; the engine cannot go on.")

    def close(self) -> None:
        self._engine.close()
