"""The model runner: one plan in, one forward pass and one round of sampling, one result out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config.errors import PenstockError
from penstock.core.protocol import (
    NewSequence,
    ScheduledTokens,
    SlotResult,
    StepPlan,
    StepResult,
    StepTimings,
)
from penstock.runtime.adapters import AdapterRoom
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.decode_steps import DecodeSteps
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.drafters.hidden_states import Tapped, best_behind, read
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.late_pooling import LatePooler
from penstock.runtime.mover import MOVES, Mover
from penstock.runtime.ranks.group import Group, NullGroup
from penstock.runtime.sampler import Draw, PromptScores, Sampler, SamplingHandle
from penstock.runtime.wanted import Scored, Wanted, last_of, wanted_of

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.copies import Event
    from penstock.runtime.executor import Executor
    from penstock.runtime.graphs import DecodeGraphs
    from penstock.runtime.media import Encoded, MediaStore
    from penstock.runtime.pipeline.lead import StagedSteps
    from penstock.runtime.pooling import Pooled, Pooler
    from penstock.runtime.replay import ReplayExecutor

_MOVES_S = 0.005  # for a transfer, with nothing else to do


class _BegunStep(NamedTuple):
    """A step whose forward pass has begun; it is over, unless stages compute it.

    Attributes:
        plan, masks: what was asked.
        failed: as of _InFlightStep.
        wanted: what is to become of it; None in a step without tokens.
        logits: of a recorded step, which has run.
        build: seconds the host took.
        since: when the forward pass began.
    """

    plan: StepPlan
    masks: Any
    failed: Mapping[int, str]
    wanted: Wanted | None = None
    logits: Any = None
    build: float = 0.0
    since: float = 0.0


class _InFlightStep(NamedTuple):
    """A step that was launched: what its result will be made of.

    Attributes:
        plan: what was asked.
        draws, samples: tokens to sample, and the handle of their samples; None where there are none.
        followers: slots that take the tokens of a draw: (slot, index of the draw).
        pooled: results of slots that pool.
        scored: slots of scored prompts, with their log-probabilities in parts.
        end: of the step on the device, where nothing comes back from it that could be waited for.
        failed: slots whose media are wrong or could not be encoded, and why.
        tapped: hidden states that the drafter wants, if it does.
        build, forward: seconds the host took.
    """

    plan: StepPlan
    draws: list[Draw]
    samples: SamplingHandle | None
    followers: tuple[tuple[int, int], ...]
    pooled: list[Pooled]
    scored: list[tuple[int, list[PromptScores]]]
    end: Event | None
    failed: Mapping[int, str]
    tapped: Tapped | None
    build: float
    forward: float

    @property
    def step(self) -> int:
        return self.plan.step


@dataclass(frozen=True, slots=True)
class Collaborators:
    """What a runner works with besides, each with a null form.

    Attributes:
        pooler: of models that pool.
        graphs: recorded decode steps.
        warm_up: compiles some more kernels while no slot is in use, and returns whether there are others.
        media: what encoders read.
        drafting: proposes what may follow.
        adapters: what tokens may have of them.
        stages: that compute steps, one after the other, while plans are made: they are the runner's executor then.
        group: of the ranks that compute each step together.
    """

    pooler: Pooler | None = None
    graphs: DecodeGraphs | None = None
    warm_up: Callable[[], bool] | None = None
    media: MediaStore | None = None
    drafting: Drafting | None = None
    adapters: AdapterRoom | None = None
    stages: StagedSteps | None = None
    group: Group | None = None


ALONE = Collaborators()


class ModelRunner:
    """Implements `core.protocol.Runner` in this process: a step is launched, then its result is collected.

    Where sampled tokens stay on the device, `submit` launches: all that a step does is queued behind the step before,
    whose tokens it may refer to. Where stages compute, `submit` begins a step and `sample` draws once it is through: of
    plans in flight none has a token that another draws. Elsewhere launching is computing, and left to `sample`.

    Attributes:
        memory: what layers keep; those of the first stage, where there are stages.
        mover: carries blocks to and from a lower tier.
    """

    def __init__(
        self,
        executor: Executor | ReplayExecutor | StagedSteps,
        memory: KVMemory,
        sampler: Sampler,
        builder: BatchBuilder,
        others: Collaborators = ALONE,
    ) -> None:
        self.media = others.media
        self.mover = Mover()
        self._executor: Any = executor
        self._stages = others.stages
        self._group, self._exchanged = others.group or NullGroup(), 0.0
        self._begun: deque[_BegunStep] = deque()
        self._leaving: dict[int, int] = {}  # slots that were released, by the last step in the stages that has them
        self._warm_up = others.warm_up
        self._graphs = others.graphs
        self.memory = memory
        self._sampler = sampler
        self._builder = builder
        self._pooler = others.pooler or LatePooler()
        self._place = builder.place
        self._drafting = others.drafting or Drafting()
        self.adapters = others.adapters or AdapterRoom()
        self._on_device = sampler.on_device
        self._queue: deque[tuple[StepPlan, Any]] = deque()
        self._in_flight: deque[_InFlightStep] = deque()
        self._new: dict[int, NewSequence] = {}
        self._known: dict[int, int] = {}  # tokens of each row that the sampler has counted, those in flight included
        program = executor.decoding(builder)
        self._decoding = None if program is None else DecodeSteps(program, sampler, builder, self._known)

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        if self._stages is not None:
            self._begun.append(self._begin(plan, masks))
        elif self._on_device:
            with self._place.guard():
                self._in_flight.append(self._launch(plan, masks))
        else:
            self._queue.append((plan, masks))

    def sample(self, step: int) -> StepResult:
        if (decoded := self._decode()) is not None:
            return self._completed(_of_step(decoded, step))
        with self._place.guard():
            launched = self._in_flight.popleft() if self._in_flight else self._launch_oldest()
            result = self._collect(_of_step(launched, step))
            for slot in [slot for slot, last in self._leaving.items() if last <= step]:
                self._release(slot)
            if self._graphs is not None:
                self._graphs.capture_missed()
        return self._completed(result, 0.0 if launched.plan.scheduled else _MOVES_S)

    def _completed(self, result: StepResult, wait: float = 0.0) -> StepResult:
        if (exchanged := self._group.exchanged_seconds) != self._exchanged:
            result = result._replace(timings=result.timings._replace(ranks=exchanged - self._exchanged))
            self._exchanged = exchanged
        ended = self.mover.ended(wait)
        if not ended.finished:
            return result
        return result._replace(finished_transfers=ended.finished, failed_transfers=ended.failed)

    def prepare(self) -> bool:
        with self._place.guard():
            return self._prepare()

    def _prepare(self) -> bool:
        if self._new and self._warm_up is not None and self._warm_up():  # not before the first answer
            return True
        if self._graphs is None:
            return False
        if self._new:  # slots were in use and nothing runs: their requests are over
            self._graphs.note_answer()
        return self._graphs.capture_next()

    def _launch_oldest(self) -> _InFlightStep:
        if self._begun:
            return self._finish(self._begun.popleft())
        plan, masks = self._queue.popleft()
        return self._launch(plan, masks)

    def _decode(self) -> StepResult | None:
        """Runs the oldest plan if it is a step of recorded programs in which rows decode and nothing else happens."""
        if self._decoding is None or (self.media is not None and self.media.broken):
            return None
        plan, masks = self._queue[0]
        result = self._decoding.run(plan, masks)
        if result is None:
            return None
        self._queue.popleft()
        count = plan.num_tokens
        tapped = read(self._drafting.looked_at, lambda name: self._executor.tap(name, count), None, True)
        self._drafting.see(plan, tapped)
        return self._drafting.propose(plan, result, result.results)

    def _launch(self, plan: StepPlan, masks: Any) -> _InFlightStep:
        return self._finish(self._begin(plan, masks))

    def _begin(self, plan: StepPlan, masks: Any) -> _BegunStep:
        started = perf_counter()
        refused = self._apply_rows(plan)
        apply = self.memory.apply if self._stages is None else self._stages.apply
        for op in plan.cache_ops:
            (self.mover.start if op.kind in MOVES else apply)(op)
        self._count_forced(plan)
        encoded = self._encode(plan)
        failed = {**(encoded.failed if encoded else {}), **refused}
        if not plan.scheduled:
            if self._stages is not None:
                self._stages.pass_on()
            return _BegunStep(plan, masks, failed)
        wanted = wanted_of(plan.scheduled, self._new, self._pooler.wanted, widens=self._drafting.taps.widens)
        logits, built = self._replay(plan, wanted), started
        if logits is None:
            batch = self._builder.build(plan.scheduled, wanted.tokens, None if encoded is None else encoded.injection)
            built = perf_counter()
            if self._stages is None:
                self._executor.forward(batch)
            else:
                self._stages.launch(batch, wanted.calls(self._new), hidden=bool(wanted.pooled))
        return _BegunStep(plan, masks, failed, wanted, logits, built - started, built)

    def _finish(self, begun: _BegunStep) -> _InFlightStep:
        plan, wanted = begun.plan, begun.wanted
        logits = begun.logits
        if wanted is None:
            return _InFlightStep(plan, [], None, (), [], [], None, begun.failed, None, 0.0, 0.0)
        if self._stages is not None:
            self._stages.advance()
        source: Any = self._executor if logits is None else self._graphs
        if logits is None and wanted.draws:
            logits = self._executor.logits(wanted.drawn)
        tapped = self._tapped(wanted, source, logits)
        computed = perf_counter()
        draws, samples, followers = self._draw(plan, logits, begun.masks)
        pooling = (self._launch_pooled(span, places) for span, places in wanted.pooled)
        pooled = [one for one in pooling if one is not None]
        scored = [(entry.slot, list(self._score(entry))) for entry in wanted.scored]
        end = None if draws or pooled or scored else self._place.end()
        return _InFlightStep(
            plan,
            draws,
            samples,
            followers,
            pooled,
            scored,
            end,
            begun.failed,
            tapped,
            begun.build,
            computed - begun.since,
        )

    def _tapped(self, wanted: Wanted, source: Any, logits: Any) -> Tapped | None:
        """What the drafter is told of a step, if it wants anything."""
        taps = self._drafting.looked_at
        if taps.best and wanted.drafted:
            return best_behind(logits, wanted.drafted, self._on_device)
        return read(taps, lambda name: source.tap(name), wanted.tokens, not self._on_device)

    def _collect(self, step: _InFlightStep) -> StepResult:
        if not step.plan.scheduled:
            self._drafting.follow(step.plan)
            return StepResult(step.step, tuple(SlotResult(slot, error=error) for slot, error in step.failed.items()))
        started = perf_counter()
        rows: dict[int, SlotResult] = {}
        if step.end is not None:  # without waiting, all chunks of a long prompt would be queued at once
            step.end.wait()
        for draw, sample in zip(step.draws, step.samples.wait() if step.samples else (), strict=True):
            if sample.error is not None:
                rows[draw.slot] = SlotResult(draw.slot, error=sample.error)
                continue
            taken = SlotResult(draw.slot, sample.tokens, sample.logprobs, sampler_state=sample.state)
            rows[draw.slot] = self._taken(taken)
        for slot, index in step.followers:
            result = rows[step.draws[index].slot]
            rows[slot] = self._taken(SlotResult(slot, result.tokens, error=result.error))
        drawn = list(rows.values())
        for pooled in step.pooled:
            rows[pooled.slot] = SlotResult(pooled.slot, pooled=pooled.wait())
        for row, parts in step.scored:
            result = rows.get(row, SlotResult(row))
            scores = tuple(score for part in parts for score in part.wait())
            rows[row] = result._replace(prompt_logprobs=scores)
        rows.update((slot, SlotResult(slot, error=error)) for slot, error in step.failed.items())
        staged = (0.0, 0.0) if self._stages is None else self._stages.step_times
        timings = StepTimings(step.build, step.forward, perf_counter() - started, *staged)
        self._drafting.see(step.plan, step.tapped)
        return self._drafting.propose(step.plan, StepResult(step.step, tuple(rows.values()), timings=timings), drawn)

    def _taken(self, result: SlotResult) -> SlotResult:
        """A result whose tokens later plans may refer to."""
        if result.tokens:
            self._builder.note_sample(result.slot, result.tokens[-1])
            self._known[result.slot] += len(result.tokens) - 1
        return result

    def _replay(self, plan: StepPlan, wanted: Wanted) -> Tensor | None:
        """Logits of all tokens from a recorded step; None if others are wanted or no recording fits."""
        if (
            self._graphs is None
            or plan.encoder_work
            or wanted.pooled
            or wanted.scored
            or len(wanted.draws) < plan.num_tokens
        ):
            return None
        return self._graphs.run(plan.scheduled)

    def abort(self) -> None:
        self._queue.clear()
        self._in_flight.clear()
        self._begun.clear()
        if self._stages is not None:
            self._stages.abort()
            self.adapters.unsettle()
        for slot in list(self._leaving):
            self._release(slot)
        self.mover.abort()

    def close(self) -> None:
        self.abort()
        self.mover.close()
        self.mover = Mover()  # the other one knows the memory's arrays
        self._new.clear()
        if self._stages is not None:
            self._stages.close()
        self.memory.close()

    def _apply_rows(self, plan: StepPlan) -> dict[int, str]:
        """Takes sequences out of their slots and others in; slots whose media are wrong, and why."""
        refused: dict[int, str] = {}
        if plan.released_slots and self._graphs is not None:
            self._graphs.note_answer()
        using = {span.slot: begun.plan.step for begun in self._begun for span in begun.plan.scheduled}
        for row in plan.released_slots:
            if row in using:  # its sequence has ended, but what it draws there is still drawn
                self._leaving[row] = using[row]
            else:
                self._release(row)
        for new in plan.new_sequences:
            self._release(new.slot)  # again, where that was lost with a step that failed
            self._new[new.slot] = new
            self._known[new.slot] = len(new.prompt_ids) + len(new.generated_ids)
            self._sampler.add_row(new)
            self._place_adapters(new, refused)
            self._builder.add_row(new, None if self.media is None else _places(self.media, new, refused))
            self._pooler.add_row(new)
            self._drafting.add_row(new)
            if self._decoding is not None:
                self._decoding.add_row(new)
        return refused

    def _place_adapters(self, new: NewSequence, refused: dict[int, str]) -> None:
        try:
            self.adapters.place(new.adapters)
        except PenstockError as error:
            refused[new.slot] = str(error)  # it is computed with others in this step, and ends with it

    def _release(self, slot: int) -> None:
        self._leaving.pop(slot, None)
        if self.media is not None:
            self.media.release_row(slot)
        if self._decoding is not None:
            self._decoding.release_row(slot)
        if self._new.pop(slot, None) is not None:
            self._sampler.release_row(slot)
            self._drafting.release_row(slot)

    def _encode(self, plan: StepPlan) -> Encoded | None:
        """What media give a step, if there are any. Without a store none of them can be encoded."""
        if not plan.encoder_work and not (self.media and self.media.broken):
            return None
        from penstock.runtime.media import Encoded

        if self.media is None:
            why = "the model takes no media."
            return Encoded(None, {work.slot: why for work in plan.encoder_work})
        return self.media.encode(plan)

    def _count_forced(self, plan: StepPlan) -> None:
        """Has the sampler's penalties count forced tokens: those in a span that were not sampled."""
        for span in plan.scheduled:
            known = self._known[span.slot]
            end = span.start + len(span.tokens) - span.draft_tokens
            if end > known:
                forced = span.tokens[known - span.start : end - span.start]
                self._sampler.extend(span.slot, forced)
                self._drafting.take(span.slot, forced)
                self._known[span.slot] = end

    def _launch_pooled(self, span: ScheduledTokens, places: slice) -> Pooled | None:
        tensor, executor = self._place.tensor, self._executor
        row = last_of(places)
        return self._pooler.begin(span, tensor(executor.hidden())[places], lambda: tensor(executor.logits(row)))

    def _draw(
        self, plan: StepPlan, logits: Any, masks: Any
    ) -> tuple[list[Draw], SamplingHandle | None, tuple[tuple[int, int], ...]]:
        """Begins to sample, once the step's masks are made; the draws, and who follows them."""
        if logits is None:
            return [], None, ()
        sampled = (span for span in plan.scheduled if span.sample and self._new[span.slot].pooling is None)
        draws = [
            Draw(span.slot, span.start + len(span.tokens) - span.draft_tokens, span.drafts if span.draft_tokens else ())
            for span in sampled
        ]
        followers: tuple[tuple[int, int], ...] = ()
        if plan.guidance:
            from penstock.runtime.guidance import share

            shared = share(self._place.tensor(logits), draws, plan.guidance)
            logits = shared.logits
            draws, followers = shared.draws, shared.followers
        rows = [draw.slot for draw in draws]
        words = None if masks is None else masks.of([draw.slot for draw in draws for _ in range(len(draw.drafts) + 1)])
        samples = self._sampler.begin(logits, draws, words, followers)
        last = samples.last
        if last is not None:
            self._builder.keep_samples(rows, last)
        if last is not None and followers:
            taken = self._place.put(np.array([index for _, index in followers], np.int64))
            self._builder.keep_samples([slot for slot, _ in followers], last.index_select(0, taken))
        for row in (*rows, *(slot for slot, _ in followers)):
            self._known[row] += 1
        return draws, samples, followers

    def _score(self, entry: Scored) -> Iterator[PromptScores]:
        for rows in entry.parts():
            begin = int(rows[0]) - entry.first
            targets = entry.targets[begin : begin + len(rows)]
            yield self._sampler.begin_prompt_logprobs(self._executor.logits(rows), targets, entry.top)


Outstanding = TypeVar("Outstanding", _InFlightStep, StepResult)


def _of_step(oldest: Outstanding, step: int) -> Outstanding:
    """The oldest outstanding step, if it is the one that was asked for."""
    if oldest.step != step:
        raise ValueError(f"step {step} was asked for while step {oldest.step} is the oldest outstanding")
    return oldest


def _places(media: MediaStore, new: NewSequence, refused: dict[int, str]) -> npt.NDArray[np.int64] | None:
    """The positions of a sequence with media; one whose media are wrong is entered in `refused`."""
    from penstock.runtime.media import MediaError

    try:
        return media.add_row(new)
    except MediaError as error:
        refused[new.slot] = str(error)  # it is computed with others in this step, and ends with it
        return None
