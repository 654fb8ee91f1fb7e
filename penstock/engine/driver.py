"""Drives an Engine for a client, whichever way they talk: admits, steps, hands out, and survives a step that raises."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

from penstock.config.errors import EngineDeadError, RequestError
from penstock.core.request import EngineOutput, EngineRequest, EngineStats, FinishReason

if TYPE_CHECKING:
    from penstock.engine.loop import Engine

_RECOVERY_STEPS = 8
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a driver's news goes."""

    def outputs(self, outputs: list[EngineOutput]) -> None:
        """News of branches: after an admission an empty output of branch 0, then what each step produced."""

    def refused(self, request_id: str, error: RequestError) -> None:
        """A request was not admitted."""


class EngineDriver:
    """An engine with its live branches, so that none is left without an end."""

    def __init__(self, engine: Engine, sink: Sink) -> None:
        self._engine = engine
        self._sink = sink
        self._live: dict[str, set[int]] = {}
        self._admitted: list[EngineOutput] = []

    @property
    def has_work(self) -> bool:
        return bool(self._admitted) or self._engine.has_work

    def submit(self, request: EngineRequest) -> None:
        """Adds a request, or tells the sink why not."""
        try:
            if request.request_id in self._live:
                raise RequestError("request_id is in use by a running request; choose another.", param="request_id")
            self._engine.add(request)
        except RequestError as error:
            self._sink.refused(request.request_id, error)
        except Exception:
            _log.exception("a request could not be added")
            self._sink.refused(request.request_id, RequestError("The engine cannot process this request."))
        else:
            self._live[request.request_id] = set(range(request.sampling.n))
            self._admitted.append(EngineOutput(request.request_id, 0))

    def cancel(self, request_id: str) -> None:
        """Ends a request's branches with the next step; unknown ids are ignored."""
        if request_id in self._live:
            self._engine.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def step(self) -> None:
        """Reports admissions, then runs one step if there is work.

        A step that raises ends every live request with a plain message; the engine goes on if it can still step.

        Raises:
            EngineDeadError: it cannot.
        """
        admitted, self._admitted = self._admitted, []
        if admitted:
            self._sink.outputs(admitted)
        if not self._engine.has_work:
            return
        try:
            outputs = self._engine.step()
        except Exception:
            _log.exception("a step failed")
            self._fail_live("The engine met an internal error while this request was running.")
            self._recover()
            return
        self._note(outputs)
        if outputs:
            self._sink.outputs(outputs)

    def close(self) -> None:
        self._engine.close()

    def _note(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None and (branches := self._live.get(output.request_id)) is not None:
                branches.discard(output.branch)
                if not branches:
                    del self._live[output.request_id]

    def _fail_live(self, message: str) -> None:
        failed = [
            EngineOutput(request_id, branch, finish_reason=FinishReason.ERROR, error=message)
            for request_id, branches in self._live.items()
            for branch in sorted(branches)
        ]
        if failed:
            self._sink.outputs(failed)

    def _recover(self) -> None:
        """Cancels everything and steps until the engine is empty: what is left is fit for new requests."""
        try:
            for request_id in self._live:
                self._engine.cancel(request_id)
            for _ in range(_RECOVERY_STEPS):
                if not self._engine.has_work:
                    break
                self._engine.step()
        except Exception as error:
            raise EngineDeadError("The engine cannot go on after an internal error.") from error
        self._live.clear()
        if self._engine.has_work:
            raise EngineDeadError("The engine could not be emptied after an internal error.")
