"""The step loop: scheduler, runner and structured output joined, nothing else. Synchronous, single-threaded, no I/O."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

from penstock.config.engine_stats import EngineStats
from penstock.config.errors import EngineDeadError, ParameterError
from penstock.core.policies.cache_answers import answered
from penstock.core.policies.pace import Pace, PaceMeter
from penstock.core.policies.speculation import NoSpeculation, Speculation
from penstock.core.protocol import Runner, StepPlan, StepResult, StepTimings
from penstock.core.request import EngineOutput, EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.engine.so_far import SoFar, go_on
from penstock.runtime.adapters import AdapterRoom
from penstock.runtime.ranks.alarm import Alarm
from penstock.structured.manager import StructuredOutputManager

_WAIT_S = 0.002  # for a grammar, with nothing else to do; commands are not looked for meanwhile
_PARTS = ("plan", "commit", *StepTimings._fields)  # of a step, each timed
log = logging.getLogger(__name__)


class Engine:
    """Runs requests step by step. Up to `depth` plans are made ahead of the oldest unanswered one.

    Attributes:
        step_cost: what steps cost in the runner.
        dead: why no step can be computed any more, once the runner said so; whoever steps the engine ends it.
        idle_work: what is done while nothing is asked for: a bounded piece at a time, and whether there was any.
        alarm: rung where it cannot go on, though nothing is asked for; None where nobody could ring it.
        works_on: told of the requests in the batch and those that wait for grammars or adapters, before others join.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        structured: StructuredOutputManager | None = None,
        closed: Callable[[], None] | None = None,
        speculation: Speculation | None = None,
        vocab_size: int | None = None,
        adapters: AdapterRoom | None = None,
    ) -> None:
        """`closed` is called when the engine is; `speculation` drafts in the runner, None for nobody.

        Token ids lie below `vocab_size`; None for a runner that looks up nothing by them.
        """
        self._closed = closed
        self._vocab_size = vocab_size
        self.scheduler = scheduler
        self.runner = runner
        self.structured = structured or StructuredOutputManager()
        self.adapters = adapters or AdapterRoom()
        self._depth = scheduler.options.depth
        self._submitted: deque[StepPlan] = deque()
        self._steps = 0
        self._speculation = speculation or NoSpeculation()
        self.step_cost = self._speculation.cost
        self._meter = PaceMeter(scheduler.options.max_num_seqs, scheduler.options.max_num_batched_tokens)
        self.idle_work: list[Callable[[], bool]] = [self._flush, lambda: self.runner.prepare()]
        self._working_since: float | None = None  # or since the last commit
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.dead: EngineDeadError | None = None
        self.alarm: Alarm | None = None
        self.works_on: Callable[[Iterable[str]], None] = lambda request_ids: None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.structured.pending or self.adapters.pending

    @property
    def unqueued(self) -> set[str]:
        """Requests that wait for their adapters or grammars."""
        return {*self.adapters.waiting, *self.structured.compiling}

    def add(self, request: EngineRequest, so_far: SoFar | None = None) -> bool:
        """Queues a request, unless it has to wait until its adapters are read, or then its grammar is compiled; whether
        it is queued.

        It goes on from what is known of its answers so far, if it began in another engine.

        Raises:
            RequestError: it can never be served, see Scheduler.add, or names tokens that do not exist.
        """
        self._check_ids(request, so_far)
        if request.speculate > self._speculation.most:  # of a drafter that has failed: such requests are planned ahead
            request = replace(request, speculate=self._speculation.most)
        if self.adapters.add(request) or self.structured.add(request):
            self._tell_work()
            return False
        return self.admit(request, so_far)

    def admit(self, request: EngineRequest, so_far: SoFar | None = None) -> bool:
        """Queues a request whose grammar is compiled; raises as `add`."""
        try:
            self.scheduler.add(request)
        except BaseException:
            self.structured.drop(request.request_id)
            raise
        if so_far is not None:
            go_on(self.scheduler, request.request_id, so_far)
        return True

    def _check_ids(self, request: EngineRequest, so_far: SoFar | None) -> None:
        """Kernels look tokens up without asking whether there are such: whoever adds a request need not have."""
        size = self._vocab_size
        if size is None:
            return
        known = () if so_far is None else tuple(tokens or () for tokens in so_far.tokens)
        forced = () if request.thinking is None else request.thinking.end_ids
        for ids in (request.prompt_ids, request.sampling.negative_prompt_ids, forced, *known):
            if ids and not (min(ids) >= 0 and max(ids) < size):
                wrong = next(token for token in ids if not 0 <= token < size)
                raise ParameterError("prompt", wrong, f"token ids from 0 to {size - 1}")

    def answer(self, request: EngineRequest) -> EngineOutput:
        """What a question about the cache is answered; nothing is queued or computed.

        Raises:
            RequestError: it names tokens that do not exist.
        """
        self._check_ids(request, None)
        pace = self.pace()
        return answered(self.scheduler, request, lambda tokens: None if pace is None else pace.seconds(tokens, 0))

    def cancel(self, request_id: str) -> None:
        """Cancels a request; its last outputs come with the next step."""
        self.scheduler.cancel(request_id)

    def step(self) -> list[EngineOutput]:
        """Plans, runs and commits one step; returns what became known.

        An exception in the runner ends the requests in the outstanding steps with an error; the others go on.
        """
        if self._working_since is None:
            self._working_since = perf_counter()
        while len(self._submitted) <= self._depth and (plan := self._plan()) is not None:
            self._submitted.append(plan)
            if plan.new_sequences:
                self._tell_work()
            if not self._guarded(self.runner.submit, plan, self.structured.begin(plan)):
                return self._outputs()
        if self._submitted and (result := self._guarded(self.runner.sample, self._submitted[0].step)):
            plan = self._submitted.popleft()
            self._measure(plan)
            self._commit(result)
        elif not self.scheduler.has_work or self.structured.renewing or self.adapters.pending:
            self.structured.wait(_WAIT_S)
            self.adapters.wait(_WAIT_S)
        if not self.scheduler.has_work:
            self._working_since = None
        return self._outputs()

    def prepare(self) -> bool:
        """Does a bounded piece of what waits until nothing is asked for; whether there is more."""
        return any(work() for work in self.idle_work)

    def _flush(self) -> bool:
        """Has the tier below take what it is owed."""
        plan = self.scheduler.plan(idle=True) if self.scheduler.cache.transfers.owed else None
        sent = plan is not None and self._guarded(self.runner.submit, plan)
        if plan is not None and sent and (result := self._guarded(self.runner.sample, plan.step)):
            self.scheduler.commit(result)
        return plan is not None

    def pace(self) -> Pace | None:
        """How fast steps are, once that is known."""
        return self._meter.pace()

    def _measure(self, plan: StepPlan) -> None:
        """Takes the time of a step, whatever was done in it: since the last one, unless there was nothing to do."""
        now = perf_counter()
        rows = len(self.scheduler.running) if self.scheduler.waiting else None
        self._meter.add_step(plan, now - (self._working_since or now), rows)
        self._working_since = now

    def _tell_work(self) -> None:
        running = {sequence.request.request_id for sequence in self.scheduler.running}
        self.works_on(running.union(self.unqueued))

    def _outputs(self) -> list[EngineOutput]:
        return self.structured.told(self.scheduler.take_outputs())

    def _plan(self) -> StepPlan | None:
        started = perf_counter()
        plan = self.scheduler.plan()
        self._seconds["plan"] += perf_counter() - started
        return plan

    def _guarded(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What a call into the runner gives, or True; if it raises, everything outstanding fails, and None."""
        try:
            return call(*arguments) or True
        except Exception as error:
            self.dead = error if isinstance(error, EngineDeadError) else None
            log.error("a step failed: %s", error, exc_info=self.dead is None)
            self.runner.abort()
            self.structured.abort()
            self._submitted.clear()
            self.scheduler.fail_outstanding("the engine failed while computing this request; send it again.")
            return None

    def _commit(self, result: StepResult) -> None:
        started = perf_counter()
        self.scheduler.commit(*self.structured.end(result))
        self._steps += 1
        self._seconds["commit"] += perf_counter() - started
        for part, seconds in zip(StepTimings._fields, result.timings, strict=True):
            self._seconds[part] += seconds

    def stats(self) -> EngineStats:
        """A snapshot of counters and gauges."""
        seconds: dict[str, Any] = {f"{part}_seconds": self._seconds[part] for part in _PARTS}
        drafts = self._speculation.figures()._asdict()
        paused = self.scheduler.pause.state(self.scheduler.waiting)
        return replace(self.scheduler.stats(), steps=self._steps, paused=paused, **seconds, **drafts)

    def close(self) -> None:
        """Frees what the runner holds."""
        self.structured.close()
        self.adapters.close()
        self.runner.close()
        if self._closed is not None:
            self._closed()
