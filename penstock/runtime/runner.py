"""The model runner: one plan in, one forward pass and one round of sampling, one result out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config.errors import PenstockError
from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.core.protocol import (
    CacheOpKind,
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
from penstock.runtime.mover import Mover
from penstock.runtime.sampler import Draw, PromptScores, Sampler, SamplingHandle

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.copies import Event
    from penstock.runtime.executor import Executor
    from penstock.runtime.graphs import DecodeGraphs
    from penstock.runtime.media import Encoded, MediaStore
    from penstock.runtime.pooling import Pooled, Pooler
    from penstock.runtime.replay import ReplayExecutor

_MOVES = (CacheOpKind.LOAD, CacheOpKind.SAVE, CacheOpKind.CANCEL)
_MOVES_S = 0.005  # for a transfer, with nothing else to do


@dataclass(frozen=True, slots=True)
class _Scored:
    """A span whose prompt tokens are scored: places first … first + len(targets) - 1 predict the targets."""

    slot: int
    first: int
    targets: tuple[int, ...]
    top: int


@dataclass(slots=True)
class _Wanted:
    """Which final states a step is to give, and what for.

    Attributes:
        tokens: indices of their tokens in the step; the other fields have places in this list.
        draws: places to sample after; those behind a slot's drafts follow that behind its last known token.
        drafted: slots whose drafts are verified: (slot, number of its first draw, drafts).
        scored, pooled: spans of scored prompts; spans of slots that pool, with their places.
    """

    tokens: list[int] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    drafted: list[tuple[int, int, int]] = field(default_factory=list)
    scored: list[_Scored] = field(default_factory=list)
    pooled: list[tuple[ScheduledTokens, slice]] = field(default_factory=list)


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
    """

    pooler: Pooler | None = None
    graphs: DecodeGraphs | None = None
    warm_up: Callable[[], bool] | None = None
    media: MediaStore | None = None
    drafting: Drafting | None = None
    adapters: AdapterRoom | None = None


ALONE = Collaborators()


class ModelRunner:
    """Implements `core.protocol.Runner` in this process: a step is launched, then its result is collected.

    Where sampled tokens stay on the device, `submit` launches: all that a step does is queued behind the step before,
    whose tokens it may refer to. Elsewhere launching is computing, and is left to `sample`.

    Attributes:
        memory: what layers keep.
        mover: carries blocks to and from a lower tier.
    """

    def __init__(
        self,
        executor: Executor | ReplayExecutor,
        memory: KVMemory,
        sampler: Sampler,
        builder: BatchBuilder,
        others: Collaborators = ALONE,
    ) -> None:
        self.media = others.media
        self.mover = Mover()
        self._executor = executor
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
        if self._on_device:
            with self._place.guard():
                self._in_flight.append(self._launch(plan, masks))
        else:
            self._queue.append((plan, masks))

    def sample(self, step: int) -> StepResult:
        if (decoded := self._decode()) is not None:
            return self._with_moves(_of_step(decoded, step))
        with self._place.guard():
            launched = self._in_flight.popleft() if self._in_flight else self._launch_oldest()
            result = self._collect(_of_step(launched, step))
            if self._graphs is not None:
                self._graphs.capture_missed()
        return self._with_moves(result, 0.0 if launched.plan.scheduled else _MOVES_S)

    def _with_moves(self, result: StepResult, wait: float = 0.0) -> StepResult:
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
        executor: Any = self._executor
        count = plan.num_tokens
        self._drafting.see(plan, read(self._drafting.looked_at, lambda name: executor.tap(name, count), None, True))
        return self._drafting.propose(plan, result, result.results)

    def _launch(self, plan: StepPlan, masks: Any) -> _InFlightStep:
        started = perf_counter()
        refused = self._apply_rows(plan)
        for op in plan.cache_ops:
            (self.mover.start if op.kind in _MOVES else self.memory.apply)(op)
        self._count_forced(plan)
        encoded = self._encode(plan)
        failed = {**(encoded.failed if encoded else {}), **refused}
        if not plan.scheduled:
            return _InFlightStep(plan, [], None, (), [], [], None, failed, None, 0.0, 0.0)
        wanted = self._wanted(plan)
        logits, built = self._replay(plan, wanted), started
        source: Any = self._graphs
        if logits is None:
            batch = self._builder.build(plan.scheduled, wanted.tokens, None if encoded is None else encoded.injection)
            built, source = perf_counter(), self._executor
            self._executor.forward(batch)
            logits = self._logits(wanted) if wanted.draws else None
        tapped = self._tapped(wanted, source, logits)
        computed = perf_counter()
        draws, samples, followers = self._draw(plan, logits, masks)
        begun = (self._launch_pooled(span, places) for span, places in wanted.pooled)
        pooled = [one for one in begun if one is not None]
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
            failed,
            tapped,
            built - started,
            computed - built,
        )

    def _tapped(self, wanted: _Wanted, source: Any, logits: Any) -> Tapped | None:
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
        timings = StepTimings(step.build, step.forward, perf_counter() - started)
        self._drafting.see(step.plan, step.tapped)
        return self._drafting.propose(step.plan, StepResult(step.step, tuple(rows.values()), timings=timings), drawn)

    def _taken(self, result: SlotResult) -> SlotResult:
        """A result whose tokens later plans may refer to."""
        if result.tokens:
            self._builder.note_sample(result.slot, result.tokens[-1])
            self._known[result.slot] += len(result.tokens) - 1
        return result

    def _replay(self, plan: StepPlan, wanted: _Wanted) -> Tensor | None:
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

    def _logits(self, wanted: _Wanted) -> Any:
        """Logits of the tokens to sample after; mostly these are all that were computed."""
        every = len(wanted.draws) == len(wanted.tokens)
        return self._executor.logits(None if every else np.array(wanted.draws, np.int64))

    def abort(self) -> None:
        self._queue.clear()
        self._in_flight.clear()
        self.mover.abort()

    def close(self) -> None:
        self.abort()
        self.mover.close()
        self.mover = Mover()  # the other one knows the memory's arrays
        self._new.clear()
        self.memory.close()

    def _apply_rows(self, plan: StepPlan) -> dict[int, str]:
        """Takes sequences out of their slots and others in; slots whose media are wrong, and why."""
        refused: dict[int, str] = {}
        if plan.released_slots and self._graphs is not None:
            self._graphs.note_answer()
        for row in plan.released_slots:
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

    def _wanted(self, plan: StepPlan) -> _Wanted:
        wanted, first = _Wanted(), 0
        for span in plan.scheduled:
            new = self._new[span.slot]
            count = len(span.tokens)
            place = len(wanted.tokens)
            drawn = range(0)
            if span.sample:
                last = count - span.draft_tokens - 1
                drawn = range(last, last + 1 + len(span.drafts) if span.draft_tokens else count)
            chosen = drawn
            if (pooled := self._pooler.wanted(span)) is not None:
                chosen = pooled
                wanted.pooled.append((span, slice(place, place + len(chosen))))
            elif self._drafting.taps.widens:
                chosen = range(count)
            if pooled is None and new.sampling.prompt_logprobs is not None and new.sequence == 0:
                first_scored = new.sampling.first_scored(span.start) - span.start
                if targets := _targets(new, span):
                    chosen = chosen if self._drafting.taps.widens else range(first_scored, count)
                    at = place + first_scored - chosen.start
                    wanted.scored.append(_Scored(span.slot, at, targets, new.sampling.prompt_logprobs))
            if span.draft_tokens:
                wanted.drafted.append((span.slot, len(wanted.draws), len(span.drafts)))
            if pooled is None:
                wanted.draws += (place + index - chosen.start for index in drawn)
            wanted.tokens += (first + index for index in chosen)
            first += count
        return wanted

    def _launch_pooled(self, span: ScheduledTokens, places: slice) -> Pooled | None:
        tensor, executor = self._place.tensor, self._executor
        row = np.array([places.stop - 1], np.int64)
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

    def _score(self, entry: _Scored) -> Iterator[PromptScores]:
        for begin in range(0, len(entry.targets), PROMPT_LOGIT_ROWS):
            targets = entry.targets[begin : begin + PROMPT_LOGIT_ROWS]
            start = entry.first + begin
            logits = self._executor.logits(np.arange(start, start + len(targets), dtype=np.int64))
            yield self._sampler.begin_prompt_logprobs(logits, targets, entry.top)


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


def _targets(new: NewSequence, span: ScheduledTokens) -> tuple[int, ...]:
    """The prompt tokens that a span's tokens predict, from the first that is scored."""
    return new.prompt_ids[new.sampling.first_scored(span.start) + 1 : span.start + len(span.tokens) + 1]
