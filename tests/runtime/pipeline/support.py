"""Engines whose stages are threads of this process, each with the part of the model that a process would have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.options import EngineOptions
from penstock.core.policies.dealing import Staged
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.parallel.ranks import ALONE
from penstock.runtime.drafters.drafter import Drafter
from penstock.runtime.drafters.methods import drafting_of
from penstock.runtime.executor import Executor
from penstock.runtime.pipeline.lead import StagedSteps
from penstock.runtime.pipeline.links import QueueLink
from penstock.runtime.pipeline.stage import Stage
from penstock.runtime.pipeline.threads import StageThread
from penstock.runtime.ranks.group import NullGroup
from penstock.runtime.ranks.step_sizes import StepSizes
from penstock.startup.build_runner import fill, load, make_runner, rank_parts
from penstock.startup.engine_spec import EngineSpec, declare_rank, make_engine_spec
from penstock.startup.scheduling import scheduler_options
from penstock.structured.manager import StructuredOutputManager

Wrap = Callable[[int, Executor], Executor]


class ThreadedStages:
    """Takes the place of `startup.workers.Workers`: the other stages are threads."""

    def __init__(self, spec: EngineSpec, wrap: Wrap) -> None:
        self._spec, self._wrap = spec, wrap
        self.group = NullGroup()
        self._later: list[Stage] = []
        self._threads: list[StageThread] = []

    def make(self, sizes: StepSizes) -> None:
        spec = self._spec
        for number, part in enumerate(spec.stages[1:], 1):
            one = declare_rank(spec.options, spec.plan.max_model_len, ALONE, NullGroup(), part)
            fill(one)
            memory, _, executor = rank_parts(one, sizes)
            self._later.append(Stage(self._wrap(number, executor), memory, last=part.end is None))

    def behind(self, first: Stage, head: None) -> StagedSteps:
        first._executor = self._wrap(0, first._executor)
        stages = [first, *self._later]
        links = [QueueLink(2 * len(stages)) for _ in range(len(stages) + 1)]
        for stage, source, target in zip(stages, links[:-1], links[1:], strict=True):
            self._threads.append(StageThread(stage, source, target))
        return StagedSteps((links[0], links[-1]), len(stages), "staged", fast=False, close=self.close)

    def close(self) -> None:
        for thread in self._threads:
            thread.close()


def staged_engine(
    folder: Path,
    stages: int,
    *,
    least: int = 3,
    wrap: Wrap = lambda stage, executor: executor,
    drafter: Drafter | None = None,
    **more: Any,
) -> Engine:
    """An engine of so many stages; `least` tokens of prompts at least are in a step.

    `wrap` is given the number of each stage and its executor.
    """
    given: dict[str, Any] = {"dtype": "float32", "threads": stages, "max_num_seqs": 8, "kv_blocks": 200, **more}
    options = EngineOptions(model=str(folder), device="cpu", pipeline_parallel_size=stages, **given)
    drafting = drafting_of(options, drafter)
    spec, kv_types, _ = load(make_engine_spec(options, drafts=drafting.most))
    limits = scheduler_options(spec.options, spec.plan, whole_prompts=spec.model.whole_prompts)
    others = ThreadedStages(spec, wrap) if stages > 1 else None
    runner, _ = make_runner(spec, kv_types, limits.max_num_seqs, drafting, others)  # type: ignore[arg-type]
    scheduler = Scheduler(limits, spec.groups, dealing=Staged(limits, least) if stages > 1 else None)
    vocabulary = spec.model.vocab_size
    return Engine(scheduler, runner, StructuredOutputManager(vocabulary), None, drafting, vocabulary)
