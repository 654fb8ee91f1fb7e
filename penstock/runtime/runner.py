"""The model runner: one plan in, one forward pass and one round of sampling, one result out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.core.protocol import NewRow, RowResult, RowSpan, StepPlan, StepResult, StepTimings, TokenLogprobs
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import Executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.sampler import Draw, Sampler

PROMPT_LOGIT_ROWS = 128  # logits of scored prompts are computed that many at a time: [128, vocab] float32


@dataclass(frozen=True, slots=True)
class _Scored:
    """A span whose prompt tokens are scored: hidden rows first … first + len(targets) - 1 predict the targets."""

    row: int
    first: int
    targets: tuple[int, ...]
    top: int


class ModelRunner:
    """Implements `core.protocol.Runner` in this process. Plans are queued by `submit` and run, in order, by `sample`,

    so that a plan may refer to tokens which the one before it samples.
    """

    def __init__(self, executor: Executor, memory: KVMemory, sampler: Sampler, builder: BatchBuilder) -> None:
        self._executor = executor
        self._memory = memory
        self._sampler = sampler
        self._builder = builder
        self._queue: deque[StepPlan] = deque()
        self._new: dict[int, NewRow] = {}
        self._known: dict[int, int] = {}  # tokens of each row that the sampler has counted

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    @torch.inference_mode()
    def sample(self, step: int, masks: Any = None) -> StepResult:
        plan = self._queue.popleft()
        if plan.step != step:
            raise ValueError(f"step {step} was asked for while step {plan.step} is the oldest outstanding")
        started = perf_counter()
        self._apply_rows(plan)
        for op in plan.cache_ops:
            self._memory.apply(op)
        self._count_forced(plan)
        ends, scored = self._wanted_logits(plan)
        total = sum(len(span.tokens) for span in plan.spans)
        batch = self._builder.build(plan.spans, range(total) if scored else ends)
        built = perf_counter()
        self._executor.forward(batch)
        logits = self._executor.logits(torch.tensor(ends) if scored else torch.arange(len(ends))) if ends else None
        computed = perf_counter()
        rows = self._draw(plan, logits, masks)
        for entry in scored:
            result = rows.get(entry.row, RowResult(entry.row))
            rows[entry.row] = RowResult(entry.row, result.tokens, result.logprobs, self._score(entry), result.error)
        timings = StepTimings(built - started, computed - built, perf_counter() - computed)
        return StepResult(step, tuple(rows.values()), timings=timings)

    def abort(self) -> None:
        self._queue.clear()

    def close(self) -> None:
        self._queue.clear()
        self._new.clear()
        self._memory.close()

    def _apply_rows(self, plan: StepPlan) -> None:
        for row in plan.released_rows:
            if self._new.pop(row, None) is not None:
                self._sampler.release_row(row)
        for new in plan.new_rows:
            if self._new.pop(new.row, None) is not None:  # its release was lost with a step that failed
                self._sampler.release_row(new.row)
            self._new[new.row] = new
            self._known[new.row] = len(new.prompt_ids) + len(new.generated_ids)
            self._sampler.add_row(new)
            self._builder.add_row(new)

    def _count_forced(self, plan: StepPlan) -> None:
        """Tokens that come in a span without having been sampled were forced: the sampler's penalties count them."""
        for span in plan.spans:
            known = self._known[span.row]
            if span.start + len(span.tokens) > known:
                self._sampler.extend(span.row, span.tokens[known - span.start :])
                self._known[span.row] = span.start + len(span.tokens)

    def _wanted_logits(self, plan: StepPlan) -> tuple[list[int], list[_Scored]]:
        """Rows of the hidden states to sample from, and spans whose prompt tokens are to be scored."""
        ends: list[int] = []
        scored: list[_Scored] = []
        first = 0
        for span in plan.spans:
            if span.sample:
                ends.append(first + len(span.tokens) - 1)
            new = self._new[span.row]
            top = new.sampling.prompt_logprobs
            if top is not None and new.branch == 0 and (targets := self._targets(new, span)):
                scored.append(_Scored(span.row, first, targets, top))
            first += len(span.tokens)
        return ends, scored

    def _targets(self, new: NewRow, span: RowSpan) -> tuple[int, ...]:
        return new.prompt_ids[span.start + 1 : span.start + len(span.tokens) + 1]

    def _draw(self, plan: StepPlan, logits: Tensor | None, masks: Any) -> dict[int, RowResult]:
        if logits is None:
            return {}
        draws = [Draw(span.row, span.start + len(span.tokens)) for span in plan.spans if span.sample]
        results: dict[int, RowResult] = {}
        for draw, sample in zip(draws, self._sampler.sample(logits, draws, masks), strict=True):
            if sample.error is not None:
                results[draw.row] = RowResult(draw.row, error=sample.error)
                continue
            self._builder.note_sample(draw.row, sample.token)
            self._known[draw.row] += 1
            logprobs = () if sample.logprobs is None else (sample.logprobs,)
            results[draw.row] = RowResult(draw.row, (sample.token,), logprobs)
        return results

    def _score(self, entry: _Scored) -> tuple[TokenLogprobs, ...]:
        scores: list[TokenLogprobs] = []
        for begin in range(0, len(entry.targets), PROMPT_LOGIT_ROWS):
            targets = entry.targets[begin : begin + PROMPT_LOGIT_ROWS]
            start = entry.first + begin
            logits = self._executor.logits(torch.arange(start, start + len(targets)))
            scores += self._sampler.prompt_logprobs(logits, targets, entry.top)
        return tuple(scores)
