"""Steps of recorded programs in which every row computes one token and draws the next, by the shortest way."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from penstock.core.protocol import NewSequence, SlotResult, StepPlan, StepResult, StepTimings

if TYPE_CHECKING:
    from penstock.kernels.cpu.step_program import DecodeProgram
    from penstock.runtime.batch_builder import BatchBuilder
    from penstock.runtime.sampler import Sampler


class DecodeSteps:
    """Runs such steps, and tells which they are: nothing comes, goes, is copied, encoded, guided, pooled or drafted.

    Between two of them a model's weights have pushed the interpreter's memory out of the caches, so that what counts is
    how much of it a step touches.
    """

    def __init__(self, program: DecodeProgram, sampler: Sampler, builder: BatchBuilder, known: dict[int, int]) -> None:
        """`known`: tokens of each slot that the sampler has counted; forced ones are for others to count."""
        self._program = program
        self._sampler = sampler
        self._builder = builder
        self._known = known
        self._particular: set[int] = set()  # slots with adapters, or of which steps give more than samples

    def add_row(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        if new.adapters or new.pooling is not None or new.sampling.prompt_logprobs is not None:
            self._particular.add(new.slot)

    def release_row(self, slot: int) -> None:
        """A slot is free again."""
        self._particular.discard(slot)

    def run(self, plan: StepPlan, masks: Any) -> StepResult | None:
        """The step's result; None, and nothing is changed, for one of another kind."""
        started = perf_counter()
        if self._particular or plan.new_sequences or plan.released_slots or plan.cache_ops or not plan.scheduled:
            return None
        slots: list[int] = []
        positions: list[int] = []  # of the tokens that are drawn
        for span in plan.scheduled:
            if span.draft_tokens or span.start >= self._known[span.slot]:
                return None  # or a forced token, which the sampler has to be told of
            slots.append(span.slot)
            positions.append(span.start + 1)
        if plan.encoder_work or plan.guidance or not self._program.fill(plan.scheduled):
            return None
        built = perf_counter()
        logits = self._program.run()
        computed = perf_counter()
        samples = self._sampler.draw(logits, slots, positions, None if masks is None else masks.of(slots))
        results: list[SlotResult] = []
        for slot, sample in zip(slots, samples, strict=True):
            self._known[slot] += 1
            if sample.tokens:
                self._builder.note_sample(slot, sample.tokens[0])
            result = SlotResult(slot, sample.tokens, sample.logprobs, (), sample.error)
            results.append(result._replace(sampler_state=sample.state) if sample.state else result)
        timings = StepTimings(built - started, computed - built, perf_counter() - computed)
        return StepResult(plan.step, tuple(results), (), (), (), timings)
